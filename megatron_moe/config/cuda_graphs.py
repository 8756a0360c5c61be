"""Which modules of a run are captured in CUDA graphs, and what stands in the way of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_moe.config.fields import all_fields
from megatron_moe.config.schema import Run

WITHIN_MOE = ("moe_router", "moe_preprocess")
"""Modules that are captured by themselves where moe is not."""

_ROUTING = "moe moe_router moe_preprocess"
_EVERY = f"attn mlp {_ROUTING}"
_EXCHANGES, _ON_HOST = "exchanges between ranks are not captured", "the host has to know how many rows a pass has"
_BALANCE = "moe_router_load_balancing_type"
_DRAWN = {"attn": ("attention_dropout", ("core_attn", "mla_up_proj")), "moe": ("moe_input_jitter_eps", ("moe",))}
"""Modules, the setting by which they draw random numbers, and what, if it is recomputed, draws them again."""
_OBSTACLES: tuple[tuple[str, str, Callable[[Any], Any], str], ...] = (
    (_EVERY, "tensor_model_parallel_size", lambda size: size > 1, _EXCHANGES),
    (_EVERY, "context_parallel_size", lambda size: size > 1, _EXCHANGES),
    (_EVERY, "overlap_moe_expert_parallel_comm", bool, "layers run in parts"),
    (_EVERY, "fine_grained_activation_offloading", bool, "a graph's activations stay where they are"),
    (_EVERY, "residual_multiplier", lambda factor: factor != 1.0, "scaled sums were not captured on a device"),
    ("attn", "qk_layernorm_after_rotation", bool, "norms after the rotation were not captured on a device"),
    (_EVERY, "recompute_granularity", lambda kind: kind == "full", "whole layers are recomputed"),
    (_EVERY, "reordered_norm", bool, "norms behind attention and MLP are not captured"),
    ("attn", "reset_attention_mask", bool, "the host has to know where documents begin"),
    ("attn mlp", "transformer_impl", lambda kind: kind != "local", "Transformer Engine's modules are not captured"),
    ("attn mlp moe", "fp8_format", bool, "products in FP8 are not captured"),
    (_ROUTING, _BALANCE, lambda kinds: "sinkhorn" in kinds, "the host ends the iteration of sinkhorn"),
    (_ROUTING, _BALANCE, lambda kinds: "global_aux_loss" in kinds, _EXCHANGES),
    ("attn", "softmax_type", lambda kind: kind != "vanilla", "sinks were not captured on a device"),
    ("attn", "window_size", bool, "windows were not captured on a device"),
    (_ROUTING, "add_bias_linear", bool, "biases of experts and routers were not captured on a device"),
    ("moe", "expert_model_parallel_size", lambda size: size > 1, _ON_HOST),
    ("moe", "moe_expert_backend", lambda kind: kind != "grouped_mm", "it reads on the host how many rows a pass has"),
    ("moe", "moe_shared_expert_overlap", bool, "its stream is not captured"),
)
"""Modules, the setting that stands in their way, its values that do, and why."""


def captured_modules(run: Run) -> tuple[str, ...]:
    """Return the modules that a run captures: those of `--cuda-graph-modules`, or all without an obstacle.

    attn is a layer's attention with its norm and sum, mlp and moe are the same of a dense MLP and of experts.
    moe_router is the router, moe_preprocess goes on in its graph with what comes before the exchange between ranks;
    moe holds both. A layer with both halves captured is one graph.
    """
    if run.training.cuda_graph_impl == "none":
        return ()
    if (named := run.training.cuda_graph_modules) is not None:
        return named
    possible = [module for module in existing_modules(run) if obstacle(run, module) is None]
    within = WITHIN_MOE if "moe" in possible else ()
    return tuple(module for module in possible if module not in within)


def existing_modules(run: Run) -> list[str]:
    """Return Megatron-LM's names of what the model has and a graph may hold."""
    pattern = run.derived.moe_layer_pattern
    return ["attn", *([] if all(pattern) else ["mlp"]), *(["moe", *WITHIN_MOE] if any(pattern) else [])]


def obstacle(run: Run, module: str) -> tuple[str, str] | None:
    """Return the setting that stands in the way of capturing an existing module, and why; None if nothing does."""

    def given(field: str) -> Any:
        return getattr(getattr(run, all_fields()[field].section), field)

    if run.derived.zero_stage >= 2:
        field = "use_torch_fsdp2" if run.parallel.use_torch_fsdp2 else "data_parallel_sharding_strategy"
        return field, "weights or gradients move from pass to pass"
    if run.derived.routers_know_documents and module.startswith("moe"):
        return "reset_attention_mask", "a router that knows documents or padding is given others in every pass"
    if run.derived.keeps_routes and module.startswith("moe"):
        field = "moe_routing_trace_path" if given("moe_routing_trace_path") else "moe_enable_routing_replay"
        return field, "a router looks up the routes of other tokens in every pass"
    if "moe" in run.derived.recomputed_modules and module in WITHIN_MOE:
        return "recompute_modules", "moe is recomputed around it"
    field, recomputing = _DRAWN.get(module, ("", ()))
    recomputed = [name for name in recomputing if name in run.derived.recomputed_modules]
    if recomputed and given(field):
        return field, f"where {recomputed[0]} is recomputed, a graph would draw other numbers"
    for modules, field, is_in_the_way, reason in _OBSTACLES:
        if module in modules.split() and is_in_the_way(given(field)):
            return field, reason
    return None
