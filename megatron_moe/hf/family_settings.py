"""Converts config.json of each family of models into settings and back. Loads no torch."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys

# ---- Families with latent attention: DeepSeek-V2 and DeepSeek-V3.


_MOST_EXPERTS = 200_000  # of all layers together; twice those of the largest published model


def _layer_freq(keys: Keys, decided_by: str, pattern: list[int]) -> int | str:
    """Return --moe-layer-freq of a pattern: 1 if all layers are MoE layers, else an expression like [0]+[1]*26."""
    if not any(pattern):
        raise keys.refusal(decided_by, f"leaves none of the {len(pattern)} layers as a MoE layer")
    if all(pattern):
        return 1
    runs = [(kind, len(list(group))) for kind, group in groupby(pattern)]
    return "+".join(f"[{kind}]" + (f"*{count}" if count > 1 else "") for kind, count in runs)


def _latent(keys: Keys) -> dict[str, Any]:
    """Return the settings of attention and dense layers, which DeepSeek-V2 and -V3 have in common."""
    keys.only("attention_bias", (False,), "latent attention has no biases here")
    keys.only("rope_interleave", (True,), "latent attention rotates neighbouring pairs here")
    heads = keys.integer("num_attention_heads")
    if keys.integer("num_key_value_heads", default=heads) != heads:
        raise keys.refusal(
            "num_key_value_heads", f"latent attention has a key and a value for every head; use {heads} or null"
        )
    if "q_lora_rank" not in keys.values:
        raise keys.refusal("q_lora_rank", "has to be an integer, or null for queries without a low rank")
    nope, rope = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim", low=2)
    if keys.integer("qk_head_dim", default=nope + rope) != nope + rope:
        raise keys.refusal("qk_head_dim", f"contradicts qk_nope_head_dim + qk_rope_head_dim = {nope + rope}")
    if rope % 2:
        raise keys.refusal("qk_rope_head_dim", "rotation takes pairs of channels; an even width works")
    keys.ignore("head_dim")  # transformers writes qk_rope_head_dim there and does not read it
    return {
        **rope_settings(keys, rope),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": keys.integer("q_lora_rank", default=None),
        "kv_lora_rank": keys.integer("kv_lora_rank"),
        "qk_head_dim": nope,
        "qk_pos_emb_head_dim": rope,
        "v_head_dim": keys.integer("v_head_dim"),
        "ffn_hidden_size": keys.integer("intermediate_size"),
    }


def routed_and_shared(keys: Keys, *aliases: str) -> dict[str, Any]:
    """Return the experts' settings of DeepSeek and GLM: routed ones, shared ones as one MLP, dense layers first.

    Args:
        aliases: other names of n_routed_experts.
    """
    experts = expert_count(keys, "n_routed_experts", *aliases)
    width = keys.integer("moe_intermediate_size")
    factor = keys.number("routed_scaling_factor")
    shared = None if keys.is_null("n_shared_experts") else keys.integer("n_shared_experts") * width
    layers, dense = keys.integer("num_hidden_layers", high=MOST_LAYERS), keys.integer("first_k_dense_replace", low=0)
    pattern = ([0] * min(dense, layers) + [1] * layers)[:layers]
    moe_layer_freq = _layer_freq(keys, "first_k_dense_replace", pattern)
    keys.only("moe_layer_freq", (1, pattern), "every layer after first_k_dense_replace is a MoE layer")
    return {
        "num_experts": experts,
        "moe_layer_freq": moe_layer_freq,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared,
        "moe_router_topk": topk(keys, experts),
        "moe_router_topk_scaling_factor": None if factor == 1.0 else factor,
    }


def expert_count(keys: Keys, *names: str) -> int:
    """Return the number of experts per layer, bounded by the number that all layers together may have."""
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    return keys.integer(*names, low=2, high=max(_MOST_EXPERTS // layers, 2))


def topk(keys: Keys, experts: int) -> int:
    """Return the number of experts per token, at most `experts`."""
    chosen = keys.integer("num_experts_per_tok")
    if chosen > experts:
        raise keys.refusal("num_experts_per_tok", f"there are {experts} experts; that many or less")
    return chosen


def _groups(keys: Keys, experts: int, chosen: int, score: str) -> dict[str, Any]:
    """Return the settings of group-limited routing; none where there is one group."""
    groups = 1 if score == "top2" and keys.is_null("n_group") else keys.integer("n_group")
    if groups == 1:
        keys.integer("topk_group", default=1)
        return {}
    if experts % groups:
        raise keys.refusal("n_group", f"the groups have to divide the {experts} experts")
    group_topk = keys.integer("topk_group")
    if group_topk > groups or group_topk > chosen:
        raise keys.refusal("topk_group", f"has to be at most n_group {groups} and num_experts_per_tok {chosen}")
    if experts // groups * group_topk < chosen:
        raise keys.refusal(
            "topk_group", f"{group_topk} groups of {experts // groups} experts have fewer than the {chosen} chosen"
        )
    if score == "top2" and experts // groups < 2:
        raise keys.refusal("n_group", "a group is scored by its best two experts, and has one; fewer groups work")
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": group_topk,
        "moe_router_group_score": score,
    }


def deepseek_v2(keys: Keys) -> dict[str, Any]:
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
    flat = {**_latent(keys), **routed_and_shared(keys, "num_experts")}
    if keys.raw("topk_method") == "group_limited_greedy":
        flat |= _groups(keys, flat["num_experts"], flat["moe_router_topk"], "max")
    else:
        keys.ignore("n_group", "topk_group")
    return {
        **flat,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_norm_topk_prob": False,
    }


def deepseek_v3(keys: Keys) -> dict[str, Any]:
    """Return DeepSeek-V3's settings: sigmoid scores plus a bias, within the groups of the best two experts."""
    keys.only("topk_method", ("noaux_tc",), "DeepSeek-V3 chooses by scores plus a bias")
    flat = {**_latent(keys), **routed_and_shared(keys, "num_local_experts")}
    return {**flat, **biased_sigmoid(keys, flat["num_experts"], flat["moe_router_topk"])}


