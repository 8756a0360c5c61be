"""Ling 2.0 and Ring 2.0 (BailingMoeV2), whose code is in the models' folders and not in transformers."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family, TensorNames


def read(keys: Keys) -> dict[str, Any]:
    """Return Ling 2.0's settings: DeepSeek-V3's router and experts, norms of each head, a part of each rotated.

    Its code normalises the weights of several experts, whatever norm_topk_prob says.
    """
    keys.only("use_bias", (False,), "the output projection of attention has no bias here")
    keys.only("score_function", ("sigmoid",), "Ling's scores are sigmoids")
    keys.only("scoring_func", ("sigmoid",), "Ling's scores are sigmoids")
    keys.only("moe_router_enable_expert_bias", (True,), "Ling chooses by scores plus a bias")
    keys.only("router_dtype", ("fp32",), "the router computes in fp32")
    for name in ("norm_head", "norm_softmax"):
        keys.only(name, (False,), "logits are not normalised here")
    flat = {**parts.attention(keys, partly_rotated=True), **parts.routed_and_shared(keys, "num_experts")}
    experts, chosen = flat["num_experts"], flat["moe_router_topk"]
    keys.only("norm_topk_prob", (chosen > 1,), "Ling's code normalises the weights of several experts")
    keys.only("moe_shared_expert_intermediate_size", (flat["moe_ffn_hidden_size"],), "shared experts are as wide")
    keys.ignore("mtp_loss_scaling_factor", "embedding_dropout", "output_dropout", "max_window_layers")
    return {
        **flat,
        **parts.groups_of_experts(keys, experts, chosen, "top2"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_norm_topk_prob": chosen > 1,
        "add_qkv_bias": keys.boolean("use_qkv_bias", default=False),
        "qk_layernorm": keys.boolean("use_qk_norm"),
    }


def write(run: Run) -> dict[str, Any]:
    """Return Ling 2.0's own keys of config.json."""
    keys = parts.routed_and_shared_keys(run)
    experts, shared = keys.pop("n_routed_experts"), keys.pop("n_shared_experts")
    return {
        **parts.attention_keys(run, partly_rotated=True),
        **keys,
        "num_experts": experts,
        "num_shared_experts": shared or None,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "num_nextn_predict_layers": 0,
        "use_bias": False,
        "use_qkv_bias": run.model.add_qkv_bias,
        "use_qk_norm": run.model.qk_layernorm,
    }


FAMILY = Family(
    name="bailing-moe-v2",
    architecture="BailingMoeV2ForCausalLM",
    model_types=("bailing_moe", "bailing_moe_v2"),
    read=read,
    write=write,
    models="Ling 2.0, Ring 2.0: mini, flash, 1T",
    reads="`partial_rotary_factor`, `use_qkv_bias`, `use_qk_norm`, groups, shared experts",
    refuses="`use_bias`, multi-token prediction",
    names=TensorNames(
        embedding="word_embeddings.weight",
        query_key_value=("attention.query_key_value",),
        attention_output="attention.dense",
        head_norms=("attention.query_layernorm.weight", "attention.key_layernorm.weight"),
        router_bias="mlp.gate.expert_bias",
    ),
)
