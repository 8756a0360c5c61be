"""ERNIE-4.5, the mixtures of experts without vision."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import LARGEST, MOST_LAYERS, Keys
from megatron_moe.hf.family import Family, TensorNames

_LAST, _STEP = "moe_layer_end_index", "moe_layer_interval"
_LEAST_SUM = 1e-12


def read(keys: Keys) -> dict[str, Any]:
    """Return ERNIE-4.5's settings: a softmax over all experts, to which a bias is added for the choice alone.

    Pairs of neighbouring channels are rotated.
    """
    keys.only("use_bias", (False,), "linear layers have no biases here, nor have the published models")
    keys.only("moe_gate", ("topk",), "experts are chosen by score here")
    keys.only("moe_use_aux_free", (True,), "transformers adds a bias for the choice in every model of this class")
    keys.only("moe_norm_min", (_LEAST_SUM,), "the weights are divided by their sum here, however small it is")
    parts.no_window(keys)
    keys.ignore("moe_capacity", "use_rmsnorm")  # transformers drops no token, and has no other norm
    experts = parts.expert_count(keys, "moe_num_experts", "num_experts")
    width = keys.integer("moe_intermediate_size")
    shared = keys.integer("moe_num_shared_experts", low=0)
    layers, first = keys.integer("num_hidden_layers", high=MOST_LAYERS), keys.integer("moe_layer_start_index", low=0)
    last = -1 if not keys.has(_LAST) or keys.raw(_LAST) == -1 else keys.integer(_LAST, low=0)
    last, step = layers - 1 if last == -1 else last, keys.integer(_STEP, default=1, high=LARGEST)
    pattern = [int((layer + 1) % step == 0 and first <= layer <= last) for layer in range(layers)]
    return {
        **parts.attention(keys),
        "rotary_interleaved": True,
        "num_experts": experts,
        "moe_layer_freq": parts.layer_freq(keys, "moe_layer_start_index", pattern),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared * width or None,
        **parts.softmax_of_chosen(parts.topk(keys, experts, "moe_k", "num_experts_per_tok")),
        "moe_router_enable_expert_bias": True,
    }


def write(run: Run) -> dict[str, Any]:
    """Return ERNIE-4.5's own keys of config.json; a pattern that they don't describe is read as another."""
    pattern = run.derived.moe_layer_pattern
    places = [layer for layer, is_moe in enumerate(pattern) if is_moe]
    # the two first of them decide the step: it divides the numbers from one
    step = places[1] - places[0] if len(places) > 1 else 1
    shared = parts.routed_and_shared_keys(run)
    return {
        **parts.attention_keys(run),
        "intermediate_size": run.derived.ffn_hidden_size,
        "use_bias": False,
        "pad_token_id": None,  # else transformers takes token 0 for padding
        "moe_num_experts": run.moe.num_experts,
        "moe_k": run.moe.moe_router_topk,
        "moe_intermediate_size": run.derived.moe_ffn_hidden_size,
        "moe_num_shared_experts": shared["n_shared_experts"],
        "moe_layer_start_index": places[0],
        "moe_layer_end_index": places[-1],
        "moe_layer_interval": step,
        "moe_norm_min": _LEAST_SUM,
    }


FAMILY = Family(
    name="ernie4-5-moe",
    architecture="Ernie4_5_MoeForCausalLM",
    model_types=("ernie4_5_moe",),
    read=read,
    write=write,
    models="ERNIE-4.5-21B-A3B, -300B-A47B",
    reads="`moe_layer_start_index`, `_end_index`, `_interval`, shared experts, a bias for the choice in fp32",
    refuses="`use_bias`, another `moe_norm_min`, multi-token prediction",
    names=TensorNames(router_bias="mlp.moe_statics.e_score_correction_bias", bias_is_row=True),
)
