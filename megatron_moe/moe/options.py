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
    per_token_loss: bool
    dispatcher: str
    backend: str
    recompute: bool
    recompute_activation: bool
    recompute_shared_experts: bool

    @classmethod
    def from_engine_config(cls, config: Any) -> MoEOptions:
        """Read the options from megatron-core's TransformerConfig.

        A plain TransformerConfig works: it lacks the fields that this project adds (group score, probability
        normalisation, expert backend, centred bias), which then take the defaults of `config/schema.py`. The gate is
        computed in fp32 unless the configuration asks for fp64; there is no way to ask for less.
        """
        topk = config.moe_router_topk
        sigmoid = config.moe_router_score_function == "sigmoid"
        norm_topk_prob = getattr(config, "moe_router_norm_topk_prob", None)
        if norm_topk_prob is None:  # Megatron-LM's rule
            norm_topk_prob = topk > 1 if sigmoid else not config.moe_router_pre_softmax
        kinds, coeffs = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        coeffs = [coeffs] * len(kinds) if isinstance(coeffs, (int, float)) else list(coeffs)
        return cls(
            num_experts=config.num_moe_experts,
            topk=topk,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
            shared_ffn_hidden_size=config.moe_shared_expert_intermediate_size,
            shared_gate=bool(getattr(config, "moe_shared_expert_gate", False)),
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            norm_topk_prob=norm_topk_prob,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            group_score=getattr(config, "moe_router_group_score", "top2"),
            scaling_factor=config.moe_router_topk_scaling_factor,
            enable_expert_bias=config.moe_router_enable_expert_bias,
            bias_update_rate=config.moe_router_bias_update_rate,
            bias_center=bool(getattr(config, "moe_router_bias_center", False)),
            router_dtype=_ROUTER_DTYPES[config.moe_router_dtype],
            aux_losses=tuple((k, c) for k, c in zip(kinds, coeffs) if k != "none" and c),
            z_loss_coeff=config.moe_z_loss_coeff or 0.0,
            per_token_loss=config.calculate_per_token_loss,
            dispatcher=config.moe_token_dispatcher_type,
            backend=getattr(config, "moe_expert_backend", "grouped_mm"),
            recompute=recomputes(config, "moe"),
            recompute_activation=recomputes(config, "moe_act"),
            recompute_shared_experts=recomputes(config, "shared_experts"),
        )
