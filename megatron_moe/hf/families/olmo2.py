"""OLMo 2 (arXiv 2501.00656), dense."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.families import flex_olmo
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return OLMo 2's settings: norms of all heads, and norms behind attention and MLP."""
    return {**parts.olmo_attention(keys), "reordered_norm": True}


def write(run: Run) -> dict[str, Any]:
    """Return OLMo 2's own keys of config.json."""
    return {**parts.olmo_attention_keys(run), "intermediate_size": run.derived.ffn_hidden_size}


FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    model_types=("olmo2",),
    read=read,
    write=write,
    models="OLMo 2: 1B to 32B",
    reads="`intermediate_size`, rotary scaling",
    refuses="`attention_bias`",
    names=flex_olmo.FAMILY.names,
    dense=True,
)
