"""Converts the parts of config.json that several families share into settings and back. Loads no torch.

A family's file (`hf/families/`) puts its format together from these.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys
from megatron_moe.hf.rope import rope_keys, rope_settings

_MOST_EXPERTS = 200_000  # of all layers together; twice those of the largest published model


def layer_freq(keys: Keys, decided_by: str, pattern: list[int]) -> int | str:
    """Return --moe-layer-freq of a pattern: 1 if all layers are MoE layers, else an expression like [0]+[1]*26."""
    if not any(pattern):
        raise keys.refusal(decided_by, f"leaves none of the {len(pattern)} layers as a MoE layer")
    if all(pattern):
        return 1
    runs = [(kind, len(list(group))) for kind, group in groupby(pattern)]
    return "+".join(f"[{kind}]" + (f"*{count}" if count > 1 else "") for kind, count in runs)


def routed_and_shared(keys: Keys, *aliases: str, kinds: bool = False) -> dict[str, Any]:
    """Return the experts' settings of DeepSeek, GLM and Ling: routed ones, shared ones as one MLP, dense layers first.

    Args:
        aliases: other names of n_routed_experts.
        kinds: whether mlp_layer_types, where it is given, has the kind of each layer.
    """
    experts = expert_count(keys, "n_routed_experts", *aliases)
    width = keys.integer("moe_intermediate_size")
    factor = keys.number("routed_scaling_factor")
    none_shared = keys.is_null("n_shared_experts") or keys.is_null("num_shared_experts")
    shared = None if none_shared else keys.integer("n_shared_experts", "num_shared_experts") * width
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    listed = keys.raw("mlp_layer_types") if kinds else None
    if listed is None:
        dense = keys.integer("first_k_dense_replace", low=0)
        pattern = ([0] * min(dense, layers) + [1] * layers)[:layers]
    elif not isinstance(listed, list) or len(listed) != layers or not {*map(str, listed)} <= {"dense", "sparse"}:
        raise keys.refusal("mlp_layer_types", f'has to be a list of {layers} names, "dense" or "sparse"')
    else:
        pattern = [int(kind == "sparse") for kind in listed]
        dense = keys.integer("first_k_dense_replace", low=0, default=pattern.index(1) if any(pattern) else 0)
        if pattern != ([0] * min(dense, layers) + [1] * layers)[:layers]:
            raise keys.refusal("mlp_layer_types", f"contradicts first_k_dense_replace {dense}: dense layers come first")
    moe_layer_freq = layer_freq(keys, "first_k_dense_replace", pattern)
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


def topk(keys: Keys, experts: int, *names: str) -> int:
    """Return the number of experts per token, at most `experts`; names: of its key, default num_experts_per_tok."""
    names = names or ("num_experts_per_tok",)
    chosen = keys.integer(*names)
    if chosen > experts:
        raise keys.refusal(keys.spelled(names), f"there are {experts} experts; that many or less")
    return chosen


def softmax_of_chosen(chosen: int) -> dict[str, Any]:
    """Return the router's settings for weights that are a softmax over the chosen experts' logits.

    Over one expert it is 1, and the gate has no gradient: it is applied before the choice.
    """
    return {
        "moe_router_topk": chosen,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": chosen == 1,
        "moe_router_norm_topk_prob": True if chosen == 1 else None,
    }


def groups_of_experts(keys: Keys, experts: int, chosen: int, score: str) -> dict[str, Any]:
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


def biased_sigmoid(keys: Keys, experts: int, chosen: int, *names: str) -> dict[str, Any]:
    """Return the router's settings of DeepSeek-V3 and GLM-4.5. names: other names of its score."""
    keys.only("scoring_func", ("sigmoid", *names), "these models' scores are sigmoids")
    return {
        **groups_of_experts(keys, experts, chosen, "top2"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_norm_topk_prob": keys.boolean("norm_topk_prob"),
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


# ---- Latent attention.


def latent_attention(keys: Keys) -> dict[str, Any]:
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
        **rope_settings(keys, rope, latent=True),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": keys.integer("q_lora_rank", default=None),
        "kv_lora_rank": keys.integer("kv_lora_rank"),
        "qk_head_dim": nope,
        "qk_pos_emb_head_dim": rope,
        "v_head_dim": keys.integer("v_head_dim"),
        "ffn_hidden_size": keys.integer("intermediate_size"),
    }


def latent_attention_keys(run: Run) -> dict[str, Any]:
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


# ---- Grouped-query attention.


def attention(keys: Keys, partly_rotated: bool = False, rotated: int | None = None) -> dict[str, Any]:
    """Return the settings of attention and dense layers.

    Args:
        partly_rotated: whether the family rotates a share of each head.
        rotated: how many channels of a head are rotated, where a key of the family's own says it.
    """
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    groups = keys.integer("num_key_value_heads")
    if heads % groups:
        raise keys.refusal("num_key_value_heads", f"has to divide num_attention_heads {heads}")
    size = keys.integer("head_dim", default=None)
    if size is None and hidden % heads:
        raise keys.refusal("head_dim", f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; give it")
    width = hidden // heads if size is None else size
    share = None if rotated is None else rotated / width
    return {
        **rope_settings(keys, width, partly_rotated=partly_rotated, share=share),
        "group_query_attention": True,
        "num_query_groups": groups,
        "kv_channels": None if size is None or size * heads == hidden else size,
        "ffn_hidden_size": keys.integer("intermediate_size"),
    }


def no_window(keys: Keys, switched: bool = False) -> None:
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


def attention_keys(run: Run, partly_rotated: bool = False) -> dict[str, Any]:
    return {
        "num_key_value_heads": run.derived.num_query_groups,
        "head_dim": run.derived.head_size,
        "sliding_window": None,
        **rope_keys(run, partly_rotated),
    }


def dense(keys: Keys) -> dict[str, Any]:
    """Return the settings of a dense model; the keys of these families that would make it another one are refused."""
    keys.only("attention_bias", (False,), "it means a bias of the output projection too, which has none here")
    keys.only("mlp_bias", (False,), "MLPs have no biases here")
    return attention(keys)


def dense_keys(run: Run) -> dict[str, Any]:
    return {**attention_keys(run), "intermediate_size": run.derived.ffn_hidden_size}


# ---- OLMo: one norm over all query heads and one over all key heads.


def olmo_attention(keys: Keys) -> dict[str, Any]:
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    keys.only("attention_bias", (False,), "it means a bias of the output projection too, which has none here")
    keys.only("head_dim", (hidden // heads,), "the heads of this family divide hidden_size")
    return {**attention(keys), "qk_layernorm": True, "qk_layernorm_across_heads": True}


def olmo_attention_keys(run: Run) -> dict[str, Any]:
    # transformers' default of pad_token_id is a token of the published vocabulary, which has no gradient there.
    keys = {"num_key_value_heads": run.derived.num_query_groups, "attention_bias": False, "pad_token_id": None}
    return {**keys, **rope_keys(run)}


def olmo_experts(keys: Keys) -> dict[str, Any]:
    """Return a softmax over all experts in every layer; intermediate_size is an expert's width."""
    experts = expert_count(keys, "num_experts", "num_local_experts")
    return {
        "num_experts": experts,
        "moe_router_topk": topk(keys, experts),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_norm_topk_prob": keys.boolean("norm_topk_prob"),
    }


def olmo_experts_keys(run: Run) -> dict[str, Any]:
    return {
        "intermediate_size": run.derived.moe_ffn_hidden_size,
        "num_experts": run.moe.num_experts,
        "num_experts_per_tok": run.moe.moe_router_topk,
        "norm_topk_prob": run.derived.norm_topk_prob,
    }


# ---- Qwen's experts: every n-th layer has them, but for those listed.


def qwen(keys: Keys) -> dict[str, Any]:
    no_window(keys, switched=True)
    experts = expert_count(keys, "num_experts", "num_local_experts")
    flat = attention(keys)
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
        "moe_layer_freq": layer_freq(keys, "decoder_sparse_step", pattern),
        "moe_ffn_hidden_size": keys.integer("moe_intermediate_size"),
        "moe_router_topk": topk(keys, experts),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_norm_topk_prob": keys.boolean("norm_topk_prob"),
    }


def qwen_keys(run: Run) -> dict[str, Any]:
    pattern = run.derived.moe_layer_pattern
    return {
        **attention_keys(run),
        "use_sliding_window": False,
        "intermediate_size": run.derived.ffn_hidden_size,
        "moe_intermediate_size": run.derived.moe_ffn_hidden_size,
        "num_experts": run.moe.num_experts,
        "num_experts_per_tok": run.moe.moe_router_topk,
        "norm_topk_prob": run.derived.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_moe in enumerate(pattern) if not is_moe],
    }
