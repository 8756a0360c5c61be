"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return Qwen2's settings: queries, keys and values have biases."""
    parts.no_window(keys, switched=True)
    keys.only("use_mrope", (False,), "a token has one position here")
    return {**parts.dense(keys), "add_qkv_bias": True}


def write(run: Run) -> dict[str, Any]:
    """Return Qwen2's own keys of config.json."""
    return {**parts.dense_keys(run), "use_sliding_window": False}


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_types=("qwen2",),
    read=read,
    write=write,
    models="Qwen2, Qwen2.5",
    reads="biases of queries, keys and values",
    refuses="`use_sliding_window`",
    dense=True,
)
