"""Odd configurations of every family, and errors that a converter could make: tables behind test_mapping_ranks.py.

Both are written once, in the keys and names that families share, and each applies to the families that have them. A
family whose class has a key that no row changes deserves a row here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.model_flags import ROPE_SETTINGS
from megatron_moe.hf.family import TensorNames
from tests.helpers import tiny_models

Settings = dict[str, Any]
Tensors = dict[str, Tensor]

# ---- Odd configurations: what is changed in a case's settings.

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")
SHARED = {
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 72),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 3),
}


def _named(settings: Settings, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if settings.get(name) is not None), None)


def _fewer_groups(settings: Settings) -> Settings:
    return {key: 1 for key in ("n_group", "topk_group") if settings.get(key) is not None}


def _rope(settings: Settings, **changes: Any) -> Settings:
    return {"rope_parameters": {**settings["rope_parameters"], **changes}}


def _head_width(settings: Settings) -> int:
    return settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]  # type: ignore[no-any-return]


STRETCHED: Settings = {"factor": 4.0, "original_max_position_embeddings": 8}


def _stretched(kind: str, **changes: Any) -> Callable[[Settings], Settings | None]:
    """Frequencies of another kind, stretched within the length of a test; latent attention has yarn alone."""

    def changed(settings: Settings) -> Settings | None:
        said = settings["rope_parameters"]
        if said["rope_type"] == kind or (_latent(settings) and kind not in ("default", "yarn")):
            return None
        kept = {key: value for key, value in said.items() if key == "partial_rotary_factor"}
        found = {"rope_type": kind, "rope_theta": 100.0, **kept, **changes}
        if kind == "longrope":
            pairs = int(_head_width(settings) * kept.get("partial_rotary_factor", 1.0)) // 2
            found |= {"short_factor": [1.0] * pairs, "long_factor": [1.0 + 0.5 * pair for pair in range(pairs)]}
        return {"rope_parameters": found}

    return changed


def _set(*names: str, to: Any) -> Callable[[Settings], Settings | None]:
    """Change the first of the keys that the case sets."""

    def changed(settings: Settings) -> Settings | None:
        name = _named(settings, names)
        return None if name is None or settings[name] == to else {name: to}

    return changed


def _toggled(*names: str) -> Callable[[Settings], Settings | None]:
    def changed(settings: Settings) -> Settings | None:
        found = [name for name in names if isinstance(settings.get(name), bool)]
        return {found[0]: not settings[found[0]]} if found else None

    return changed


def _latent(settings: Settings) -> bool:
    return "kv_lora_rank" in settings


def _widths_of_heads(settings: Settings) -> Settings | None:
    if _latent(settings):
        return {"qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 28}
    if "head_dim" not in settings:
        return None
    pairs, rope = 20, settings["rope_parameters"]
    of_pairs = {name: [*rope[name], *rope[name]][:pairs] for name in ("short_factor", "long_factor") if name in rope}
    return {"head_dim": 2 * pairs, **_rope(settings, **of_pairs)}


def _key_groups(count: int) -> Callable[[Settings], Settings | None]:
    def changed(settings: Settings) -> Settings | None:
        return None if _latent(settings) else {"num_key_value_heads": count}

    return changed


def _two_heads(settings: Settings) -> Settings:
    return {"num_attention_heads": 2, "num_key_value_heads": 2 if _latent(settings) else 1}


def _rank_of_queries(settings: Settings) -> Settings | None:
    if "index_topk" in settings:  # whose indexer reads the queries' latent
        return {"q_lora_rank": 20}
    return {"q_lora_rank": 20 if settings["q_lora_rank"] is None else None} if "q_lora_rank" in settings else None


def _one_layer(settings: Settings) -> Settings:
    firsts = {
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"],
        "indexer_types": ["full"],
        "layer_types": ["sliding_attention"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "moe_layer_start_index": 0,
        "moe_layer_interval": 1,
    }
    return {"num_hidden_layers": 1, **{key: value for key, value in firsts.items() if key in settings}}


def _one_chosen(settings: Settings) -> Settings | None:
    name = _named(settings, CHOSEN)
    if name is None:
        return None
    groups = {"topk_group": 1} if settings.get("topk_group") is not None else {}
    # The weight of one expert that is normalised is 1, and what reaches its router is rounding.
    normed = {"norm_topk_prob": False} if "norm_topk_prob" in settings else {}
    return {name: 1, **groups, **normed}


def _all_chosen(settings: Settings) -> Settings | None:
    name, experts = _named(settings, CHOSEN), _named(settings, EXPERTS)
    if name is None or experts is None:
        return None
    groups = {"topk_group": settings["n_group"]} if settings.get("n_group") is not None else {}
    return {name: settings[experts], **groups}


def _odd_experts(settings: Settings) -> Settings | None:
    name = _named(settings, EXPERTS)
    return None if name is None else {name: 7, **_fewer_groups(settings)}


def _shared(settings: Settings) -> Settings | None:
    found = [name for name in SHARED if settings.get(name)]
    return {found[0]: SHARED[found[0]]} if found else None


def _dense_layers(settings: Settings) -> Settings | None:
    if "first_k_dense_replace" in settings:
        dense = 0 if settings["first_k_dense_replace"] else 2
        listed = (["dense"] * dense + ["sparse"] * settings["num_hidden_layers"])[: settings["num_hidden_layers"]]
        kinds = {"mlp_layer_types": listed} if "mlp_layer_types" in settings else {}
        return {"first_k_dense_replace": dense, **kinds}
    if "moe_layer_start_index" in settings:
        return {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1}
    return {"mlp_only_layers": [0, 2], "decoder_sparse_step": 1} if "decoder_sparse_step" in settings else None


def _widths(settings: Settings) -> Settings:
    width = {"moe_intermediate_size": 28} if "moe_intermediate_size" in settings else {}
    return {"intermediate_size": 52, "hidden_size": 72, **width}


def _share_rotated(settings: Settings) -> Settings | None:
    rope = settings["rope_parameters"]
    return _rope(settings, partial_rotary_factor=0.25) if "partial_rotary_factor" in rope else None


FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def _factors(settings: Settings) -> Settings | None:
    return dict.fromkeys(FACTORS, 0.7) if FACTORS[0] in settings else None


CONFIGURATIONS: dict[str, Callable[[Settings], Settings | None]] = {
    "widths of heads": _widths_of_heads,
    "two heads": _two_heads,
    "one key": _key_groups(1),
    "a key for each head": _key_groups(4),
    "queries' rank": _rank_of_queries,
    "vocabulary": _set("vocab_size", to=97),
    "tied or not": _toggled("tie_word_embeddings"),
    "epsilon": _set("rms_norm_eps", "layer_norm_eps", "norm_eps", to=3e-3),
    "base": lambda settings: _rope(settings, rope_theta=7001.0),
    "share rotated": _share_rotated,
    "not stretched": _stretched("default"),
    "yarn": _stretched("yarn", **STRETCHED, beta_fast=1.0, beta_slow=0.05, mscale=0.8, mscale_all_dim=1.1),
    "linear": _stretched("linear", factor=2.5),
    "llama3": _stretched("llama3", **STRETCHED, low_freq_factor=0.1, high_freq_factor=1.0),
    "longrope": _stretched("longrope", **STRETCHED, attention_factor=1.3),
    "one layer": _one_layer,
    "one chosen": _one_chosen,
    "all chosen": _all_chosen,
    "odd experts": _odd_experts,
    "shared experts": _shared,
    "dense layers": _dense_layers,
    "weights of experts": _toggled("norm_topk_prob"),
    "scale of experts": _set("routed_scaling_factor", to=1.7),
    "factors": _factors,
    "one group": lambda settings: _fewer_groups(settings) if (settings.get("n_group") or 1) > 1 else None,
    "biases": _toggled("attention_bias", "qkv_bias", "use_qkv_bias"),
    "norms of heads": _toggled("use_qk_norm"),
    "a window of two": _set("sliding_window", to=2),
    "windows in turn": lambda settings: (
        {"layer_types": ["full_attention", "sliding_attention"] * 2} if "layer_types" in settings else None
    ),
    "no windows": lambda settings: {"layer_types": ["full_attention"] * 4} if "layer_types" in settings else None,
    "limit": _set("swiglu_limit", to=1.9),
    "widths": _widths,
    "bfloat16": lambda settings: {},
    "the hub's spelling": lambda settings: {},
}
"""Name -> what it changes, of a case's settings; None where the family has nothing to change."""

