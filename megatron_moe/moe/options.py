"""What the MoE room needs to know, read once from the engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_moe.moe.recompute import recomputes

_ROUTER_DTYPES = {None: torch.float32, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class MoEOptions:
    """Choices of one MoE layer. Sizes are global: E experts, K per token, F the width of an expert."""

    num_experts: int
    topk: int
    hidden_size: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int | None
    shared_gate: bool
    score_function: str
    pre_softmax: bool
    norm_topk_prob: bool
    num_groups: int | None
    group_topk: int | None
    group_score: str
    scaling_factor: float | None
    enable_expert_bias: bool
    bias_update_rate: float
    bias_center: bool
    router_dtype: torch.dtype
    aux_losses: tuple[tuple[str, float], ...]
    z_loss_coeff: float
    global_counts: str
    sinkhorn: bool
    force_load_balancing: bool
    input_jitter_eps: float | None
    capacity_factor: float | None
    drop_policy: str
    pad_to_capacity: bool
    per_token_loss: bool
    dispatcher: str
    backend: str
    recompute: bool
    recompute_activation: bool
    recompute_shared_experts: bool

    @property
    def chooses_by_score(self) -> bool:
        """Whether a token's experts depend on its own scores and the bias alone, also in training."""
        return not (self.sinkhorn or self.force_load_balancing)

    @classmethod
    def from_engine_config(cls, config: Any) -> MoEOptions:
        """Read the options from megatron-core's TransformerConfig.

        A plain TransformerConfig works: it lacks the fields that this project adds (probability normalisation, expert
        backend, centred bias, counts of the global loss), which then take the defaults of `config/schema.py`. Without
        the group score, groups are scored as megatron-core scores them, and not by that default. The gate is computed
        in fp32 unless the configuration asks for fp64; there is no way to ask for less. Sinkhorn brings weights of its
        own, Megatron-LM's: the sigmoid for K = 1, else the softmax over all experts, not normalised.

        Raises:
            ValueError: a score function that is not computed here (megatron-core 0.19.2 has a third one), or
                megatron-core's group score with fewer experts per token than groups, of which it would choose any.
        """
        topk = config.moe_router_topk
        sigmoid = config.moe_router_score_function == "sigmoid"
        norm_topk_prob = getattr(config, "moe_router_norm_topk_prob", None)
        if norm_topk_prob is None:  # Megatron-LM's rule
            norm_topk_prob = topk > 1 if sigmoid else not config.moe_router_pre_softmax
        kinds, coeffs = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        coeffs = [coeffs] * len(kinds) if isinstance(coeffs, (int, float)) else list(coeffs)
        score_function, pre_softmax = _score_function(config), config.moe_router_pre_softmax
        if "sinkhorn" in kinds:
            score_function, pre_softmax = "sigmoid" if topk == 1 else "softmax", topk > 1
            norm_topk_prob = False
        return cls(
            num_experts=config.num_moe_experts,
            topk=topk,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
            shared_ffn_hidden_size=config.moe_shared_expert_intermediate_size,
            shared_gate=bool(getattr(config, "moe_shared_expert_gate", False)),
            score_function=score_function,
            pre_softmax=pre_softmax,
            norm_topk_prob=norm_topk_prob,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            group_score=_group_score(config),
            scaling_factor=config.moe_router_topk_scaling_factor,
            enable_expert_bias=config.moe_router_enable_expert_bias,
            bias_update_rate=config.moe_router_bias_update_rate,
            bias_center=bool(getattr(config, "moe_router_bias_center", False)),
            router_dtype=_ROUTER_DTYPES[config.moe_router_dtype],
            aux_losses=tuple((k, c) for k, c in zip(kinds, coeffs) if k != "none" and c),
            z_loss_coeff=config.moe_z_loss_coeff or 0.0,
            global_counts=getattr(config, "moe_global_aux_loss_counts", "batch"),
            sinkhorn="sinkhorn" in kinds,
            force_load_balancing=bool(config.moe_router_force_load_balancing),
            input_jitter_eps=config.moe_input_jitter_eps,
            capacity_factor=config.moe_expert_capacity_factor,
            drop_policy=config.moe_token_drop_policy,
            pad_to_capacity=config.moe_pad_expert_input_to_capacity,
            per_token_loss=config.calculate_per_token_loss,
            dispatcher=config.moe_token_dispatcher_type,
            backend=getattr(config, "moe_expert_backend", "grouped_mm"),
            recompute=recomputes(config, "moe"),
            recompute_activation=recomputes(config, "moe_act"),
            recompute_shared_experts=recomputes(config, "shared_experts"),
        )


def _score_function(config: Any) -> str:
    name = config.moe_router_score_function
    if name not in ("softmax", "sigmoid"):
        raise ValueError(f"moe_router_score_function {name}: our router has softmax and sigmoid")
    return name


def _group_score(config: Any) -> str:
    """The rule that scores groups of experts: megatron-core's own where the configuration is a plain one of its."""
    rule = getattr(config, "moe_router_group_score", "megatron")
    topk, group_topk = config.moe_router_topk, config.moe_router_group_topk
    if rule == "megatron" and group_topk is not None and topk < group_topk:
        raise ValueError(
            f"moe_router_topk {topk}, moe_router_group_topk {group_topk}: megatron-core's score of a group adds up its "
            f"best topk // group_topk = 0 experts and is 0 for all groups; a moe_router_group_topk of {topk} or less "
            'works, or moe_router_group_score "max" or "top2"'
        )
    return rule
