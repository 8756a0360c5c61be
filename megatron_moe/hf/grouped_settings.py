"""Converts config.json of the families with grouped-query attention: Mixtral, Qwen-MoE, GLM-4.5. Loads no torch."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys, sparse_step
from megatron_moe.hf.latent_settings import (
    biased_sigmoid,
    expert_count,
    routed_and_shared,
    routed_and_shared_keys,
    topk,
)
from megatron_moe.hf.rope_settings import rope_keys, rope_settings


def _attention(keys: Keys, partly_rotated: bool = False) -> dict[str, Any]:
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    groups = keys.integer("num_key_value_heads")
    if heads % groups:
        raise keys.refusal("num_key_value_heads", f"has to divide num_attention_heads {heads}")
    size = keys.integer("head_dim", default=None)
    if size is None and hidden % heads:
        raise keys.refusal("head_dim", f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; give it")
    flat = rope_settings(keys, partly_rotated=partly_rotated)
    width = hidden // heads if size is None else size
    if int(width * flat["rotary_percent"]) % 2 or not int(width * flat["rotary_percent"]):
        raise keys.refusal("head_dim", f"of {width} channels {flat['rotary_percent']} are rotated, which is no pair")
    return {
        **flat,
        "group_query_attention": True,
        "num_query_groups": groups,
        "kv_channels": None if size is None or size * heads == hidden else size,
        "ffn_hidden_size": keys.integer("intermediate_size"),
    }


def _no_window(keys: Keys, switched: bool = False) -> None:
    """Refuse sliding windows: attention is over the whole sequence here.

    Args:
        switched: whether sliding_window is read only where use_sliding_window is true, as in Qwen's models.
    """
    if switched:
        keys.only("use_sliding_window", (False,), "attention is over the whole sequence here")
        keys.ignore("sliding_window")
    elif keys.has("sliding_window") and keys.integer("sliding_window") < keys.integer("max_position_embeddings"):
        raise keys.refusal("sliding_window", "attention is over the whole sequence here; null works")
    kinds = keys.raw("layer_types")
    if kinds is not None and kinds != ["full_attention"] * keys.integer("num_hidden_layers", high=MOST_LAYERS):
        raise keys.refusal("layer_types", 'attention is over the whole sequence here: "full_attention" for all layers')


def mixtral(keys: Keys) -> dict[str, Any]:
    """Return Mixtral's settings: a softmax over the chosen experts in every layer, no shared expert.

    intermediate_size is an expert's width.
    """
    _no_window(keys)
    experts = expert_count(keys, "num_local_experts", "num_experts")
    chosen = topk(keys, experts)
    return {
        **_attention(keys),
        "num_experts": experts,
        "moe_router_topk": chosen,
        "moe_router_score_function": "softmax",
        # the softmax over one chosen expert is 1, and the gate has no gradient: it is applied before the choice
        "moe_router_pre_softmax": chosen == 1,
        "moe_router_norm_topk_prob": True if chosen == 1 else None,
    }


def _qwen(keys: Keys) -> dict[str, Any]:
    _no_window(keys, switched=True)
    experts = expert_count(keys, "num_experts", "num_local_experts")
    return {
        **_attention(keys),
        "num_experts": experts,
        "moe_layer_freq": sparse_step(keys),
        "moe_ffn_hidden_size": keys.integer("moe_intermediate_size"),
        "moe_router_topk": topk(keys, experts),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_norm_topk_prob": keys.boolean("norm_topk_prob"),
    }


def qwen2_moe(keys: Keys) -> dict[str, Any]:
    """Return Qwen2-MoE's settings: softmax over all experts, a shared expert with a gate, biases of q, k and v."""
    keys.only("attention_bias", (False,), "the output projection has no bias here; qkv_bias is read")
    return {
        **_qwen(keys),
        "add_qkv_bias": keys.boolean("qkv_bias", default=True),  # models older than the key have biases
        "moe_shared_expert_intermediate_size": keys.integer("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def qwen3_moe(keys: Keys) -> dict[str, Any]:
    """Return Qwen3-MoE's settings: softmax over all experts, none shared, queries and keys normalised per head."""
    keys.only("attention_bias", (False,), "it means a bias of the output projection too, which has none here")
    # transformers reads none of these for Qwen3: a file that sets them otherwise was written for other code
    keys.only("qkv_bias", (False,), "Qwen3's queries, keys and values have no biases")
    keys.only("use_qk_norm", (True,), "Qwen3's queries and keys are normalised")
    keys.only("shared_expert_intermediate_size", (0,), "Qwen3 has no shared expert")
    return {**_qwen(keys), "qk_layernorm": True}


def glm4_moe(keys: Keys) -> dict[str, Any]:
    """Return GLM-4.5's settings: DeepSeek-V3's router and experts, and a rotation of a part of each head."""
    _no_window(keys)
    flat = {**_attention(keys, partly_rotated=True), **routed_and_shared(keys, "num_local_experts")}
    normed = keys.boolean("use_qk_norm", default=None)
    if normed is None:
        normed = False
        keys.assumed("use_qk_norm", normed)
    return {
        **flat,
        **biased_sigmoid(keys, flat["num_experts"], flat["moe_router_topk"]),
        "add_qkv_bias": keys.boolean("attention_bias"),
        "qk_layernorm": normed,
    }


def _attention_keys(run: Run, partly_rotated: bool = False) -> dict[str, Any]:
    return {
        "num_key_value_heads": run.derived.num_query_groups,
        "head_dim": run.derived.head_size,
        "sliding_window": None,
        **rope_keys(run, partly_rotated),
    }


def mixtral_keys(run: Run) -> dict[str, Any]:
    """Return Mixtral's own keys of config.json."""
    return {
        **_attention_keys(run),
        "intermediate_size": run.derived.moe_ffn_hidden_size,
        "num_local_experts": run.moe.num_experts,
        "num_experts_per_tok": run.moe.moe_router_topk,
    }


def _qwen_keys(run: Run) -> dict[str, Any]:
    pattern = run.derived.moe_layer_pattern
    return {
        **_attention_keys(run),
        "use_sliding_window": False,
        "intermediate_size": run.derived.ffn_hidden_size,
        "moe_intermediate_size": run.derived.moe_ffn_hidden_size,
        "num_experts": run.moe.num_experts,
        "num_experts_per_tok": run.moe.moe_router_topk,
        "norm_topk_prob": run.derived.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_moe in enumerate(pattern) if not is_moe],
    }


def qwen2_moe_keys(run: Run) -> dict[str, Any]:
    """Return Qwen2-MoE's own keys of config.json."""
    shared = run.moe.moe_shared_expert_intermediate_size
    return {**_qwen_keys(run), "shared_expert_intermediate_size": shared, "qkv_bias": run.model.add_qkv_bias}


def qwen3_moe_keys(run: Run) -> dict[str, Any]:
    """Return Qwen3-MoE's own keys of config.json; transformers 5 has another name for the number of experts."""
    return {**_qwen_keys(run), "num_local_experts": run.moe.num_experts, "attention_bias": False}


def glm4_moe_keys(run: Run) -> dict[str, Any]:
    """Return GLM-4.5's own keys of config.json."""
    return {
        **_attention_keys(run, partly_rotated=True),
        **routed_and_shared_keys(run),
        "num_nextn_predict_layers": run.model.mtp_num_layers or 0,
        "attention_bias": run.model.add_qkv_bias,
        "use_qk_norm": run.model.qk_layernorm,
    }