_WEIGHT_IS_ONE = {"one chosen": "the weight of one expert is 1, and what reaches its router is rounding"}
_STRETCHED_IN_NONE = dict.fromkeys(("yarn", "linear", "llama3", "longrope"), "its rotation is not stretched there")
NOT_OF: dict[str, dict[str, str]] = {
    **dict.fromkeys(("ernie4-5-moe", "ernie4-5-moe-interval"), _WEIGHT_IS_ONE),
    **dict.fromkeys(("granitemoe", "gpt-oss"), _WEIGHT_IS_ONE),
    "hunyuan-v1-moe": {**_WEIGHT_IS_ONE, **_STRETCHED_IN_NONE},
    "bailing-moe-v2": _STRETCHED_IN_NONE,
    "qwen3-vl-moe": {**_WEIGHT_IS_ONE, **_STRETCHED_IN_NONE},
    "deepseek-v2": {"weights of experts": "transformers reads no norm_topk_prob there"},
    "mixtral": {**_WEIGHT_IS_ONE, **dict.fromkeys(("yarn", "longrope"), "transformers fails where head_dim is null")},
    "kimi-k25": {"queries' rank": "transformers writes q_proj under a name of its vision model"},
    "minimax-m2": {"one chosen": "its weight is always 1, and what reaches its router is rounding"},
}
"""Case -> configurations that its class does not have, with the reason."""


