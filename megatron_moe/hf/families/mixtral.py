"""Mixtral."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family, TensorNames


def read(keys: Keys) -> dict[str, Any]:
    """Return Mixtral's settings: a softmax over the chosen experts in every layer, no shared expert.

    intermediate_size is an expert's width.
    """
    parts.no_window(keys)
    experts = parts.expert_count(keys, "num_local_experts", "num_experts")
    return {
        **parts.attention(keys),
        "num_experts": experts,
        **parts.softmax_of_chosen(parts.topk(keys, experts)),
    }


def write(run: Run) -> dict[str, Any]:
    """Return Mixtral's own keys of config.json."""
    return {
        **parts.attention_keys(run),
        "intermediate_size": run.derived.moe_ffn_hidden_size,
        "num_local_experts": run.moe.num_experts,
        "num_experts_per_tok": run.moe.moe_router_topk,
    }


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    model_types=("mixtral",),
    read=read,
    write=write,
    models="8x7B, 8x22B",
    reads="any `head_dim`",
    refuses="`sliding_window` shorter than the context",
    names=TensorNames(
        experts="block_sparse_moe.experts.{e}.",
        matrices=("w1", "w3", "w2"),
        router="block_sparse_moe.gate.weight",
    ),
    served_untied=True,
)
