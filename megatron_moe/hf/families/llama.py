"""Llama, dense."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return Llama's settings, and those of models that have its format."""
    return parts.dense(keys)


def write(run: Run) -> dict[str, Any]:
    """Return Llama's own keys of config.json."""
    return {**parts.dense_keys(run), "attention_bias": False, "mlp_bias": False}


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_types=("llama",),
    read=read,
    write=write,
    models="Llama 2, 3, 3.1, 3.2 (text), and others in its format",
    reads="any `head_dim`, each kind of rotary scaling but `dynamic`",
    refuses="`attention_bias`, `mlp_bias`",
    dense=True,
)
