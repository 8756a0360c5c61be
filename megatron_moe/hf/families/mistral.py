"""Mistral, dense."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return Mistral's settings."""
    if "sliding_window" not in keys.values:
        raise keys.refusal("sliding_window", "has to be given: transformers takes 4096 where it is missing; null works")
    parts.no_window(keys)
    return parts.dense(keys)


def write(run: Run) -> dict[str, Any]:
    """Return Mistral's own keys of config.json."""
    return parts.dense_keys(run)


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    model_types=("mistral",),
    read=read,
    write=write,
    models="7B v0.2, v0.3, Nemo 12B",
    reads="any `head_dim`",
    refuses="`sliding_window` shorter than the context",
    dense=True,
)