def odd_settings(case: str) -> dict[str, Settings]:
    """The odd configurations of a case: name -> what changes in its settings."""
    settings = text_of(tiny_models.CASES[case][1])
    found = {name: change(copy.deepcopy(settings)) for name, change in CONFIGURATIONS.items()}
    kept = {name: one for name, one in found.items() if one is not None and name not in NOT_OF.get(case, {})}
    return {name: whole(case, changes) for name, changes in kept.items()}


def text_of(settings: Settings) -> Settings:
    """The language model's settings."""
    return settings.get("text_config", settings)  # type: ignore[no-any-return]


def whole(case: str, changes: Settings) -> Settings:
    """Changes of the language model's settings, as changes of a case's."""
    settings = tiny_models.CASES[case][1]
    if "text_config" not in settings:
        return changes
    tied = {"tie_word_embeddings": changes["tie_word_embeddings"]} if "tie_word_embeddings" in changes else {}
    return {"text_config": {**settings["text_config"], **changes}, **tied}


# ---- Planted errors. What a wrong converter does to the tensors is done to those of the folder; what a wrong reader of
# config.json says is put over the settings that were read.

TELLING: Settings = {"rms_norm_eps": 1e-2, "routed_scaling_factor": 1.7}
"""Changes to a case under which an error of an epsilon or a factor shows in fp32."""


def telling(case: str) -> Settings:
    settings = text_of(tiny_models.CASES[case][1])
    return whole(case, {key: value for key, value in TELLING.items() if key in settings})


def _matching(tensors: Tensors, *suffixes: str) -> Iterator[tuple[str, str]]:
    """Yield (prefix, first suffix) of names of the first group of tensors that has all suffixes."""
    for name in sorted(tensors):
        if name.endswith(suffixes[0]):
            head = name.removesuffix(suffixes[0])
            if all(head + other in tensors for other in suffixes):
                yield head, suffixes[0]


