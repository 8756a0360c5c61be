"""Which layers are MoE layers, as config.json says it and as --moe-layer-freq does. No torch."""

from __future__ import annotations

from itertools import groupby

from megatron_moe.config import derived
from megatron_moe.config.schema import Run
from megatron_moe.conversion.config_keys import Keys

MOST_LAYERS = 10_000
"""As many as an expression of --moe-layer-freq may have."""


def layer_freq(pattern: list[int]) -> int | str:
    """--moe-layer-freq of a pattern: 1 where all layers are MoE layers, else an expression like [0]+[1]*26."""
    if all(pattern):
        return 1
    runs = [(kind, len(list(group))) for kind, group in groupby(pattern)]
    return "+".join(f"[{kind}]" + (f"*{count}" if count > 1 else "") for kind, count in runs)


def first_layers_dense(keys: Keys) -> int | str:
    """DeepSeek's and GLM's rule: the first layers are dense."""
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    dense = keys.integer("first_k_dense_replace", low=0)
    if dense >= layers:
        raise keys.refusal("first_k_dense_replace", f"leaves none of the {layers} layers to be a MoE layer")
    return layer_freq([0] * dense + [1] * (layers - dense))


def first_dense_of(run: Run) -> int:
    """How many layers of a run are dense before the first MoE layer."""
    return derived.moe_layer_pattern(run).index(1)


def sparse_step(keys: Keys) -> int | str:
    """Qwen's rule: every decoder_sparse_step-th layer counted from one, but for those listed."""
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    step = keys.integer("decoder_sparse_step", default=None)
    if step is None:
        step = 1
        keys.assumed("decoder_sparse_step", step)
    listed = keys.integers("mlp_only_layers", 0, layers - 1)
    pattern = [int(layer not in listed and (layer + 1) % step == 0) for layer in range(layers)]
    if not any(pattern):
        raise keys.refusal("decoder_sparse_step", f"leaves none of the {layers} layers to be a MoE layer")
    return layer_freq(pattern)
