"""OLMoE (arXiv 2409.02060)."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return OLMoE's settings: norms of all heads, softmax over all experts in every layer, none shared."""
    return {**parts.olmo_attention(keys), **parts.olmo_experts(keys)}


def write(run: Run) -> dict[str, Any]:
    """Return OLMoE's own keys of config.json."""
    return {**parts.olmo_attention_keys(run), **parts.olmo_experts_keys(run), "clip_qkv": None}


FAMILY = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    model_types=("olmoe",),
    read=read,
    write=write,
    models="OLMoE-1B-7B",
    reads="`num_experts` or `num_local_experts`, `norm_topk_prob`",
    refuses="`clip_qkv`, `attention_bias`",
    served_untied=True,
)
