"""Rules about the memory of activations: what is recomputed, and what is moved to the host's memory."""

from __future__ import annotations

from megatron_moe.config.rules.wording import refuse, set_among
from megatron_moe.config.schema import Run

# Recomputation


def full_recompute_is_described(run: Run, world_size: int) -> None:
    """Require method and layers for the recomputation of whole layers."""
    t = run.training
    missing = [
        n
        for n, v in (("recompute_method", t.recompute_method), ("recompute_num_layers", t.recompute_num_layers))
        if v is None
    ]
    if t.recompute_granularity == "full" and missing:
        raise refuse(
            run,
            ("recompute_granularity", *missing),
            "say which layers: --recompute-method uniform --recompute-num-layers 1 recomputes every one",
        )


def recompute_flags_fit_granularity(run: Run, world_size: int) -> None:
    """Refuse method and layers without full recomputation, and modules without selective."""
    granularity = run.training.recompute_granularity
    if granularity != "full":
        stray = set_among(run, ("recompute_method", "recompute_num_layers"))
        if stray:
            raise refuse(
                run,
                (*stray, "recompute_granularity"),
                "only full recomputation reads these; use --recompute-granularity full",
            )
    if granularity != "selective" and run.training.recompute_modules is not None:
        raise refuse(
            run,
            ("recompute_modules", "recompute_granularity"),
            "only selective recomputation reads these; use --recompute-granularity selective",
        )


def recompute_layers_within_stage(run: Run, world_size: int) -> None:
    """Require that no stage recomputes more layers than it has."""
    chunk = max(len(stage.layers) for stage in run.derived.pipeline_stages)
    count = run.training.recompute_num_layers
    if count is not None and count > chunk:
        raise refuse(
            run,
            ("recompute_num_layers", "num_layers", "pipeline_model_parallel_size"),
            f"a stage has {chunk} layers; use --recompute-num-layers {chunk} or less",
        )


def recomputed_modules_exist(run: Run, world_size: int) -> None:
    """Refuse to recompute modules that the model does not have."""
    modules = run.training.recompute_modules or ()
    needed = {
        "moe": ("num_experts", run.moe.num_experts),
        "moe_act": ("num_experts", run.moe.num_experts),
        "shared_experts": ("moe_shared_expert_intermediate_size", run.moe.moe_shared_expert_intermediate_size),
        "mla_up_proj": ("multi_latent_attention", run.model.multi_latent_attention),
    }
    for module in modules:
        field, value = needed.get(module, ("", True))
        if not value:
            raise refuse(
                run, ("recompute_modules", field), f"there is no {module} to recompute; use mlp or core_attn instead"
            )


def recomputed_modules_do_not_nest(run: Run, world_size: int) -> None:
    """Refuse to recompute parts of the MoE layer when the whole layer is recomputed."""
    modules = run.training.recompute_modules or ()
    inner = [module for module in ("moe_act", "shared_experts") if module in modules]
    if "moe" in modules and inner:
        raise refuse(run, ("recompute_modules",), f"moe holds {' and '.join(inner)}; drop moe or drop what it holds")


# Offload

_OFFLOAD = "fine_grained_activation_offloading"
NOT_KEPT = {
    "moe": ("expert_fc1", "moe_act"),
    "layernorm": ("qkv_linear",),
    "mla_up_proj": ("core_attn", "attn_proj"),
}
"""Recomputed modules, and the modules whose inputs are not kept then."""


def offload_names_modules(run: Run, world_size: int) -> None:
    """Require modules for the offload of activations, and the offload for modules."""
    modules, is_on = run.training.offload_modules, run.training.fine_grained_activation_offloading
    if is_on and not modules:
        raise refuse(
            run,
            (_OFFLOAD, "offload_modules"),
            "say which modules: --offload-modules core_attn attn_proj expert_fc1 moe_act, say",
        )
    if modules and not is_on:
        raise refuse(
            run,
            ("offload_modules", _OFFLOAD),
            "only the offload reads these; add --fine-grained-activation-offloading",
        )


def offloaded_modules_exist(run: Run, world_size: int) -> None:
    """Refuse to offload modules that the model does not have, or whose input another one keeps."""
    modules = _offloaded(run)
    of_experts = [name for name in modules if name in ("expert_fc1", "moe_act")]
    if of_experts and run.moe.num_experts is None:
        raise refuse(run, ("offload_modules", "num_experts"), f"there are no experts; drop {' and '.join(of_experts)}")
    if "attn_proj" in modules and "core_attn" not in modules:
        raise refuse(
            run,
            ("offload_modules",),
            "core_attn keeps the same tensor on the device, its output; add core_attn, or drop attn_proj",
        )


def offloaded_products_keep_their_input(run: Run, world_size: int) -> None:
    """Refuse to offload inputs of products that Transformer Engine makes in FP8: it keeps other tensors."""
    in_fp8 = run.precision.fp8_modules if run.precision.fp8_format is not None else ()
    linear, experts = run.model.transformer_impl == "transformer_engine", run.moe.moe_expert_backend == "te"
    for field, by_te, kind, names in (
        ("transformer_impl", linear, "attention", ("qkv_linear", "attn_proj")),
        ("moe_expert_backend", experts, "experts", ("expert_fc1",)),
    ):
        stray = [name for name in names if name in _offloaded(run)]
        if stray and by_te and kind in in_fp8:
            raise refuse(
                run,
                ("offload_modules", "fp8_format", field),
                f"Transformer Engine keeps other tensors than the inputs in FP8; drop {' and '.join(stray)}",
            )


def offloaded_modules_are_kept(run: Run, world_size: int) -> None:
    """Refuse to offload what recomputation does not keep."""
    modules, recomputed = _offloaded(run), run.derived.recomputed_modules
    if modules and run.training.recompute_granularity == "full":
        raise refuse(
            run,
            (_OFFLOAD, "recompute_granularity"),
            "whole layers keep their input alone; use --recompute-granularity selective, or drop the offload",
        )
    for recomputing, lost in NOT_KEPT.items():
        stray = [name for name in lost if name in modules]
        if recomputing in recomputed and stray:
            raise refuse(
                run,
                ("recompute_modules", "offload_modules"),
                f"with {recomputing} recomputed these are not kept; drop {' and '.join(stray)}, or {recomputing}",
            )


def offload_takes_whole_layers(run: Run, world_size: int) -> None:
    """Refuse the offload with the schedule that takes layers apart."""
    if run.training.fine_grained_activation_offloading and run.moe.overlap_moe_expert_parallel_comm:
        raise refuse(
            run,
            (_OFFLOAD, "overlap_moe_expert_parallel_comm"),
            "the offload follows whole layers, and that schedule computes them in parts; drop one of the two",
        )


def _offloaded(run: Run) -> tuple[str, ...]:
    is_on = run.training.fine_grained_activation_offloading
    return (run.training.offload_modules or ()) if is_on else ()
