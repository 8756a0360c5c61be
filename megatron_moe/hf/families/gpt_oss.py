"""gpt-oss."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys
from megatron_moe.hf.family import Family, TensorNames

_WINDOW, _WHOLE = "sliding_attention", "full_attention"


def read(keys: Keys) -> dict[str, Any]:
    """Return gpt-oss' settings: sinks, windows in some layers, biases everywhere, a clamped activation."""
    keys.only("attention_bias", (True,), "attention, experts and router all have biases, or none has one here")
    keys.only("swiglu_alpha", (1.702,), "the gate is x sigmoid(1.702 x)")
    keys.ignore("experts_per_token", "initial_context_length")  # other names of what is read, in OpenAI's files
    limit = keys.number("swiglu_limit", default=None)
    if limit is None:
        limit = 7.0
        keys.assumed("swiglu_limit", limit)
    experts = parts.expert_count(keys, "num_local_experts", "num_experts")
    chosen = parts.topk(keys, experts)
    return {
        **parts.attention(keys),
        **_windows(keys),
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": limit,
        "num_experts": experts,
        "moe_router_topk": chosen,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": chosen == 1,  # as for Mixtral
        "moe_router_norm_topk_prob": True if chosen == 1 else None,
    }


def _windows(keys: Keys) -> dict[str, Any]:
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    kinds = keys.raw("layer_types")
    if kinds is None:
        kinds = [_WHOLE if number % 2 else _WINDOW for number in range(layers)]
        keys.assumed("layer_types", "sliding_attention and full_attention in turn")
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {_WINDOW, _WHOLE}:
        raise keys.refusal("layer_types", f'has to be a list of "{_WINDOW}" and "{_WHOLE}", {layers} of them')
    if _WINDOW not in kinds:
        keys.ignore("sliding_window")
        return {}
    pattern = [int(kind == _WINDOW) for kind in kinds]
    # A token is in its own window.
    found: dict[str, Any] = {"window_size": f"{keys.integer('sliding_window', low=2) - 1},0"}
    for every in range(2, layers + 1):
        if pattern == [int((layer + 1) % every != 0) for layer in range(layers)]:
            return {**found, "window_attn_skip_freq": every}
    freq = parts.layer_freq(keys, "layer_types", pattern)
    return {**found, "window_attn_skip_freq": None if freq == 1 else freq}


def write(run: Run) -> dict[str, Any]:
    """Return gpt-oss' own keys of config.json."""
    window = run.derived.window
    return {
        **parts.attention_keys(run),
        "attention_bias": True,
        "sliding_window": None if window is None else window + 1,
        "layer_types": [_WINDOW if windowed else _WHOLE for windowed in run.derived.window_pattern],
        "swiglu_limit": run.model.activation_func_clamp_value,
        "swiglu_alpha": 1.702,
        "intermediate_size": run.derived.moe_ffn_hidden_size,
        "num_local_experts": run.moe.num_experts,
        "num_experts_per_tok": run.moe.moe_router_topk,
    }


FAMILY = Family(
    name="gpt-oss",
    architecture="GptOssForCausalLM",
    model_types=("gpt_oss",),
    read=read,
    write=write,
    models="20b, 120b",
    reads="sinks, `layer_types` with windows, biases, `swiglu_limit`, MXFP4",
    refuses="`attention_bias` false, another `swiglu_alpha`",
    names=TensorNames(router="mlp.router.weight", stacked="mlp.experts.", interleaved=True),
    served_untied=True,
)
