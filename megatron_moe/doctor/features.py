"""Which features a small copy trains with: what the default visit has to cover, and what layouts that fail share."""

from __future__ import annotations

from collections.abc import Callable

from megatron_moe.config import derived
from megatron_moe.config.schema import Run


def _balanced_by(kind: str) -> Callable[[Run], object]:
    return lambda run: kind in run.moe.moe_router_load_balancing_type


def _scored_by(function: str) -> Callable[[Run], object]:
    return lambda run: not _balanced_by("sinkhorn")(run) and run.moe.moe_router_score_function == function


def _grouped_by(score: str) -> Callable[[Run], object]:
    return lambda run: run.moe.moe_router_num_groups is not None and run.moe.moe_router_group_score == score


_OF_MODEL: dict[str, Callable[[Run], object]] = {
    "latent attention": lambda run: run.model.multi_latent_attention,
    "grouped-query attention": lambda run: run.model.group_query_attention,
    "tied embeddings": lambda run: not run.model.untie_embeddings_and_output_weights,
    "separate embeddings": lambda run: run.model.untie_embeddings_and_output_weights,
    "dense layers": lambda run: 0 in derived.moe_layer_pattern(run),
    "multi-token prediction": lambda run: run.model.mtp_num_layers is not None,
    "fused loss": lambda run: run.model.cross_entropy_loss_fusion,
    "per-token loss": lambda run: run.optimizer.calculate_per_token_loss,
    "full recomputation": lambda run: run.training.recompute_granularity == "full",
    "selective recomputation": lambda run: run.training.recompute_granularity == "selective",
    "distributed optimizer": lambda run: run.optimizer.use_distributed_optimizer,
    "overlapped reduction": lambda run: run.parallel.overlap_grad_reduce,
    "uneven stages": lambda run: run.parallel.decoder_first_pipeline_num_layers is not None,
    "virtual stages": lambda run: run.parallel.num_layers_per_virtual_pipeline_stage is not None,
    "fp32": lambda run: derived.params_dtype_name(run) == "float32",
    "bf16": lambda run: run.precision.bf16,
    "fp16": lambda run: run.precision.fp16,
}
_OF_EXPERTS: dict[str, Callable[[Run], object]] = {
    "softmax scores": _scored_by("softmax"),
    "sigmoid scores": _scored_by("sigmoid"),
    "pre-softmax": lambda run: run.moe.moe_router_pre_softmax,
    "groups by their best expert": _grouped_by("max"),
    "groups by their best two": _grouped_by("top2"),
    "groups by megatron-core's rule": _grouped_by("megatron"),
    "expert_bias": lambda run: run.moe.moe_router_enable_expert_bias,
    "expert_bias centred": lambda run: run.moe.moe_router_bias_center,
    "Sinkhorn": _balanced_by("sinkhorn"),
    "aux_loss": _balanced_by("aux_loss"),
    "seq_aux_loss": _balanced_by("seq_aux_loss"),
    "global_aux_loss": _balanced_by("global_aux_loss"),
    "z-loss": lambda run: run.moe.moe_z_loss_coeff,
    "capacity": lambda run: run.moe.moe_expert_capacity_factor is not None,
    "padding to the capacity": lambda run: run.moe.moe_pad_expert_input_to_capacity,
    "shared expert": lambda run: run.moe.moe_shared_expert_intermediate_size is not None,
    "shared gate": lambda run: run.moe.moe_shared_expert_gate,
    "experts in a grouped product": lambda run: run.moe.moe_expert_backend == "grouped_mm",
    "experts in a loop": lambda run: run.moe.moe_expert_backend == "loop",
    "alltoall dispatcher": lambda run: run.moe.moe_token_dispatcher_type == "alltoall",
    "allgather dispatcher": lambda run: run.moe.moe_token_dispatcher_type == "allgather",
}
FEATURES = {**_OF_MODEL, **_OF_EXPERTS}
"""Name -> whether a run has it."""


def features(run: Run) -> frozenset[str]:
    """The features that a run has; a dense model has none of those of experts."""
    asked = FEATURES if run.moe.num_experts is not None else _OF_MODEL
    return frozenset(name for name, has in asked.items() if has(run))
