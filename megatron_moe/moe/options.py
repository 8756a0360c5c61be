"""The options and process groups of a MoE layer and its parts.

`MoEOptions.from_run` reads them from the run's sections, once per model (`model/build.py`); the layer's spec passes
them to every MoE layer, and the layer to its router, dispatcher, experts and shared expert. This is where the schema's
field names are translated into the names that the layer's parts use.

`MoEOptions.from_engine_config` serves a megatron-core program that our layer or router is plugged into, and that has
no run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_moe.config.model_flags import NO_LOSSES, QUANTILE, MoEConfig
from megatron_moe.config.schema import Run
from megatron_moe.config.setting import SCORE_FUNCTIONS
from megatron_moe.engine.schedules import ProcessGroupCollection, parallel_state
from megatron_moe.platform.protocols import EngineConfig, ProcessGroups

_ROUTER_DTYPES = {None: torch.float32, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class MoEOptions:
    """The options of one MoE layer. Sizes are global: E experts, K per token, F the width of an expert."""

    num_experts: int
    topk: int
    hidden_size: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int | None
    shared_gate: bool
    shared_overlap: bool
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
    quantile_bins: int | None
    quantile_ema: float
    router_dtype: torch.dtype
    aux_losses: tuple[tuple[str, float], ...]
    z_loss_coeff: float
    global_counts: str
    seq_loss_per: str
    sinkhorn: bool
    force_load_balancing: bool
    input_jitter_eps: float | None
    capacity_factor: float | None
    drop_policy: str
    pad_to_capacity: bool
    per_token_loss: bool
    dispatcher: str
    dispatcher_settings: dict[str, Any]
    backend: str
    fp8_format: str | None
    fuse_weight_gradients: bool | None
    biases: bool
    quick_gelu: bool
    activation_clamp: float | None
    linear_offset: float
    recompute: bool
    recompute_activation: bool
    recompute_shared_experts: bool
    delay_wgrad: bool = False
    in_steps: bool = False

    @property
    def chooses_by_score(self) -> bool:
        """Whether a token's experts depend on its own scores and the bias alone, also in training."""
        return not (self.sinkhorn or self.force_load_balancing)

    @classmethod
    def from_run(cls, run: Run) -> MoEOptions | None:
        """Read the options from a run that has passed `config.rules.check`; None for a dense model."""
        moe = run.moe
        if moe.num_experts is None:
            return None
        return cls(
            **_common(moe, run.derived.norm_topk_prob, run.derived.recomputed_modules),
            num_experts=moe.num_experts,
            hidden_size=run.model.hidden_size,
            ffn_hidden_size=run.derived.moe_ffn_hidden_size,
            group_score=moe.moe_router_group_score,
            per_token_loss=run.optimizer.calculate_per_token_loss,
            fp8_format=run.derived.fp8_format_of_experts,
            fuse_weight_gradients=run.precision.gradient_accumulation_fusion,
            biases=run.model.add_bias_linear,
            quick_gelu=run.model.quick_geglu,
            activation_clamp=run.model.activation_func_clamp_value,
            linear_offset=run.model.glu_linear_offset,
            delay_wgrad=moe.delay_wgrad_compute,
            in_steps=moe.overlap_moe_expert_parallel_comm,
        )

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> MoEOptions:
        """Read the options from megatron-core's TransformerConfig.

        It lacks what this project adds (probability normalisation, expert backend, emulated FP8, centred bias, counts
        of the global loss): an attribute with the schema's name is read if it is set, else the schema's default
        applies. The engine's `fp8` is Transformer Engine's, and is not read. Without the group score, groups are scored
        as megatron-core scores them. The gate is computed in fp32 unless the configuration asks for fp64; lower
        precision is not supported.

        Raises:
            ValueError: a score function that is not registered (megatron-core 0.19.2 has a third one), or
                megatron-core's group score with fewer experts per token than groups, which scores all groups 0.
        """
        score_function, pre_softmax = config.moe_router_score_function, config.moe_router_pre_softmax
        if score_function not in SCORE_FUNCTIONS:
            raise ValueError(f"moe_router_score_function {score_function}: our router has {', '.join(SCORE_FUNCTIONS)}")
        norm_topk_prob = getattr(config, "moe_router_norm_topk_prob", None)
        topk, group_topk = config.moe_router_topk, config.moe_router_group_topk
        if norm_topk_prob is None:  # Megatron-LM's rule
            norm_topk_prob = not pre_softmax if score_function == "softmax" else topk > 1
        group_score = getattr(config, "moe_router_group_score", "megatron")
        if group_score == "megatron" and group_topk is not None and topk < group_topk:
            raise ValueError(
                f"moe_router_topk {topk}, moe_router_group_topk {group_topk}: megatron-core's score of a group adds up "
                f"its best topk // group_topk = 0 experts and is 0 for all groups; a moe_router_group_topk of {topk} "
                'or less works, or moe_router_group_score "max" or "top2"'
            )
        recomputed = (config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()
        return cls(
            **_common(config, norm_topk_prob, recomputed),
            num_experts=config.num_moe_experts,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
            group_score=group_score,
            per_token_loss=config.calculate_per_token_loss,
            fp8_format=getattr(config, "fp8_format", None),
            fuse_weight_gradients=config.gradient_accumulation_fusion,
            biases=config.add_bias_linear,
            quick_gelu=getattr(config.activation_func, "__name__", "") == "quick_gelu",  # its own or ours
            activation_clamp=config.activation_func_clamp_value,
            linear_offset=config.glu_linear_offset,
        )


def _common(moe: MoEConfig | EngineConfig, norm_topk_prob: bool, recomputed: Collection[str]) -> dict[str, Any]:
    """Return the options that the run's section and the engine's TransformerConfig have under one name.

    What the engine's lacks has the schema's default there, unless somebody has set it.
    """
    topk, score_function, pre_softmax = moe.moe_router_topk, moe.moe_router_score_function, moe.moe_router_pre_softmax
    kinds, coeffs = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "sinkhorn" in kinds:
        # Megatron-LM's weights: the sigmoid for K = 1, else the softmax over all experts, not normalised.
        score_function, pre_softmax, norm_topk_prob = "sigmoid" if topk == 1 else "softmax", topk > 1, False
    coeffs = [coeffs] * len(kinds) if isinstance(coeffs, (int, float)) else coeffs
    losses = tuple((kind, coeff) for kind, coeff in zip(kinds, coeffs) if kind not in NO_LOSSES and coeff)
    quantile_bins = None
    if QUANTILE in kinds:
        quantile_bins = getattr(moe, "moe_router_quantile_balancing_num_bins", 1000)
    settings: dict[str, Any] = {}  # what the dispatcher's entry takes besides sizes and groups
    if getattr(moe, "moe_alltoall_by_node", False):
        settings = {"by_node": True}
    if moe.moe_token_dispatcher_type == "flex":
        library = moe.moe_flex_dispatcher_backend
        own = {"deepep": moe.moe_deepep_num_sms, "hybridep": moe.moe_hybridep_num_sms}
        # A later release of the engine has one number for all libraries.
        num_sms = getattr(moe, "moe_flex_dispatcher_num_sms", None) or own.get(library)
        settings = {"library": library, "num_sms": num_sms}
    return {
        "topk": topk,
        "shared_ffn_hidden_size": moe.moe_shared_expert_intermediate_size,
        "shared_gate": bool(getattr(moe, "moe_shared_expert_gate", False)),
        "shared_overlap": moe.moe_shared_expert_overlap,
        "score_function": score_function,
        "pre_softmax": pre_softmax,
        "norm_topk_prob": norm_topk_prob,
        "num_groups": moe.moe_router_num_groups,
        "group_topk": moe.moe_router_group_topk,
        "scaling_factor": moe.moe_router_topk_scaling_factor,
        "enable_expert_bias": moe.moe_router_enable_expert_bias or QUANTILE in kinds,
        "bias_update_rate": moe.moe_router_bias_update_rate,
        "bias_center": bool(getattr(moe, "moe_router_bias_center", False)),
        "quantile_bins": quantile_bins,
        "quantile_ema": getattr(moe, "moe_router_quantile_balancing_ema", 0.0),
        "router_dtype": _ROUTER_DTYPES[moe.moe_router_dtype],
        "aux_losses": losses,
        "z_loss_coeff": moe.moe_z_loss_coeff or 0.0,
        "global_counts": getattr(moe, "moe_global_aux_loss_counts", "batch"),
        "seq_loss_per": getattr(moe, "moe_seq_aux_loss_per", "sequence"),
        "sinkhorn": "sinkhorn" in kinds,
        "force_load_balancing": bool(moe.moe_router_force_load_balancing),
        "input_jitter_eps": moe.moe_input_jitter_eps,
        "capacity_factor": moe.moe_expert_capacity_factor,
        "drop_policy": moe.moe_token_drop_policy,
        "pad_to_capacity": moe.moe_pad_expert_input_to_capacity,
        "dispatcher": moe.moe_token_dispatcher_type,
        "dispatcher_settings": settings,
        "backend": getattr(moe, "moe_expert_backend", "grouped_mm"),
        "recompute": "moe" in recomputed,
        "recompute_activation": "moe_act" in recomputed,
        "recompute_shared_experts": "shared_experts" in recomputed,
    }


# ---- process groups


class _OneRank:
    """A stand-in for a process group, for a router or a layer used in a plain script without process groups."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass(frozen=True)
class MoEGroups:
    """The process groups that a MoE layer communicates in.

    tp: tensor parallel. tp_cp: ranks that share a micro-batch. tp_dp_cp: ranks that share a global batch and hold the
    same layers. expert: the EP x ETP ranks that together hold all experts of the layer, ETP fastest. expert_dp: ranks
    that hold the same part of the same experts.
    """

    tp: ProcessGroup
    tp_cp: ProcessGroup
    tp_dp_cp: ProcessGroup
    expert: ProcessGroup
    expert_dp: ProcessGroup
    ep_size: int
    ep_rank: int
    etp_size: int
    etp_rank: int


def moe_groups(pg_collection: ProcessGroups | None = None) -> MoEGroups:
    """Return the groups from the engine's ProcessGroupCollection, or from its global state if None is given."""
    pg: Any = pg_collection
    if pg is None and parallel_state.model_parallel_is_initialized():
        pg = ProcessGroupCollection.use_mpu_process_groups()
    elif pg is None:
        pg = SimpleNamespace(**dict.fromkeys("tp tp_cp tp_dp_cp tp_ep expt_dp ep expt_tp".split(), _OneRank()))
    return MoEGroups(
        tp=pg.tp,
        tp_cp=pg.tp_cp,
        tp_dp_cp=pg.tp_dp_cp,
        expert=pg.tp_ep,
        expert_dp=pg.expt_dp,
        ep_size=pg.ep.size(),
        ep_rank=pg.ep.rank(),
        etp_size=pg.expt_tp.size(),
        etp_rank=pg.expt_tp.rank(),
    )
