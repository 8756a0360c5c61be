"""GLM-4.5."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return GLM-4.5's settings: DeepSeek-V3's router and experts, and a rotation of a part of each head."""
    parts.no_window(keys)
    flat = {**parts.attention(keys, partly_rotated=True), **parts.routed_and_shared(keys, "num_local_experts")}
    normed = keys.boolean("use_qk_norm", default=None)
    if normed is None:
        normed = False
        keys.assumed("use_qk_norm", normed)
    return {
        **flat,
        **parts.biased_sigmoid(keys, flat["num_experts"], flat["moe_router_topk"]),
        "add_qkv_bias": keys.boolean("attention_bias"),
        "qk_layernorm": normed,
    }


def write(run: Run) -> dict[str, Any]:
    """Return GLM-4.5's own keys of config.json."""
    return {
        **parts.attention_keys(run, partly_rotated=True),
        **parts.routed_and_shared_keys(run),
        "num_nextn_predict_layers": run.model.mtp_num_layers or 0,
        "attention_bias": run.model.add_qkv_bias,
        "use_qk_norm": run.model.qk_layernorm,
    }


FAMILY = Family(
    name="glm4-moe",
    architecture="Glm4MoeForCausalLM",
    model_types=("glm4_moe",),
    read=read,
    write=write,
    models="GLM-4.5, -Air, GLM-4.6, GLM-4.7",
    reads="`partial_rotary_factor`, `attention_bias`, `use_qk_norm`, groups, multi-token prediction",
    refuses="no `partial_rotary_factor`",
    predicts=True,
    served_untied=True,
)
