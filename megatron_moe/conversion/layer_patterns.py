"""Which layers are MoE layers, as config.json says it and as --moe-layer-freq does. No torch."""

from __future__ import annotations

from itertools import groupby

from megatron_moe.config import derived
from megatron_moe.config.schema import Run
from megatron_moe.conversion.config_keys import Keys


def layer_freq(pattern: list[int]) -> int | str:
    """--moe-layer-freq of a pattern: 1 where all layers are MoE layers, else an expression like [0]+[1]*26."""
    if all(pattern):
        return 1
    runs = [(kind, len(list(group))) for kind, group in groupby(pattern)]
    return "+".join(f"[{kind}]" + (f"*{count}" if count > 1 else "") for kind, count in runs)


def first_layers_dense(keys: Keys) -> int | str:
    """DeepSeek's and GLM's rule: the first layers are dense."""
    layers, dense = keys.integer("num_hidden_layers"), keys.integer("first_k_dense_replace", low=0)
    if dense >= layers:
        raise keys.refusal("first_k_dense_replace", f"leaves none of the {layers} layers to be a MoE layer")
    return layer_freq([0] * dense + [1] * (layers - dense))


def first_dense_of(run: Run) -> int:
    """How many layers of a run are dense before the first MoE layer."""
    return derived.moe_layer_pattern(run).index(1)


def sparse_step(keys: Keys) -> int | str:
    """Qwen's rule: every decoder_sparse_step-th layer counted from one, but for those listed."""
    layers = keys.integer("num_hidden_layers")
    step = keys.integer("decoder_sparse_step", default=None)
    if step is None:
        step = 1
        keys.assumed("decoder_sparse_step", step)
    listed = keys.raw("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in listed):
        raise keys.refusal("mlp_only_layers", f"has to be a list of layers between 0 and {layers - 1}")
    pattern = [int(layer not in listed and (layer + 1) % step == 0) for layer in range(layers)]
    if not any(pattern):
        raise keys.refusal("decoder_sparse_step", f"leaves none of the {layers} layers to be a MoE layer")
    return layer_freq(pattern)
