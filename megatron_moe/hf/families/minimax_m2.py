"""MiniMax-M2."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys
from megatron_moe.hf.family import Family, TensorNames


def read(keys: Keys) -> dict[str, Any]:
    """Return MiniMax-M2's settings: norms of all heads, a part of each rotated, sigmoid scores plus a bias.

    intermediate_size is an expert's width. The published configurations announce layers of multi-token prediction, of
    which the folders have no tensors.
    """
    parts.no_window(keys)
    keys.only("scoring_func", ("sigmoid",), "MiniMax-M2's scores are sigmoids")
    keys.only("use_routing_bias", (True,), "MiniMax-M2 chooses by scores plus a bias")
    keys.only("use_qk_norm", (True,), "MiniMax-M2's queries and keys are normalised")
    keys.only("qk_norm_type", ("per_layer",), "one norm is over all heads of a layer")
    keys.only("shared_intermediate_size", (0,), "MiniMax-M2 has no shared expert")
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    keys.only("attn_type_list", ([1] * layers,), "all layers attend to the whole sequence")
    keys.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    # of the parts that are switched off, and of an earlier model
    keys.ignore("shared_moe_mode", "mlp_intermediate_size")
    experts = parts.expert_count(keys, "num_local_experts", "num_experts")
    return {
        **parts.attention(keys, partly_rotated=True, rotated=keys.integer("rotary_dim", default=None)),
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "num_experts": experts,
        "moe_router_topk": parts.topk(keys, experts),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_norm_topk_prob": True,
    }


def write(run: Run) -> dict[str, Any]:
    """Return MiniMax-M2's own keys of config.json."""
    return {
        **parts.attention_keys(run, partly_rotated=True),
        "rotary_dim": int(run.derived.head_size * run.model.rotary_percent),
        "intermediate_size": run.derived.moe_ffn_hidden_size,
        "num_local_experts": run.moe.num_experts,
        "num_experts_per_tok": run.moe.moe_router_topk,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }


FAMILY = Family(
    name="minimax-m2",
    architecture="MiniMaxM2ForCausalLM",
    model_types=("minimax_m2",),
    read=read,
    write=write,
    models="MiniMax-M2, M2.1",
    reads="`rotary_dim` or `partial_rotary_factor`",
    refuses="a shared expert, `use_routing_bias` false",
    names=TensorNames(
        experts="block_sparse_moe.experts.{e}.",
        matrices=("w1", "w3", "w2"),
        router="block_sparse_moe.gate.weight",
        router_bias="block_sparse_moe.e_score_correction_bias",
    ),
    served_untied=True,
)