def biased_sigmoid(keys: Keys, experts: int, chosen: int) -> dict[str, Any]:
    """Return the router's settings of DeepSeek-V3 and GLM-4.5."""
    keys.only("scoring_func", ("sigmoid",), "these models' scores are sigmoids")
    return {
        **_groups(keys, experts, chosen, "top2"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_norm_topk_prob": keys.boolean("norm_topk_prob"),
    }


def _latent_keys(run: Run) -> dict[str, Any]:
    model = run.model
    return {
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "attention_bias": False,
        "moe_layer_freq": 1,
        **rope_keys(run),
    }


def routed_and_shared_keys(run: Run) -> dict[str, Any]:
    """Return the keys that `routed_and_shared` reads, and those of groups.

    Raises:
        ConfigError: the shared expert is no multiple of a routed one.
    """
    moe, width = run.moe, run.derived.moe_ffn_hidden_size
    shared = moe.moe_shared_expert_intermediate_size or 0
    if shared % width:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size {shared}: config.json counts shared experts of "
            f"--moe-ffn-hidden-size {width}; a model with a multiple of that can be written"
        )
    return {
        "intermediate_size": run.derived.ffn_hidden_size,
        "moe_intermediate_size": width,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": shared // width,
        "num_experts_per_tok": moe.moe_router_topk,
        "norm_topk_prob": run.derived.norm_topk_prob,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
        "n_group": moe.moe_router_num_groups or 1,
        "topk_group": moe.moe_router_group_topk or 1,
        "first_k_dense_replace": run.derived.moe_layer_pattern.index(1),
    }


def deepseek_v2_keys(run: Run) -> dict[str, Any]:
    """Return DeepSeek-V2's own keys of config.json."""
    method = "greedy" if run.moe.moe_router_num_groups is None else "group_limited_greedy"
    return {**_latent_keys(run), **routed_and_shared_keys(run), "scoring_func": "softmax", "topk_method": method}


