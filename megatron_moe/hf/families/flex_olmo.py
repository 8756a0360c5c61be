"""FlexOlmo (arXiv 2507.07024)."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family, TensorNames


def read(keys: Keys) -> dict[str, Any]:
    """Return FlexOlmo's settings: OLMoE's, with the norms behind attention and MLP."""
    return {**parts.olmo_attention(keys), **parts.olmo_experts(keys), "reordered_norm": True}


def write(run: Run) -> dict[str, Any]:
    """Return FlexOlmo's own keys of config.json."""
    return {**parts.olmo_attention_keys(run), **parts.olmo_experts_keys(run)}


FAMILY = Family(
    name="flex-olmo",
    architecture="FlexOlmoForCausalLM",
    model_types=("flex_olmo",),
    read=read,
    write=write,
    models="FlexOlmo-7x7B",
    reads="`num_experts` or `num_local_experts`, `norm_topk_prob`",
    refuses="`attention_bias`",
    names=TensorNames(norms=("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")),
    served_untied=True,
)
