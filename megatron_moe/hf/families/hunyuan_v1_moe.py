"""Hunyuan-A13B."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys
from megatron_moe.hf.family import Family, TensorNames

_OF_LAYERS = (
    "num_experts num_local_experts moe_topk num_experts_per_tok moe_intermediate_size num_shared_expert".split()
)


def read(keys: Keys) -> dict[str, Any]:
    """Return Hunyuan's settings: one shared expert, and queries and keys normalised after their rotation.

    The published files have a list with a number for each layer where transformers has one number.
    """
    parts.no_window(keys)
    keys.only("attention_bias", (False,), "it means a bias of the output projection too, which has none here")
    keys.only("mlp_bias", (False,), "MLPs have no biases here")
    keys.only("use_cla", (False,), "every layer has its own keys and values here")
    keys.only("use_qk_norm", (True,), "Hunyuan's queries and keys are normalised")
    keys.only("norm_topk_prob", (True,), "Hunyuan's weights are made to sum to one")
    keys.only("use_mixed_mlp_moe", (True,), "transformers has a shared expert in every model of this class")
    keys.only("moe_layer_num_skipped", (0,), "every layer is a MoE layer")
    for name in ("moe_drop_tokens", "moe_random_routing_dropped_token"):
        keys.only(name, (False,), "experts take all their tokens")
    keys.ignore("eod_token_id")
    layers, width = keys.integer("num_hidden_layers", high=MOST_LAYERS), keys.integer("intermediate_size")
    for name in _OF_LAYERS:
        value = keys.raw(name)
        if isinstance(value, list):
            if len(value) != layers or value.count(value[0]) != layers:
                raise keys.refusal(name, "has to be the same for all layers, and given for each or once")
            keys.values = {**keys.values, name: value[0]}
    for name, wanted in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        keys.only(name, (wanted,), "transformers reads none of it")
    experts = parts.expert_count(keys, "num_experts", "num_local_experts")
    size = keys.integer("head_dim", "attention_head_dim", default=None)
    if size is not None:
        keys.values = {**keys.values, "head_dim": size}
    return {
        **_rotation(keys),
        "qk_layernorm": True,
        "qk_layernorm_after_rotation": True,
        "num_experts": experts,
        "moe_shared_expert_intermediate_size": width,
        **parts.softmax_of_chosen(parts.topk(keys, experts, "moe_topk", "num_experts_per_tok")),
    }


def _rotation(keys: Keys) -> dict[str, Any]:
    """Return attention's settings. Of type "dynamic" with `alpha`, the rotary base alone is another."""
    alphas: dict[str, float | None] = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = keys.dictionary(name)
        if rope is None:
            continue
        alphas[name] = None
        if rope.get("alpha") is not None and "dynamic" in (rope.get("type"), rope.get("rope_type")):
            alphas[name] = keys.nested(rope, f"{name}.").number("alpha")
            # transformers reads no other number of it
            plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta")}
            keys.values = {**keys.values, name: plain}
    if len(set(alphas.values())) > 1:
        raise keys.refusal("rope_scaling", "contradicts rope_parameters, which means the same")
    flat, alpha = parts.attention(keys), next(iter(alphas.values()), None)
    if alpha is not None:
        if not keys.has("head_dim"):
            raise keys.refusal("head_dim", "with alpha transformers takes the base of the rotation from it")
        width = keys.integer("head_dim", low=4)
        flat["rotary_base"] *= alpha ** (width / (width - 2))
    return flat


def write(run: Run) -> dict[str, Any]:
    """Return Hunyuan's own keys of config.json, where the shared expert is as wide as another."""
    width, shared = run.derived.moe_ffn_hidden_size, run.moe.moe_shared_expert_intermediate_size
    if shared != width:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size {shared}: config.json has one width for all experts; use {width}"
        )
    return {
        **parts.attention_keys(run),
        "intermediate_size": width,
        # transformers has no such keys; vLLM and SGLang build neither norms nor a shared expert without them
        "use_qk_norm": True,
        "use_mixed_mlp_moe": True,
        "num_shared_expert": 1,
        "moe_intermediate_size": width,
        "num_experts": run.moe.num_experts,
        "moe_topk": run.moe.moe_router_topk,
        "pad_token_id": None,  # else transformers takes token 0 for padding
        "attention_bias": False,
    }


FAMILY = Family(
    name="hunyuan-v1-moe",
    architecture="HunYuanMoEV1ForCausalLM",
    model_types=("hunyuan_v1_moe",),
    read=read,
    write=write,
    models="Hunyuan-A13B",
    reads="lists with one value for all layers, `rope_scaling` with `alpha`, a shared expert",
    refuses="`attention_bias`, `use_cla`, lists of different values, other `rope_scaling`",
    names=TensorNames(
        head_norms=("self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight"),
        router="mlp.gate.wg.weight",
        shared="mlp.shared_mlp.",
    ),
)