def _exchange(tensors: Tensors, first: str, second: str) -> Tensors | None:
    """Exchange two tensors of the same shape everywhere."""
    changed = dict(tensors)
    for head, _ in _matching(tensors, first, second):
        if tensors[head + first].shape == tensors[head + second].shape:
            changed[head + first], changed[head + second] = tensors[head + second], tensors[head + first]
    return changed


def _each(tensors: Tensors, suffix: str, change: Callable[[Tensor], Tensor]) -> Tensors:
    return {name: change(value) if name.endswith(suffix) else value for name, value in tensors.items()}


def _heads_rolled(width: str) -> Callable[[Tensors, TensorNames, Settings], Tensors]:
    """Give every head the rows of its neighbour."""

    def changed(tensors: Tensors, names: TensorNames, settings: Settings) -> Tensors:
        heads = settings["num_attention_heads"] if width == "q" else settings.get("num_key_value_heads", 1)
        return _each(
            tensors,
            f"self_attn.{width}_proj.weight",
            lambda value: value.view(heads, -1, value.shape[-1]).roll(1, 0).reshape(value.shape),
        )

    return changed


def _interleaved(tensors: Tensors, names: TensorNames, settings: Settings) -> Tensors:
    """Rotate neighbouring channels instead of halves, or the other way round."""
    changed, heads = dict(tensors), settings["num_attention_heads"]
    for name, value in tensors.items():
        if name.endswith(("q_proj.weight", "q_b_proj.weight", "k_proj.weight")):
            count = heads if ".q_" in name else settings["num_key_value_heads"]
            by_head = value.view(count, -1, value.shape[-1])
        elif name.endswith("kv_a_proj_with_mqa.weight"):
            by_head = value.unsqueeze(0)
        else:
            continue
        turned = by_head.shape[1]
        if _latent(settings):
            turned = settings["qk_rope_head_dim"]
        kept, rows = by_head.split([by_head.shape[1] - turned, turned], dim=1)
        rows = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        changed[name] = torch.cat([kept, rows], dim=1).reshape(value.shape)
    return changed


def _values_behind_keys(tensors: Tensors, names: TensorNames, settings: Settings) -> Tensors:
    """Take the up-projection of latent attention as all keys, then all values."""
    heads = settings["num_attention_heads"]
    return _each(
        tensors,
        "kv_b_proj.weight",
        lambda value: value.view(-1, heads, value.shape[-1]).transpose(0, 1).reshape(value.shape),
    )


def _of_expert(
    tensors: Tensors, names: TensorNames, change: Callable[[list[Tensor]], list[Tensor]], matrix: int
) -> Tensors:
    """Change one matrix of all experts of each layer together."""
    changed, before = dict(tensors), f"{names.experts.format(e=0)}{names.matrices[matrix]}.weight"
    for head, _ in _matching(tensors, before):
        if "{e}" not in names.experts:  # all of them in one tensor
            changed[head + before] = torch.stack(change(list(tensors[head + before])))
            continue
        every, e = [], 0
        while (name := f"{head}{names.experts.format(e=e)}{names.matrices[matrix]}.weight") in tensors:
            every.append(name)
            e += 1
        changed.update(zip(every, change([tensors[name] for name in every]), strict=True))
    return changed


