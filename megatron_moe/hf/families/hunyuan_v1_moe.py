"""Hunyuan-A13B."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys
from megatron_moe.hf.family import Family, TensorNames


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
    keys.only("moe_drop_tokens", (False,), "experts take all their tokens")
    keys.only("moe_random_routing_dropped_token", (False,), "experts take all their tokens")
    keys.ignore("eod_token_id")
    one = Keys(dict(keys.values), keys.where)
    for name in ("num_experts", "num_local_experts", "moe_topk", "num_experts_per_tok"):
        one.values[name] = _of_every_layer(keys, name)
    width = keys.integer("intermediate_size")
    for name, wanted in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if keys.has(name) and _of_every_layer(keys, name) != wanted:
            raise keys.refusal(name, f"transformers reads none of it, and computes with {wanted}")
    experts = parts.expert_count(one, "num_experts", "num_local_experts")
    if keys.has("attention_head_dim") and not keys.has("head_dim"):
        keys.values = {**keys.values, "head_dim": keys.integer("attention_head_dim")}
    return {
        **_rotation(keys),
        "qk_layernorm": True,
        "qk_layernorm_after_rotation": True,
        "num_experts": experts,
        "moe_shared_expert_intermediate_size": width,
        **parts.softmax_of_chosen(parts.topk(one, experts, "moe_topk", "num_experts_per_tok")),
    }


def _of_every_layer(keys: Keys, name: str) -> Any:
    """Return a value, or the one that a list has for every layer."""
    value = keys.raw(name)
    if not isinstance(value, list):
        return value
    if len(value) != keys.integer("num_hidden_layers", high=MOST_LAYERS) or value.count(value[0]) != len(value):
        raise keys.refusal(name, "has to be the same for all layers, and given for each or once")
    return value[0]


def _rotation(keys: Keys) -> dict[str, Any]:
    """Return attention's settings.

    A rotary embedding of type "dynamic" with `alpha` does not depend on the length: its base alone is another.
    """
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
    """Return Hunyuan's own keys of config.json.

    Raises:
        ConfigError: the shared expert is not as wide as another.
    """
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
