"""DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return DeepSeek-V3's settings: sigmoid scores plus a bias, within the groups of the best two experts."""
    keys.only("topk_method", ("noaux_tc",), "DeepSeek-V3 chooses by scores plus a bias")
    flat = {**parts.latent_attention(keys), **parts.routed_and_shared(keys, "num_local_experts")}
    return {**flat, **parts.biased_sigmoid(keys, flat["num_experts"], flat["moe_router_topk"])}


def write(run: Run) -> dict[str, Any]:
    """Return DeepSeek-V3's own keys of config.json."""
    return {
        **parts.latent_attention_keys(run),
        **parts.routed_and_shared_keys(run),
        "num_nextn_predict_layers": run.model.mtp_num_layers or 0,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


FAMILY = Family(
    name="deepseek-v3",
    architecture="DeepseekV3ForCausalLM",
    # Kimi-K2 has a model_type of its own and DeepSeek-V3's class; Moonlight and R1 have both of DeepSeek-V3.
    model_types=("deepseek_v3", "kimi_k2"),
    read=read,
    write=write,
    models="DeepSeek-V3, V3.1, R1, Kimi-K2, Moonlight",
    reads="yarn, groups by their best two, biases in fp32, FP8 in blocks, multi-token prediction",
    refuses="softmax scores, `rope_interleave` false, another `topk_method`",
    predicts=True,
    served_untied=True,
)
