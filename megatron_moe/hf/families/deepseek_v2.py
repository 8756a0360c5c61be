"""DeepSeek-V2."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return DeepSeek-V2's settings: softmax over all experts, greedy or group-limited, weights not normalised."""
    keys.only("scoring_func", ("softmax",), "DeepSeek-V2's scores are a softmax")
    keys.only(
        "norm_topk_prob",
        (False,),
        "DeepSeek's own code normalises the weights instead of scaling them and transformers does neither, so that "
        "there is no agreed meaning",
    )
    keys.only("mlp_bias", (False,), "MLPs have no biases here")
    keys.only("topk_method", ("greedy", "group_limited_greedy"), "DeepSeek-V2 chooses in two ways")
    if not keys.has("topk_method"):
        raise keys.refusal("topk_method", 'has to say how experts are chosen: "greedy" or "group_limited_greedy"')
    flat = {**parts.latent_attention(keys), **parts.routed_and_shared(keys, "num_experts")}
    if keys.raw("topk_method") == "group_limited_greedy":
        flat |= parts.groups_of_experts(keys, flat["num_experts"], flat["moe_router_topk"], "max")
    else:
        keys.ignore("n_group", "topk_group")
    return {
        **flat,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_norm_topk_prob": False,
    }


def write(run: Run) -> dict[str, Any]:
    """Return DeepSeek-V2's own keys of config.json."""
    method = "greedy" if run.moe.moe_router_num_groups is None else "group_limited_greedy"
    return {
        **parts.latent_attention_keys(run),
        **parts.routed_and_shared_keys(run),
        "scoring_func": "softmax",
        "topk_method": method,
    }


FAMILY = Family(
    name="deepseek-v2",
    architecture="DeepseekV2ForCausalLM",
    model_types=("deepseek_v2",),
    read=read,
    write=write,
    models="DeepSeek-V2, -Lite, Coder-V2, -Lite",
    reads="yarn, groups by their best expert, low-rank queries or none",
    refuses="`norm_topk_prob` true, `mlp_bias`, another `topk_method`, sigmoid scores",
    served_untied=True,
)
