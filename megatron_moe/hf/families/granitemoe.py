"""Granite 3's mixtures of experts."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family, TensorNames

_FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_scaling",
    "attention_multiplier": "softmax_scale",
}


def read(keys: Keys) -> dict[str, Any]:
    """Return Granite's settings: a softmax over the chosen experts in every layer, and four factors."""
    parts.no_window(keys)
    keys.only("attention_bias", (False,), "it means a bias of the output projection too, which has none here")
    keys.only("mlp_bias", (False,), "MLPs have no biases here")
    keys.only("quantization_config", (), "experts in one tensor are read as they are; dequantise the model first")
    flat = parts.attention(keys)
    for key, field in _FACTORS.items():
        flat[field] = keys.number(key, default=None)
        if flat[field] is None:
            flat[field] = 1.0
            keys.assumed(key, 1.0)
    experts = parts.expert_count(keys, "num_local_experts", "num_experts")
    return {**flat, "num_experts": experts, **parts.softmax_of_chosen(parts.topk(keys, experts))}


def write(run: Run) -> dict[str, Any]:
    """Return Granite's own keys of config.json."""
    factors = {key: getattr(run.model, field) for key, field in _FACTORS.items()}
    return {
        **parts.attention_keys(run),
        **factors,
        "attention_multiplier": run.model.softmax_scale or run.derived.head_size**-0.5,
        "intermediate_size": run.derived.moe_ffn_hidden_size,
        "num_local_experts": run.moe.num_experts,
        "num_experts_per_tok": run.moe.moe_router_topk,
        "attention_bias": False,
    }


FAMILY = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    model_types=("granitemoe",),
    read=read,
    write=write,
    models="Granite 3.0 and 3.1 1B-A400M, 3B-A800M, PowerMoE-3B",
    reads="`embedding_multiplier`, `residual_multiplier`, `attention_multiplier`, `logits_scaling`",
    refuses="`attention_bias`, `rope_scaling`",
    names=TensorNames(
        experts="block_sparse_moe.",
        matrices=("input_linear", "output_linear"),
        router="block_sparse_moe.router.layer.weight",
    ),
)
