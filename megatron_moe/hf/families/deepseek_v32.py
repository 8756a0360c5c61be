"""DeepSeek-V3.2."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys
from megatron_moe.hf.family import Family, TensorNames


def read(keys: Keys) -> dict[str, Any]:
    """Return DeepSeek-V3.2's settings: DeepSeek-V3's, for sequences in which its attention selects every key.

    The indexer, which selects them, is carried: it is neither computed nor trained.
    """
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    keys.only("topk_method", ("noaux_tc",), "the experts are chosen by scores plus a bias")
    keys.only("mlp_bias", (False,), "MLPs have no biases here")
    keys.only("layer_types", (["indexed_attention"] * layers,), "every layer selects keys")
    if keys.is_null("q_lora_rank"):
        raise keys.refusal("q_lora_rank", "the indexer reads the queries' latent; an integer works")
    keys.ignore("index_head_dim", "index_n_heads", "indexer_rope_interleave")
    # of GLM-5, whose layers may use the selection of a layer before: of all keys too
    keys.ignore("indexer_types", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset")
    keys.ignore("index_share_for_mtp_iteration")
    flat = {**parts.latent_attention(keys), **parts.routed_and_shared(keys, "num_local_experts", kinds=True)}
    routed = parts.biased_sigmoid(keys, flat["num_experts"], flat["moe_router_topk"])
    return {**flat, **routed, "dsa_indexer_topk": keys.integer("index_topk")}


def write(run: Run) -> dict[str, Any]:
    """Refuse: a model that was trained here from scratch has no indexer."""
    raise ConfigError("models here have no indexer of sparse attention; --family deepseek-v3 writes them without it")


FAMILY = Family(
    name="deepseek-v32",
    architecture="DeepseekV32ForCausalLM",
    model_types=("deepseek_v32",),
    read=read,
    write=write,
    models="DeepSeek-V3.2, -Exp, -Speciale",
    reads="up to `index_topk` tokens; the indexer goes along as it is",
    refuses="longer sequences, queries without a low rank",
    names=TensorNames(carried=(".self_attn.indexer.",)),
    without="deepseek-v3",
    predicts=True,
    served_untied=True,
)
