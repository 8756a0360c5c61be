"""Qwen3, dense."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return Qwen3's settings: queries and keys are normalised per head."""
    parts.no_window(keys, switched=True)
    if not keys.has("head_dim"):
        raise keys.refusal("head_dim", "has to be given: transformers takes 128 where it is missing")
    return {**parts.dense(keys), "qk_layernorm": True}


def write(run: Run) -> dict[str, Any]:
    """Return Qwen3's own keys of config.json."""
    return {**parts.dense_keys(run), "use_sliding_window": False, "attention_bias": False}


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    model_types=("qwen3",),
    read=read,
    write=write,
    models="0.6B to 32B",
    reads="any `head_dim`, queries and keys normalised per head",
    refuses="`attention_bias`, `use_sliding_window`, `layer_types` other than full attention",
    dense=True,
)
