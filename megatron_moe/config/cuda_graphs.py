"""Which modules of a run are captured in CUDA graphs, and what stands in the way of others."""

from __future__ import annotations

from megatron_moe.config.schema import Run

MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")
"""Megatron-LM's names: the attention half of a layer; the other half of a dense layer; that of a layer with experts;
its router; what prepares its dispatch, which is captured within `moe` alone."""

Obstacle = tuple[tuple[str, ...], str]
"""The settings in the way, and why, with what to do."""


def captured_modules(run: Run) -> tuple[str, ...]:
    """Return the modules of `--cuda-graph-modules`; without the flag all that the model has and nothing forbids.

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
    """Return the modules that some layer has, and that can be captured by themselves."""
    found = ["attn"]
    pattern = run.derived.moe_layer_pattern
    if not all(pattern):
        found.append("mlp")
    if any(pattern):
        found += ["moe", "moe_router"]
    return tuple(found)


def obstacle(run: Run, module: str) -> Obstacle | None:
    """Return what in a run stands in the way of capturing a module, None if nothing does."""
    recomputed = {
        "attn": ("core_attn", "layernorm", "mla_up_proj"),
        "mlp": ("mlp", "layernorm"),
        "moe": ("moe", "moe_act", "shared_experts", "layernorm"),
        "moe_router": ("moe",),
    }
    inside = [name for name in recomputed.get(module, ()) if name in run.derived.recomputed_modules]
    if inside:
        return ("recompute_modules",), f"{inside[0]} is recomputed around or within it; recompute other modules"
    if module == "attn" and run.model.attention_dropout:
        return ("attention_dropout",), "it draws from a random stream that a graph cannot switch to; use 0"
    if module in ("attn", "mlp") and run.model.transformer_impl != "local":
        return ("transformer_impl",), "Transformer Engine's modules are not captured; use --transformer-impl local"
    if module != "moe_router" and run.precision.fp8_format is not None:
        return ("fp8_format",), "products in FP8 are not captured; drop --fp8-format, or use moe_router"
    return _obstacle_of_routing(run, module) if module in ("moe", "moe_router") else None


def _obstacle_of_routing(run: Run, module: str) -> Obstacle | None:
    """Return what stands in the way of capturing what a router decides, or a whole layer with experts."""
    moe = run.moe
    if "sinkhorn" in moe.moe_router_load_balancing_type:
        return ("moe_router_load_balancing_type",), "the host decides when its iteration ends; use another balance"
    if "global_aux_loss" in moe.moe_router_load_balancing_type:
        return ("moe_router_load_balancing_type",), "ranks exchange counts for global_aux_loss; use seq_aux_loss"
    if module == "moe_router":
        return None
    if run.parallel.expert_model_parallel_size > 1:
        return (
            ("expert_model_parallel_size",),
            "the host has to know how many rows travel, of each pass anew; use moe_router, or"
            " --expert-model-parallel-size 1",
        )
    if moe.moe_expert_capacity_factor is not None:
        return ("moe_expert_capacity_factor",), "the host has to know how many rows are kept; use moe_router"
    if moe.moe_expert_backend != "grouped_mm":
        return ("moe_expert_backend",), "its products read counts on the host; use grouped_mm, or moe_router"
    if moe.moe_shared_expert_overlap:
        return ("moe_shared_expert_overlap",), "its stream is not captured; drop one of the two, or use moe_router"
    return None
