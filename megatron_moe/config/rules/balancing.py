"""Rules about what keeps the experts evenly used beside the auxiliary losses: sinkhorn, capacity, round robin."""

from __future__ import annotations

import math

from megatron_moe.config.rules.wording import refuse, set_among
from megatron_moe.config.schema import Run

_IGNORED_BY_SINKHORN = (
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_norm_topk_prob",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_enable_expert_bias",
)


def global_counts_need_the_global_loss(run: Run, world_size: int) -> None:
    """Which counts the global loss goes by is no question without it."""
    if set_among(run, ("moe_global_aux_loss_counts",)) and not _balances_by(run, "global_aux_loss"):
        raise refuse(
            run,
            ("moe_global_aux_loss_counts", "moe_router_load_balancing_type"),
            "only global_aux_loss reads it; add --moe-router-load-balancing-type global_aux_loss or drop the flag",
        )


def sinkhorn_chooses_by_itself(run: Run, world_size: int) -> None:
    """Sinkhorn normalises logits over experts and tokens; scores, groups and a bias have no place in that."""
    stray = set_among(run, _IGNORED_BY_SINKHORN)
    if stray and _balances_by(run, "sinkhorn"):
        raise refuse(
            run,
            (*stray, "moe_router_load_balancing_type"),
            "sinkhorn chooses by the logits and weighs by their sigmoid (K = 1) or softmax over all experts; drop the"
            " flags, e.g. by --moe-router-score-function softmax --no-moe-router-enable-expert-bias, or use"
            " --moe-router-load-balancing-type aux_loss",
        )


def sinkhorn_has_no_capacity(run: Run, world_size: int) -> None:
    """The engine takes a capacity with auxiliary losses or none only."""
    if run.moe.moe_expert_capacity_factor is not None and _balances_by(run, "sinkhorn"):
        raise refuse(
            run,
            ("moe_expert_capacity_factor", "moe_router_load_balancing_type"),
            "sinkhorn's choice is even already, and megatron-core refuses both; drop the capacity or use"
            " --moe-router-load-balancing-type aux_loss",
        )


def dropping_flags_need_a_capacity(run: Run, world_size: int) -> None:
    """Without a capacity no choice is dropped, and there is nothing to pad to."""
    stray = set_among(run, ("moe_token_drop_policy", "moe_pad_expert_input_to_capacity"))
    if stray and run.moe.moe_expert_capacity_factor is None:
        raise refuse(
            run,
            (*stray, "moe_expert_capacity_factor"),
            "experts take all their tokens; add --moe-expert-capacity-factor, e.g. 1.25, or drop the flag",
        )


def forced_balance_is_not_saved(run: Run, world_size: int) -> None:
    """Tokens sent round robin train no router: such weights must not be mistaken for a model's."""
    if run.moe.moe_router_force_load_balancing and run.checkpoint.save is not None:
        raise refuse(
            run,
            ("moe_router_force_load_balancing", "save"),
            "it is for benchmarks: the router's choice is not used, and what comes of it is no model; drop --save, or"
            " the flag",
        )


def forced_balance_is_the_only_choice(run: Run, world_size: int) -> None:
    """Two ways to choose experts are one too many."""
    if run.moe.moe_router_force_load_balancing and _balances_by(run, "sinkhorn"):
        raise refuse(
            run,
            ("moe_router_force_load_balancing", "moe_router_load_balancing_type"),
            "round robin takes the place of sinkhorn's choice; use --moe-router-load-balancing-type none",
        )


def forced_balance_is_even(run: Run, world_size: int) -> None:
    """Round robin gives every expert the same number only where the experts divide a micro-batch's choices."""
    moe = run.moe
    if moe.num_experts is None or not moe.moe_router_force_load_balancing:
        return
    of_sequence = run.model.seq_length * moe.moe_router_topk
    choices = run.training.micro_batch_size * of_sequence
    if choices % moe.num_experts:
        raise refuse(
            run,
            ("moe_router_force_load_balancing", "micro_batch_size", "seq_length", "moe_router_topk", "num_experts"),
            f"a micro-batch's {choices} choices do not divide by the experts; use a --micro-batch-size that is a"
            f" multiple of {moe.num_experts // math.gcd(moe.num_experts, of_sequence)}, or another sequence length",
        )


def _balances_by(run: Run, kind: str) -> bool:
    return kind in run.moe.moe_router_load_balancing_type
