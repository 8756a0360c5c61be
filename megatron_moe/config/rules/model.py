"""Rules about the model: the transformer, and router, experts and load balancing. E experts, K per token."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from megatron_moe.config import schema
from megatron_moe.config.fields import all_fields
from megatron_moe.config.model_flags import NO_LOSSES, QUANTILE
from megatron_moe.config.rules.rule import (
    Refusal,
    divisors,
    is_set,
    nearest_multiples,
    refuse,
    rule,
    set_among,
    stage_flags,
    unread,
)
from megatron_moe.config.schema import Run

refuse(
    "sequence_fits_positions",
    ("seq_length", "max_position_embeddings"),
    lambda run: (
        f"the sequence has more positions; use --max-position-embeddings {run.model.seq_length} or a shorter sequence"
    ),
    when=lambda run: (
        run.derived.max_position_embeddings
        < run.model.seq_length
        <= (run.model.dsa_indexer_topk or run.model.seq_length)
    ),
)
refuse(  # then the selection is of all keys before a query
    "sparse_attention_is_whole",
    ("seq_length", "dsa_indexer_topk"),
    lambda run: (
        "this model's attention reads a selection of so many keys, and attention here reads them all, which is the"
        f" same up to that length; use --seq-length {run.model.dsa_indexer_topk} or less"
    ),
    when=lambda run: run.model.seq_length > (run.model.dsa_indexer_topk or run.model.seq_length),
)


@rule()
def padded_vocabulary_holds_its_tokens(run: Run) -> None:
    """Require a row for each token in a table of a given size, and equal shares; see `derived.padded_vocab_size`."""
    # A tokenizer's vocabulary is not known before the tokenizer is read (training/plan.py).
    run.derived.padded_vocab_size(run.model.vocab_size or 1)


unread(
    ("mtp_loss_scaling_factor",),
    "mtp_num_layers",
    "only multi-token prediction reads this; add --mtp-num-layers 1 or drop it",
    in_megatron=True,
)
refuse(  # depth k predicts k + 1 tokens ahead
    "predictions_fit_the_sequence",
    ("mtp_num_layers", "seq_length"),
    lambda run: (
        f"the last depths would have no target; use --mtp-num-layers {max(run.model.seq_length - 1, 1)} or less"
    ),
    when=lambda run: (run.model.mtp_num_layers or 0) >= run.model.seq_length,
)


@rule()
def moe_flags_need_experts(run: Run) -> None:
    """Refuse MoE flags in a dense model, which reads none of them."""
    if run.moe.num_experts is not None:
        return
    of_experts = [name for name, field in all_fields().items() if field.section == "moe"]
    stray = [name for name in of_experts if is_set(run, name) or name in run.explicit]
    stray += set_among(run, ("expert_model_parallel_size", "expert_tensor_parallel_size"))
    if stray:
        raise Refusal(
            (*stray, "num_experts"), "has no effect on a dense model; add --num-experts, e.g. 8, or drop the flag"
        )


refuse(
    "layer_pattern_fits",
    ("moe_layer_freq", "num_experts"),
    "no layer would be a MoE layer; put a 1 into the pattern or drop --num-experts",
    when=lambda run: run.moe.num_experts is not None and not any(run.derived.moe_layer_pattern),
)
refuse(
    "topk_within_experts",
    ("moe_router_topk", "num_experts"),
    lambda run: f"a token cannot use more experts than there are; use --moe-router-topk {run.moe.num_experts} or less",
    when=lambda run: run.moe.num_experts is not None and run.moe.moe_router_topk > run.moe.num_experts,
)


@rule()
def grouped_products_are_aligned(run: Run) -> None:
    """Require widths that torch's grouped product takes: rows of whole 16 bytes."""
    if run.moe.num_experts is None or run.moe.moe_expert_backend != "grouped_mm":
        return
    full, ranks = run.derived.moe_ffn_hidden_size, run.derived.expert_tensor_parallel_size
    if full % ranks:
        return  # has a rule of its own
    refusal = schema.grouped_product_refusal(run.derived.params_dtype_name, run.model.hidden_size, full // ranks)
    if refusal is not None:
        raise Refusal(("moe_expert_backend", "hidden_size", "moe_ffn_hidden_size"), refusal)


@rule()
def groups_serve_the_choice(run: Run) -> None:
    """Require both flags of group-limited routing, equal groups, and that the chosen ones hold a token's K experts."""
    experts, topk = run.moe.num_experts, run.moe.moe_router_topk
    groups, group_topk = run.moe.moe_router_num_groups, run.moe.moe_router_group_topk
    if experts is None or (groups is None and group_topk is None):
        return
    if groups is None:
        raise Refusal(
            ("moe_router_group_topk", "moe_router_num_groups"),
            f"say how many groups there are, e.g. --moe-router-num-groups {2 * (group_topk or 1)}",
        )
    if group_topk is None:
        raise Refusal(
            ("moe_router_num_groups", "moe_router_group_topk"),
            f"say how many groups a token may use, e.g. --moe-router-group-topk {(groups + 1) // 2}, or drop them",
        )
    if experts % groups:
        raise Refusal(
            ("moe_router_num_groups", "num_experts"),
            f"the experts must divide by the groups; use --moe-router-num-groups out of {divisors(experts)}",
        )
    if group_topk > groups:
        raise Refusal(
            ("moe_router_group_topk", "moe_router_num_groups"),
            f"a token cannot use more groups than there are; use --moe-router-group-topk {groups} or less",
        )
    if topk < group_topk:
        raise Refusal(
            ("moe_router_topk", "moe_router_group_topk"),
            f"some chosen groups would give no expert; use --moe-router-group-topk {topk} or less",
        )
    reachable = experts // groups * group_topk
    if topk > reachable:
        raise Refusal(
            ("moe_router_topk", "moe_router_group_topk", "moe_router_num_groups", "num_experts"),
            f"the chosen groups hold only {reachable} experts; use --moe-router-topk {reachable} or choose more groups",
        )
    if experts // groups < 2 and run.moe.moe_router_group_score == "top2":
        raise Refusal(
            ("moe_router_group_score", "moe_router_num_groups", "num_experts"),
            f"a group has {experts // groups} expert and needs two; use --moe-router-group-score max or fewer groups",
        )


unread(
    ("moe_router_group_score",),
    "moe_router_num_groups",
    "there are no groups to score; drop it, or add --moe-router-num-groups and --moe-router-group-topk",
)
unread(
    ("moe_router_bias_update_rate", "moe_router_bias_center"),
    "moe_router_enable_expert_bias",
    "there is no bias to update; add --moe-router-enable-expert-bias or drop the flag",
    in_megatron=True,
    refused_there=("moe_router_bias_center",),
)
unread(
    ("moe_router_bias_update_rate", "moe_router_bias_center"),
    "moe_router_load_balancing_type",
    "quantile_balancing sets the bias and does not step it; drop the flag",
    is_read=lambda run: not _balances_by(run, QUANTILE),
    in_megatron=True,
    refused_there=("moe_router_bias_center",),
)
unread(
    ("moe_router_pre_softmax",),
    "moe_router_score_function",
    "there is no softmax to place; drop --moe-router-pre-softmax or use --moe-router-score-function softmax",
    at="softmax",
    in_megatron=True,
)


def _balances_by(run: Run, kind: str) -> bool:
    return kind in run.moe.moe_router_load_balancing_type


def _normalises_chosen(run: Run) -> bool:
    return run.moe.moe_router_score_function == "softmax" and not run.moe.moe_router_pre_softmax


refuse(
    "single_expert_needs_pre_softmax",
    ("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    "a softmax over one expert is always 1 and teaches the gate nothing; add --moe-router-pre-softmax",
    when=lambda run: (
        run.moe.num_experts is not None
        and run.moe.moe_router_topk == 1
        and _normalises_chosen(run)
        and not _balances_by(run, "sinkhorn")  # weighs by the sigmoid
    ),
)
refuse(
    "softmax_over_chosen_is_normalised",
    ("moe_router_norm_topk_prob", "moe_router_score_function", "moe_router_pre_softmax"),
    "a softmax over the chosen experts sums to one by itself; add --moe-router-pre-softmax",
    when=lambda run: run.moe.moe_router_norm_topk_prob is False and _normalises_chosen(run),
)


@rule()
def balancing_lists_match(run: Run) -> None:
    """Require one coefficient above 0 per auxiliary loss, each given once; what has none stands alone."""
    kinds, coeffs = run.moe.moe_router_load_balancing_type, run.moe.moe_aux_loss_coeff
    if len(kinds) != len(coeffs):
        raise Refusal(
            ("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
            f"{len(kinds)} losses and {len(coeffs)} coefficients; give one coefficient per loss",
        )
    if len(set(kinds)) != len(kinds) or (len(kinds) > 1 and NO_LOSSES & set(kinds)):
        raise Refusal(
            ("moe_router_load_balancing_type",),
            "name each loss once, and what is no loss only alone; e.g. aux_loss seq_aux_loss",
        )
    for kind, coeff in zip(kinds, coeffs):
        if kind in NO_LOSSES and coeff:
            raise Refusal(
                ("moe_aux_loss_coeff", "moe_router_load_balancing_type"),
                "the coefficient would be ignored; add --moe-router-load-balancing-type aux_loss, which --defaults"
                " megatron takes too, or drop it",
            )
        if kind not in NO_LOSSES and not coeff:
            raise Refusal(
                ("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
                f"{kind} with coefficient 0 does nothing; give one, e.g. --moe-aux-loss-coeff 0.01, or use type none",
            )


unread(
    ("moe_global_aux_loss_counts",),
    "moe_router_load_balancing_type",
    "only global_aux_loss reads it; add --moe-router-load-balancing-type global_aux_loss or drop the flag",
    is_read=lambda run: _balances_by(run, "global_aux_loss"),
)
unread(
    ("moe_seq_aux_loss_per",),
    "moe_router_load_balancing_type",
    "only seq_aux_loss reads it; add --moe-router-load-balancing-type seq_aux_loss or drop the flag",
    is_read=lambda run: _balances_by(run, "seq_aux_loss"),
)
refuse(
    "losses_per_document_need_documents",
    ("moe_seq_aux_loss_per", "reset_attention_mask"),
    "documents are not told apart; add --reset-attention-mask, or use --moe-seq-aux-loss-per sequence",
    when=lambda run: run.moe.moe_seq_aux_loss_per == "document" and not run.data.reset_attention_mask,
)
refuse(
    "sinkhorn_chooses_by_itself",
    ("moe_router_load_balancing_type",),
    "sinkhorn chooses by the logits and weighs by their sigmoid (K = 1) or softmax over all experts; drop the"
    " flags, e.g. by --moe-router-score-function softmax --no-moe-router-enable-expert-bias, or use"
    " --moe-router-load-balancing-type aux_loss",
    when=lambda run: _balances_by(run, "sinkhorn"),
    any_of=(
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_norm_topk_prob",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_enable_expert_bias",
    ),
)
refuse(
    "sinkhorn_has_no_capacity",
    ("moe_expert_capacity_factor", "moe_router_load_balancing_type"),
    "sinkhorn's choice is even already, and megatron-core refuses both; drop the capacity or use"
    " --moe-router-load-balancing-type aux_loss",
    when=lambda run: run.moe.moe_expert_capacity_factor is not None and _balances_by(run, "sinkhorn"),
)
unread(
    ("moe_router_quantile_balancing_ema", "moe_router_quantile_balancing_num_bins"),
    "moe_router_load_balancing_type",
    "only quantile_balancing reads it; add --moe-router-load-balancing-type quantile_balancing or drop the flag",
    is_read=lambda run: _balances_by(run, QUANTILE),
    in_megatron=True,
)
refuse(
    "quantiles_set_the_expert_bias",
    ("moe_router_load_balancing_type", "moe_router_enable_expert_bias"),
    "quantile_balancing sets the expert bias; add --moe-router-enable-expert-bias",
    when=lambda run: _balances_by(run, QUANTILE) and not run.moe.moe_router_enable_expert_bias,
)
refuse(
    "quantiles_are_of_sigmoids",
    ("moe_router_load_balancing_type", "moe_router_score_function"),
    "the histogram is made for scores from 0 to 1 that do not shrink with the number of experts; use"
    " --moe-router-score-function sigmoid",
    when=lambda run: _balances_by(run, QUANTILE) and run.moe.moe_router_score_function != "sigmoid",
)
refuse(
    "quantiles_are_of_one_group",
    ("moe_router_load_balancing_type", "moe_router_num_groups"),
    "a token's threshold is its best score that is not chosen, among all experts; use"
    " --moe-router-num-groups none --moe-router-group-topk none",
    when=lambda run: _balances_by(run, QUANTILE) and (run.moe.moe_router_num_groups or 1) > 1,
)
refuse(
    "quantiles_need_an_expert_left",
    ("moe_router_load_balancing_type", "moe_router_topk", "num_experts"),
    "every token chooses all experts, and there is nothing to balance; use --moe-router-load-balancing-type none",
    when=lambda run: _balances_by(run, QUANTILE) and run.moe.moe_router_topk == run.moe.num_experts,
)
unread(
    ("moe_token_drop_policy", "moe_pad_expert_input_to_capacity"),
    "moe_expert_capacity_factor",
    "experts take all their tokens; add --moe-expert-capacity-factor, e.g. 1.25, or drop the flag",
    in_megatron=True,
    refused_there=("moe_pad_expert_input_to_capacity",),
)
refuse(
    "forced_balance_is_not_saved",
    ("moe_router_force_load_balancing", "save"),
    "it is for benchmarks: the router's choice is not used, and what comes of it is no model; drop --save, or the flag",
    when=lambda run: run.moe.moe_router_force_load_balancing and run.checkpoint.save is not None,
)
refuse(
    "forced_balance_is_the_only_choice",
    ("moe_router_force_load_balancing", "moe_router_load_balancing_type"),
    "round robin takes the place of the balanced choice; use --moe-router-load-balancing-type none",
    when=lambda run: (
        run.moe.moe_router_force_load_balancing and {"sinkhorn", QUANTILE} & set(run.moe.moe_router_load_balancing_type)
    ),
)
refuse(
    "a_dense_model_has_no_routes",
    ("moe_routing_trace_path",),
    "there is no router to record; add --num-experts, e.g. 8, or drop the flag",
    when=lambda run: run.moe.num_experts is None and run.logging.moe_routing_trace_path is not None,
)
unread(
    ("moe_routing_replay_missing", "moe_routing_replay_counts"),
    "moe_enable_routing_replay",
    "no routes are replayed; add --moe-enable-routing-replay PATH, or drop it",
)
refuse(
    "quantiles_are_of_the_gates",
    ("moe_router_load_balancing_type", "moe_routing_replay_counts", "moe_enable_routing_replay"),
    "quantiles are of the gates' scores, not of replayed choices; add --moe-routing-replay-counts live",
    when=lambda run: (
        _balances_by(run, QUANTILE)
        and run.moe.moe_enable_routing_replay is not None
        and run.moe.moe_routing_replay_counts == "replayed"
    ),
)
refuse(
    "forced_balance_replays_nothing",
    ("moe_router_force_load_balancing", "moe_enable_routing_replay"),
    "round robin and the recorded routes are two choices; drop one of them",
    when=lambda run: run.moe.moe_router_force_load_balancing and run.moe.moe_enable_routing_replay is not None,
)


def _trace_moves_replayed(run: Run) -> bool:
    """Return whether recording may move or replace the routes that are replayed; a new run renames older ones."""
    trace, replayed = run.logging.moe_routing_trace_path, run.moe.moe_enable_routing_replay
    if trace is None or replayed is None:
        return False
    read, folder = Path(replayed).resolve(), Path(trace).resolve()
    written = (folder, folder.with_name(f"{folder.name}.previous"))
    return any(read.is_relative_to(one) for one in written) or folder.is_relative_to(read)


refuse(
    "replayed_routes_are_not_overwritten",
    ("moe_routing_trace_path", "moe_enable_routing_replay"),
    "files that are read are not written, and older ones of the folder are moved to NAME.previous; name another folder"
    " for the new routes",
    when=_trace_moves_replayed,
)


@rule()
def forced_balance_is_even(run: Run) -> None:
    """Require for round robin that the experts divide a micro-batch's choices, so that each gets equally many."""
    moe = run.moe
    if moe.num_experts is None or not moe.moe_router_force_load_balancing:
        return
    of_sequence = run.model.seq_length * moe.moe_router_topk
    choices = run.training.micro_batch_size * of_sequence
    if choices % moe.num_experts:
        raise Refusal(
            ("moe_router_force_load_balancing", "micro_batch_size", "seq_length", "moe_router_topk", "num_experts"),
            f"a micro-batch's {choices} choices do not divide by the experts; use a --micro-batch-size that is a"
            f" multiple of {moe.num_experts // math.gcd(moe.num_experts, of_sequence)}, or another sequence length",
        )


unread(
    ("moe_shared_expert_gate", "moe_shared_expert_overlap"),
    "moe_shared_expert_intermediate_size",
    "there is no shared expert; add --moe-shared-expert-intermediate-size or drop the flag",
    in_megatron=True,
)


@rule()
def shared_expert_stays_on_its_stream(run: Run) -> None:
    """Refuse to overlap a shared expert that another setting takes off its stream."""
    if not run.moe.moe_shared_expert_overlap:
        return
    if "shared_experts" in run.derived.recomputed_modules:
        raise Refusal(
            ("moe_shared_expert_overlap", "recompute_modules"),
            "the shared expert alone is not recomputed on a stream of its own, in Megatron-LM neither; recompute moe,"
            " or drop one of the two",
        )
    if run.derived.zero_stage >= 2:
        raise Refusal(
            ("moe_shared_expert_overlap", *stage_flags(run)),
            "weights and gradients that are gathered and freed on streams of their own were not made to wait for the"
            " shared expert's; use --data-parallel-sharding-strategy optim, or drop the flag",
        )


@rule()
def alltoall_by_node_can_work(run: Run) -> None:
    """Require for the exchange in two stages the all-to-all, with whole experts on other ranks.

    How many ranks a node has, `training.plan.check_start` knows.
    """
    flag = "moe_alltoall_by_node"
    if not run.moe.moe_alltoall_by_node:
        return
    if run.moe.moe_token_dispatcher_type != "alltoall":
        raise Refusal(
            (flag, "moe_token_dispatcher_type"),
            "it is the all-to-all's (HybridEP does the same); use --moe-token-dispatcher-type alltoall, or drop it",
        )
    if run.parallel.expert_model_parallel_size == 1:
        raise Refusal(
            (flag, "expert_model_parallel_size"),
            "all experts are on each rank; use an --expert-model-parallel-size of several nodes, or drop it",
        )
    if run.derived.expert_tensor_parallel_size > 1:
        raise Refusal(
            (flag, "tensor_model_parallel_size", "expert_tensor_parallel_size"),
            "a copy goes to one rank, and not to several that share an expert; use --expert-tensor-parallel-size 1, or"
            " drop it",
        )


@rule()
def flex_flags_agree(run: Run) -> None:
    """Refuse the settings of a library of the flex dispatcher without the dispatcher, or with another library."""
    kind, library = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
    own = {"deepep": ("moe_enable_deepep", "moe_deepep_num_sms"), "hybridep": ("moe_hybridep_num_sms",)}
    stray = set_among(run, (library, *own["deepep"], *own["hybridep"]))
    if run.moe.moe_token_dispatcher_type != "flex":
        if stray:
            raise Refusal((*stray, kind), "it is the flex dispatcher's; add --moe-token-dispatcher-type flex")
        return
    chosen = run.moe.moe_flex_dispatcher_backend
    for name in ("deepep", "hybridep"):
        stray = set_among(run, own[name])
        if stray and name != chosen:
            raise Refusal((*stray, library), f"use --moe-flex-dispatcher-backend {name}, or drop the flag")
    if (run.moe.moe_deepep_num_sms or 0) % 2:
        raise Refusal(("moe_deepep_num_sms",), "DeepEP takes an even number; e.g. --moe-deepep-num-sms 20")


@rule(asks_for_package=True)
def flex_dispatcher_can_work(run: Run) -> None:
    """Require for the flex dispatcher what DeepEP and HybridEP work with, and their package."""
    kind = "moe_token_dispatcher_type"
    if run.moe.moe_token_dispatcher_type != "flex":
        return
    if run.parallel.expert_model_parallel_size == 1:
        raise Refusal(
            (kind, "expert_model_parallel_size"),
            "there is no other rank to send tokens to; use --expert-model-parallel-size 2 or more, or alltoall",
        )
    if run.derived.expert_tensor_parallel_size > 1:
        raise Refusal(
            (kind, "tensor_model_parallel_size", "expert_tensor_parallel_size"),
            "a token is sent to a rank once, and not to several that share an expert; use"
            " --expert-tensor-parallel-size 1, or --moe-token-dispatcher-type alltoall",
        )
    if not run.precision.bf16:
        raise Refusal((kind, "bf16"), "it sends bf16; add --bf16, or use --moe-token-dispatcher-type alltoall")
    if importlib.util.find_spec("deep_ep") is None:
        raise Refusal(
            (kind, "moe_flex_dispatcher_backend"),
            "the package deep_ep is not installed (github.com/deepseek-ai/DeepEP); install it, or use"
            " --moe-token-dispatcher-type alltoall",
            package=True,
        )


refuse(
    "experts_are_gated",
    ("swiglu", "num_experts"),
    "experts are gated MLPs; use --swiglu or --quick-geglu, or a dense model",
    when=lambda run: run.moe.num_experts is not None and not run.derived.gated,
)
unread(
    ("glu_linear_offset", "activation_func_clamp_value"),
    ("swiglu", "quick_geglu"),
    "only gated layers read these; add --swiglu or --quick-geglu, or drop them",
    is_read=lambda run: run.derived.gated,
    in_megatron=True,
)


def _plain_experts(run: Run) -> bool:
    m = run.model
    return not (m.add_bias_linear or m.quick_geglu or m.glu_linear_offset or m.activation_func_clamp_value)


@rule()
def biased_experts_can_work(run: Run) -> None:
    """Refuse what was made for experts without biases and with plain SwiGLU."""
    if run.moe.num_experts is None or _plain_experts(run):
        return
    names = set_among(run, ("add_bias_linear", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value"))
    if run.derived.fp8_format_of_experts is not None:
        raise Refusal(
            (*names, "fp8_format", "fp8_modules"),
            "experts in FP8 are plain SwiGLU without biases; use --fp8-modules without experts",
        )
    if run.moe.overlap_moe_expert_parallel_comm:
        raise Refusal(
            (*names, "overlap_moe_expert_parallel_comm"),
            "two micro-batches at a time were not tried with such experts; drop --overlap-moe-expert-parallel-comm",
        )
    if run.model.multi_latent_attention and run.model.add_bias_linear:
        raise Refusal(
            ("add_bias_linear", "multi_latent_attention"),
            "biases were not tried with latent attention and experts; use --disable-bias-linear",
        )
    ranks = run.derived.expert_tensor_parallel_size
    if run.model.add_bias_linear and run.model.hidden_size % ranks:
        raise Refusal(
            ("add_bias_linear", "hidden_size", "expert_tensor_parallel_size"),
            f"each of {ranks} ranks adds its share of an expert's bias; use"
            f" --hidden-size {nearest_multiples(run.model.hidden_size, ranks)}",
        )