def deepseek_v3_keys(run: Run) -> dict[str, Any]:
    """Return DeepSeek-V3's own keys of config.json."""
    return {
        **_latent_keys(run),
        **routed_and_shared_keys(run),
        "num_nextn_predict_layers": run.model.mtp_num_layers or 0,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


# ---- Families with grouped-query attention: Mixtral, Qwen-MoE, GLM-4.5.


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
    flat = _attention(keys)
    layers, step = (
        keys.integer("num_hidden_layers", high=MOST_LAYERS),
        keys.integer("decoder_sparse_step", default=None),
    )
    if step is None:
        step = 1
        keys.assumed("decoder_sparse_step", step)
    listed = keys.raw("mlp_only_layers")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(type(item) is not int or not 0 <= item < layers for item in listed):
        raise keys.refusal("mlp_only_layers", f"has to be a list of integers from 0 to {layers - 1}")
    # Every decoder_sparse_step-th layer from one has experts, except those listed.
    pattern = [int(layer not in listed and (layer + 1) % step == 0) for layer in range(layers)]
    return {
        **flat,
        "num_experts": experts,
        "moe_layer_freq": _layer_freq(keys, "decoder_sparse_step", pattern),
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


# ---- The rotary embedding. transformers 5 writes one dictionary, `rope_parameters`; published models have
# `rope_theta`, `rope_scaling` and `partial_rotary_factor` as separate keys. Both are read, and both are written.

_YARN_KEYS = {
    *"type rope_type rope_theta partial_rotary_factor factor original_max_position_embeddings".split(),
    *"beta_fast beta_slow mscale mscale_all_dim attention_factor truncate".split(),
}
_SPELLED_OUTSIDE = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


def rope_settings(keys: Keys, latent_width: int | None = None, partly_rotated: bool = False) -> dict[str, Any]:
    """Return the fields of the rotary embedding.

    Args:
        latent_width: width of the rotary part of latent attention; None for other attention. Yarn is computed for
            latent attention, and no other kind of scaling is computed.
        partly_rotated: whether the family rotates a share of each head, which the file then has to give.

    Raises:
        ConfigError: the kind of rotary embedding is not computed here, or the spellings contradict each other.
    """
    latent = latent_width is not None
    v5, hub = _nested(keys, "rope_parameters"), _nested(keys, "rope_scaling")
    base = _agreed(keys, "rope_theta", v5, hub)
    if base is None:
        raise keys.refusal("rope_theta", "the base of the rotary frequencies has to be given; Mixtral's is 1000000.0")
    partial = _agreed(keys, "partial_rotary_factor", v5, hub)
    if v5 is not None and hub is not None:
        mine, other = (
            {key: value for key, value in part.values.items() if key not in _SPELLED_OUTSIDE} for part in (v5, hub)
        )
        if _kind(v5) != _kind(hub) or mine != other:
            raise keys.refusal("rope_scaling", f"contradicts rope_parameters {v5.values!r}, which means the same")
    stretched = hub if hub is not None else v5
    flat: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": base, "rotary_percent": 1.0}
    if partly_rotated:
        if partial is None or partial > 1.0:
            raise keys.refusal("partial_rotary_factor", "the share of a head that is rotated, up to 1; GLM-4.5: 0.5")
        flat["rotary_percent"] = partial
    elif partial not in (None, 1.0):
        raise keys.refusal("partial_rotary_factor", f"{partial}: this family rotates whole heads; 1.0 works, or none")
    kind = "default" if stretched is None else _kind(stretched)
    if kind == "default" or stretched is None:
        if stretched is not None and stretched.number("factor", default=1.0) != 1.0:
            raise stretched.refusal("factor", "a rotary embedding of type 'default' is not stretched; drop one of them")
        return flat
    if kind != "yarn" or not latent:
        works = "'yarn' and 'default' are computed" if latent else "'default' is computed"
        raise stretched.refusal(
            "rope_type" if "rope_type" in stretched.values else "type",
            f"this rotary embedding is not computed {'here' if latent else 'for grouped-query attention'}; {works}: "
            "set it to null to convert a model that was trained without it",
        )
    return {**flat, **_yarn(stretched, base, latent_width or 0)}


def _nested(keys: Keys, name: str) -> Keys | None:
    values = keys.dictionary(name)
    if values is None:
        return None
    for key, value in values.items():
        if isinstance(value, dict):
            raise keys.refusal(name, f"holds another rotary embedding for {key!r}; one for all layers is computed")
    return keys.nested(values, f"{name}.") if values else None


def _kind(nested: Keys) -> str:
    kind = nested.raw("rope_type", "type")
    return "default" if kind is None else str(kind)


def _agreed(keys: Keys, name: str, *nested: Keys | None) -> float | None:
    """Return a number that may be given outside or inside the dictionaries, and has to be the same in all of them."""
    found: list[tuple[str, float]] = []
    for part in (keys, *nested):
        if part is not None:
            value = part.number(name, default=None)
            if value is not None:
                found.append((part.prefix + name, value))
    for spelled, value in found:
        if value != found[0][1]:
            raise keys.refusal(name, f"{found[0][0]} is {found[0][1]} and {spelled} is {value}; they mean the same")
    return found[0][1] if found else None


def _magnitude(factor: float, mscale: float) -> float:
    """Return the growth of the attention logits for a context `factor` times as long."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(keys: Keys, base: float, width: int) -> dict[str, Any]:
    """Return the settings of yarn with which amplitudes and the scale of the softmax are those of transformers.

    In transformers, the amplitude is `attention_factor` where it is given; the ratio of the magnitudes of mscale and
    mscale_all_dim where both are given and not 0; else the magnitude of 1. The softmax is scaled by the square of
    mscale_all_dim's magnitude. Here the amplitude is always that ratio, so mscale is solved for where needed.
    """
    stray = sorted(keys.values.keys() - _YARN_KEYS)
    if stray:
        raise keys.refusal(stray[0], f"is not a setting of yarn; these are: {', '.join(sorted(_YARN_KEYS))}")
    keys.only("truncate", (True,), "yarn's ramp begins and ends at whole channels here")
    factor = keys.number("factor")
    if factor < 1.0:
        raise keys.refusal("factor", "yarn stretches the context; a factor has to be at least 1")
    mscale = keys.number("mscale", positive=False, default=0.0)
    all_dim = keys.number("mscale_all_dim", positive=False, default=0.0)
    given = keys.number("attention_factor", default=None)
    ratio = given is None and bool(mscale and all_dim)
    if given is None and bool(mscale) != bool(all_dim):
        keys.notes.append(
            f"{keys.prefix}mscale {mscale} and mscale_all_dim {all_dim}: with one of them alone the amplitude follows "
            "from factor, as in transformers; DeepSeek's own code scales by the one"
        )
    amplitude = _magnitude(factor, 1.0) if given is None else given
    fields = {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        # transformers takes max_position_embeddings where it is missing, DeepSeek's own code 4096: so it is asked for
        "original_max_position_embeddings": keys.integer("original_max_position_embeddings"),
        "beta_fast": keys.number("beta_fast", positive=False, default=32.0) or 32.0,
        "beta_slow": keys.number("beta_slow", positive=False, default=1.0) or 1.0,
        "mscale_all_dim": all_dim,
        "mscale": mscale if ratio else 1.0,
    }
    if not ratio and amplitude != _magnitude(factor, 1.0) / _magnitude(factor, all_dim):
        if factor <= 1.0:
            raise keys.refusal("attention_factor", "a context that is not stretched has the amplitude 1; drop it")
        fields["mscale"] = (amplitude * _magnitude(factor, all_dim) - 1.0) / (0.1 * math.log(factor))
        if fields["mscale"] <= 0.0:
            least = 1.0 / _magnitude(factor, all_dim)
            raise keys.refusal("attention_factor", f"with this factor and mscale_all_dim it has to be above {least}")
    if fields["beta_fast"] < fields["beta_slow"]:
        raise keys.refusal("beta_fast", f"has to be at least beta_slow {fields['beta_slow']}")
    # A ramp outside of the channels is cut off by each implementation in its own way; a base of 1 has none.
    low, high = 1.0, 0.0
    if base != 1.0:
        context, turns = fields["original_max_position_embeddings"], (fields["beta_fast"], fields["beta_slow"])
        low, high = (width * math.log(context / (turn * 2 * math.pi)) / (2 * math.log(base)) for turn in turns)
    if max(math.floor(low), 0) > min(math.ceil(high), width - 1):
        raise keys.refusal(
            "original_max_position_embeddings",
            f"with beta_fast {fields['beta_fast']}, beta_slow {fields['beta_slow']} and rope_theta {base} yarn's ramp "
            f"is outside of the {width // 2} frequencies; a context of some thousand positions works",
        )
    return fields


def amplitude(run: Run) -> float:
    """Return the factor of the cosines and sines of latent attention."""
    model = run.model
    if model.rope_type != "yarn":
        return 1.0
    factor = model.rotary_scaling_factor
    return _magnitude(factor, model.mscale) / _magnitude(factor, model.mscale_all_dim)


def rope_keys(run: Run, partly_rotated: bool = False) -> dict[str, Any]:
    """Return the rotary embedding's keys of config.json, in both spellings, as `rope_settings` reads them."""
    model = run.model
    parameters: dict[str, Any] = {"rope_type": "default"}
    if model.rope_type == "yarn":
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        parameters = {"rope_type": "yarn", "factor": model.rotary_scaling_factor}
        parameters |= {name: getattr(model, name) for name in names}
        if not model.mscale_all_dim and model.mscale != 1.0:
            parameters["attention_factor"] = amplitude(run)  # without both, transformers reads neither
    hub = {"type": "yarn", **parameters} if model.rope_type == "yarn" else None
    spelled: dict[str, Any] = {"rope_theta": model.rotary_base}
    if partly_rotated:
        spelled["partial_rotary_factor"] = model.rotary_percent
    return {**spelled, "rope_scaling": hub, "rope_parameters": {**spelled, **parameters}}
