"""GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return GLM-4.7-Flash's settings: DeepSeek-V3's, with a list of its dense layers."""
    keys.only("topk_method", ("noaux_tc",), "GLM-4.7-Flash chooses by scores plus a bias")
    if not keys.has("mlp_layer_types"):  # transformers has one dense layer then, whatever the key is
        keys.only("first_k_dense_replace", (1,), "the first layer is dense where mlp_layer_types is missing")
    flat = {**parts.latent_attention(keys), **parts.routed_and_shared(keys, "num_local_experts", kinds=True)}
    return {**flat, **parts.biased_sigmoid(keys, flat["num_experts"], flat["moe_router_topk"])}


def write(run: Run) -> dict[str, Any]:
    """Return GLM-4.7-Flash's own keys of config.json."""
    return {
        **parts.latent_attention_keys(run),
        **parts.routed_and_shared_keys(run),
        "mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in run.derived.moe_layer_pattern],
        "num_nextn_predict_layers": run.model.mtp_num_layers or 0,
        "rope_interleave": True,
        "topk_method": "noaux_tc",
    }


FAMILY = Family(
    name="glm4-moe-lite",
    architecture="Glm4MoeLiteForCausalLM",
    model_types=("glm4_moe_lite",),
    read=read,
    write=write,
    models="GLM-4.7-Flash",
    reads="`mlp_layer_types`, groups, yarn, multi-token prediction",
    refuses="`attention_bias`, `rope_interleave` false, dense layers behind others",
    predicts=True,
    served_untied=True,
)