def _gate_is_up(tensors: Tensors, names: TensorNames, settings: Settings) -> Tensors:
    gate, up, *rest = names.matrices
    changed = dict(tensors)
    if not rest:  # both in one tensor
        return _each(tensors, f"{gate}.weight", lambda value: value.roll(value.shape[-2] // 2, -2))
    for name, value in tensors.items():
        if name.endswith(f"{gate}.weight") and (other := name.replace(f"{gate}.weight", f"{up}.weight")) in tensors:
            changed[name], changed[other] = tensors[other], value
    return changed


def _layers_exchanged(tensors: Tensors, names: TensorNames, settings: Settings) -> Tensors:
    """The last two layers, where they have the same tensors."""
    last = settings["num_hidden_layers"] - 1
    here, there = f"{names.model}layers.{last}.", f"{names.model}layers.{last - 1}."
    changed = dict(tensors)
    for name, value in tensors.items():
        if name.startswith(here) and (other := there + name.removeprefix(here)) in tensors:
            changed[name], changed[other] = tensors[other], value
    return changed


def _packed_by_group(tensors: Tensors, names: TensorNames, settings: Settings) -> Tensors:
    """Take one tensor of queries, keys and values as group after group, each with its queries, key and value."""
    if len(names.query_key_value) > 1:
        return tensors
    heads, groups = settings["num_attention_heads"], settings["num_key_value_heads"]
    whose = torch.arange(heads + 2 * groups).view(groups, -1)
    order = torch.cat([whose[:, :-2].flatten(), whose[:, -2], whose[:, -1]])
    return _each(
        tensors,
        f"{names.query_key_value[0]}.weight",
        lambda value: value.view(len(order), -1, value.shape[-1])[order].reshape(value.shape),
    )


def _transposed(tensors: Tensors, suffix: str) -> Tensors:
    """The numbers of the transposed matrix, in the shape that it has."""
    return _each(tensors, suffix, lambda value: value.t().reshape(value.shape))


OF_TENSORS: dict[str, Callable[[Tensors, TensorNames, Settings], Tensors | None]] = {
    "norms exchanged": lambda t, n, s: _exchange(t, *n.norms),
    "norms of heads exchanged": lambda t, n, s: _exchange(t, *n.head_norms),
    "norms of heads rolled": lambda t, n, s: _each(t, n.head_norms[0], lambda value: value.roll(len(value) // 4)),
    "norms of heads left out": lambda t, n, s: _each(t, n.head_norms[1], torch.ones_like),
    "norms plus one": lambda t, n, s: {k: v + 1.0 if "norm" in k else v for k, v in t.items()},
    "final norm left out": lambda t, n, s: _each(t, f"{n.model}norm.weight", torch.ones_like),
    "gate and up exchanged": _gate_is_up,
    "heads of queries": _heads_rolled("q"),
    "heads of keys": _heads_rolled("k"),
    "heads of values": _heads_rolled("v"),
    "rows of queries rolled": lambda t, n, s: _each(
        t, f"{n.query_key_value[0]}.weight", lambda value: value.roll(1, 0)
    ),
    "keys for values": lambda t, n, s: _exchange(t, "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "queries, keys and values packed by group": _packed_by_group,
    "biases of attention left out": lambda t, n, s: _each(t, "_proj.bias", torch.zeros_like),
    "biases of keys left out": lambda t, n, s: _each(t, "k_proj.bias", torch.zeros_like),
    "sinks left out": lambda t, n, s: _each(t, ".sinks", torch.zeros_like),
    "sinks rolled": lambda t, n, s: _each(t, ".sinks", lambda value: value.roll(1)),
    "biases of experts left out": lambda t, n, s: _each(t, "gate_up_proj_bias", torch.zeros_like),
    "biases of experts rolled": lambda t, n, s: _each(t, "down_proj_bias", lambda value: value.roll(1, 0)),
    "biases of gate and up not in turn": lambda t, n, s: _each(
        t, "gate_up_proj_bias", lambda value: value.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    ),
    "router's linear bias left out": lambda t, n, s: _each(t, "router.bias", torch.zeros_like),
    "another half rotated": _interleaved,
    "values behind keys": _values_behind_keys,
    "latent norm left out": lambda t, n, s: _each(t, "kv_a_layernorm.weight", torch.ones_like),
    "output of attention transposed": lambda t, n, s: _transposed(t, f"{n.attention_output}.weight"),
    "down of experts transposed": lambda t, n, s: _of_expert(t, n, lambda v: [m.t().reshape(m.shape) for m in v], -1),
    "experts rolled": lambda t, n, s: _of_expert(t, n, lambda v: v[1:] + v[:1], -1),
    "first expert for all": lambda t, n, s: _of_expert(t, n, lambda v: [v[0]] * len(v), 0),
    "all experts rolled": lambda t, n, s: _each(t, f"{n.stacked}down_proj", lambda value: value.roll(1, 0)),
    "all gates behind up": lambda t, n, s: _each(
        t, f"{n.stacked}gate_up_proj", lambda value: value.roll(value.shape[-1] // 2, -1)
    ),
    "router rolled": lambda t, n, s: _each(t, n.router, lambda value: value.roll(1, 0)),
    "router's bias rounded": lambda t, n, s: _each(t, n.router_bias, lambda value: value.bfloat16().float()),
    "router's bias left out": lambda t, n, s: _each(t, n.router_bias, torch.zeros_like),
    "shared expert scaled": lambda t, n, s: _each(t, f"{n.shared}{n.matrices[-1]}.weight", lambda value: 0.5 * value),
    "shared expert's gate left out": lambda t, n, s: _each(t, n.shared_gate, torch.zeros_like),
    "layers exchanged": _layers_exchanged,
    "output tied": lambda t, n, s: _each(t, "lm_head.weight", lambda _: t[f"{n.model}{n.embedding}"].clone()),
    "tokens shifted": lambda t, n, s: _each(t, f"{n.model}{n.embedding}", lambda value: value.roll(1, 0)),
    "dense MLP transposed": lambda t, n, s: _transposed(t, f"mlp.{n.matrices[-1]}.weight"),
}
"""Name -> the tensors of the folder as a wrong converter has them; the same ones where the family has none of them."""


def _instead(name: str, other: Any) -> Callable[[Settings], Settings | None]:
    """Another value of a setting; `other` may be a function of the right one."""

    def changed(flat: Settings) -> Settings | None:
        if flat.get(name) is None:
            return None
        value = other(flat[name]) if callable(other) else other
        return None if value == flat[name] else {name: value}

    return changed


def _of_rope(name: str, other: Any) -> Callable[[Settings], Settings | None]:
    """Another value of a setting that this kind of frequencies reads."""
    instead = _instead(name, other)
    return lambda flat: instead(flat) if name in ROPE_SETTINGS.get(flat["rope_type"], ()) else None


def _amplitude_one(flat: Settings) -> Settings | None:
    """Latent attention's amplitude is one in these models already."""
    read = "attention_factor" in ROPE_SETTINGS.get(flat["rope_type"], ())
    return {"attention_factor": 1.0} if read and not flat["multi_latent_attention"] else None


def _dense_off_by_one(flat: Settings) -> Settings | None:
    if flat["num_experts"] is None:
        return None
    layers = flat["num_layers"]
    return {"moe_layer_freq": f"[0]*{layers - 1}+[1]" if flat.get("moe_layer_freq", 1) == 1 else 1}


OF_SETTINGS: dict[str, Callable[[Settings], Settings | None]] = {
    "epsilon": _instead("norm_epsilon", 1e-6),
    "base of the rotation": _instead("rotary_base", lambda base: base * 2),
    "share rotated": _instead("rotary_percent", lambda share: 0.5 if share == 1.0 else 1.0),
    "not stretched": _instead("rope_type", "rope"),
    "linear instead": lambda flat: {"rope_type": "linear"} if flat["rope_type"] in ("yarn", "llama3") else None,
    "factor of the stretch": _of_rope("rotary_scaling_factor", lambda factor: factor / 2),
    "context before the stretch": _of_rope("original_max_position_embeddings", lambda context: 16 * context),
    "amplitude": _amplitude_one,
    "yarn's end of the ramp": _of_rope("beta_slow", lambda turns: 2 * turns),
    "llama3's long waves": _of_rope("low_freq_factor", lambda turns: turns / 2),
    "llama3's short waves": _of_rope("high_freq_factor", lambda turns: 2 * turns),
    "longrope's factors": _of_rope("long_factor", lambda factors: factors[::-1]),
    "yarn's scale": _instead("mscale_all_dim", 0.0),
    "scale of experts": _instead("moe_router_topk_scaling_factor", None),
    "weights of experts": _instead("moe_router_norm_topk_prob", lambda normed: not normed),
    "score": _instead("moe_router_score_function", lambda kind: "softmax" if kind == "sigmoid" else "sigmoid"),
    # Normalised weights are the same, whichever comes first.
    "softmax after the choice": lambda flat: (
        None if flat["moe_router_norm_topk_prob"] else {"moe_router_pre_softmax": not flat["moe_router_pre_softmax"]}
    ),
    "score of a group": _instead("moe_router_group_score", lambda kind: "max" if kind == "top2" else "top2"),
    "no groups": lambda flat: (
        {"moe_router_num_groups": None, "moe_router_group_topk": None} if flat.get("moe_router_num_groups") else None
    ),
    "one group more": _instead("moe_router_group_topk", lambda groups: groups + 1),
    "one expert fewer": _instead("moe_router_topk", lambda chosen: chosen - 1),
    "dense layers off by one": _dense_off_by_one,
    "no norms of heads": _instead("qk_layernorm", False),
    "norms before the rotation": _instead("qk_layernorm_after_rotation", False),
    "other pairs rotated": _instead("rotary_interleaved", lambda pairs: not pairs),
    "scale of the softmax": _instead("softmax_scale", lambda scale: 2 * scale),
    "embeddings as they are": _instead("embedding_multiplier", 1.0),
    "residuals as they are": _instead("residual_multiplier", 1.0),
    "logits as they are": _instead("logits_scaling", 1.0),
    "norms of each head": _instead("qk_layernorm_across_heads", lambda across: not across),
    "norms on the other side": _instead("reordered_norm", lambda behind: not behind),
    "no biases": _instead("add_qkv_bias", False),
    "no biases anywhere": _instead("add_bias_linear", False),
    "no sinks": _instead("softmax_type", lambda kind: "vanilla"),
    "no windows": _instead("window_size", lambda window: None),
    "a window longer by one": _instead("window_size", lambda window: f"{int(window.split(',')[0]) + 1},0"),
    "windows in all layers": _instead("window_attn_skip_freq", lambda freq: None),
    "windows in other layers": _instead("window_attn_skip_freq", 2),
    "SiLU": _instead("quick_geglu", False),
    "offset of up": _instead("glu_linear_offset", 0.0),
    "limit": _instead("activation_func_clamp_value", lambda limit: 2 * limit),
    "output tied": _instead("untie_embeddings_and_output_weights", lambda untied: not untied),
    "no shared expert": _instead("moe_shared_expert_intermediate_size", lambda width: None),
    "no expert bias": _instead("moe_router_enable_expert_bias", False),
}
"""Name -> settings that a wrong reader has, of the right ones; None where the family has nothing to mistake."""


def wrong_tensors(tensors: Tensors, names: TensorNames, settings: Settings) -> dict[str, Tensors]:
    """The errors that apply to a folder's tensors, each with all tensors."""
    found = {}
    for error, change in OF_TENSORS.items():
        changed = change(tensors, names, settings)
        if changed is not None and any(not torch.equal(changed[name], tensors[name]) for name in tensors):
            found[error] = {name: value.contiguous().clone() for name, value in changed.items()}
    return found


def wrong_settings(flat: Settings) -> dict[str, Settings]:
    """The errors that apply to settings that were read, each with what it changes."""
    found = {error: change(flat) for error, change in OF_SETTINGS.items()}
    return {error: changes for error, changes in found.items() if changes is not None}
