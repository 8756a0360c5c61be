"""Which modules of a run are captured in CUDA graphs, and what stands in the way of others."""

from __future__ import annotations

from typing import NamedTuple

from megatron_moe.config.schema import Run


class Obstacle(NamedTuple):
    """The settings that stand in the way of a capture, and why they do, with what to do."""

    fields: tuple[str, ...]
    reason: str


def captured_modules(run: Run) -> tuple[str, ...]:
    """Return the modules that a run captures: those of `--cuda-graph-modules`, or all without an obstacle.

    A router within a captured `moe` is not captured by itself.
    """
    if run.training.cuda_graph_impl == "none":
        return ()
    if (named := run.training.cuda_graph_modules) is not None:
        return named
    possible = [module for module in existing_modules(run) if obstacle(run, module) is None]
    if "moe" in possible:
        possible.remove("moe_router")
    return tuple(possible)


def existing_modules(run: Run) -> tuple[str, ...]:
    """Return Megatron-LM's names of what the model has and a graph may hold.

    attn: a layer's attention, with its norm and residual sum. mlp and moe: the same of a dense MLP and of experts.
    moe_router: the router alone.
    """
    found = ["attn"]
    pattern = run.derived.moe_layer_pattern
    if not all(pattern):
        found.append("mlp")
    if any(pattern):
        found += ["moe", "moe_router"]
    return tuple(found)


_RECOMPUTED = {
    "attn": ("core_attn", "layernorm", "mla_up_proj"),
    "mlp": ("mlp", "layernorm"),
    "moe": ("moe", "moe_act", "shared_experts", "layernorm"),
    "moe_router": ("moe",),
}
"""Modules of `--recompute-modules` that are within a module, or that hold it."""


def obstacle(run: Run, module: str) -> Obstacle | None:
    """Return what stands in the way of capturing an existing module, None if nothing does."""
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        if getattr(run.parallel, name) > 1:
            return Obstacle((name,), "exchanges between ranks are not captured; use 1")
    if run.derived.zero_stage >= 2:
        field = "use_torch_fsdp2" if run.parallel.use_torch_fsdp2 else "data_parallel_sharding_strategy"
        return Obstacle((field,), "weights and gradients move from pass to pass; use ZeRO stage 1")
    if run.moe.overlap_moe_expert_parallel_comm:
        return Obstacle(
            ("overlap_moe_expert_parallel_comm",), "that schedule runs layers in parts; drop one of the two"
        )
    if run.training.fine_grained_activation_offloading:
        return Obstacle(
            ("fine_grained_activation_offloading",), "a graph's activations stay where they are; drop one of the two"
        )
    if run.training.recompute_granularity == "full":
        return Obstacle(("recompute_granularity",), "whole layers are recomputed around it; use selective")
    for name in _RECOMPUTED[module]:
        if name in run.derived.recomputed_modules:
            return Obstacle(("recompute_modules",), f"{name} is recomputed within it or around it; drop one of the two")
    if module == "attn" and run.model.attention_dropout:
        return Obstacle(("attention_dropout",), "it draws from a random stream that no graph can switch to; use 0")
    if module in ("attn", "mlp") and run.model.transformer_impl != "local":
        return Obstacle(("transformer_impl",), "Transformer Engine's modules are not captured; use local")
    if module != "moe_router" and run.precision.fp8_format is not None:
        return Obstacle(("fp8_format",), "products in FP8 are not captured; drop one of the two")
    if module == "moe_router":
        return _obstacle_of_routing(run)
    return (_obstacle_of_routing(run) or _obstacle_of_experts(run)) if module == "moe" else None


def _obstacle_of_routing(run: Run) -> Obstacle | None:
    kinds = run.moe.moe_router_load_balancing_type
    if "sinkhorn" in kinds:
        return Obstacle(("moe_router_load_balancing_type",), "the host ends the iteration; use aux_loss, say")
    if "global_aux_loss" in kinds:
        return Obstacle(
            ("moe_router_load_balancing_type",), "ranks may exchange counts within the router; use seq_aux_loss, say"
        )
    return None


def _obstacle_of_experts(run: Run) -> Obstacle | None:
    moe = run.moe
    if run.parallel.expert_model_parallel_size > 1:
        return Obstacle(
            ("expert_model_parallel_size",), "the host has to know how many rows of a pass travel; use moe_router"
        )
    if moe.moe_expert_capacity_factor is not None:
        return Obstacle(
            ("moe_expert_capacity_factor",), "the host has to know how many rows of a pass are kept; use moe_router"
        )
    if moe.moe_expert_backend != "grouped_mm":
        return Obstacle(("moe_expert_backend",), "it reads counts on the host; use grouped_mm, or moe_router")
    if moe.moe_shared_expert_overlap:
        return Obstacle(("moe_shared_expert_overlap",), "that stream is not captured; drop one of the two")
    return None
