"""Qwen2-MoE."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family, TensorNames


def read(keys: Keys) -> dict[str, Any]:
    """Return Qwen2-MoE's settings: softmax over all experts, a shared expert with a gate, biases of q, k and v."""
    keys.only("attention_bias", (False,), "the output projection has no bias here; qkv_bias is read")
    return {
        **parts.qwen(keys),
        "add_qkv_bias": keys.boolean("qkv_bias", default=True),  # models older than the key have biases
        "moe_shared_expert_intermediate_size": keys.integer("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def write(run: Run) -> dict[str, Any]:
    """Return Qwen2-MoE's own keys of config.json."""
    shared = run.moe.moe_shared_expert_intermediate_size
    return {**parts.qwen_keys(run), "shared_expert_intermediate_size": shared, "qkv_bias": run.model.add_qkv_bias}


FAMILY = Family(
    name="qwen2-moe",
    architecture="Qwen2MoeForCausalLM",
    model_types=("qwen2_moe",),
    read=read,
    write=write,
    models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    reads="`decoder_sparse_step`, `mlp_only_layers`, `qkv_bias`, a gated shared expert",
    refuses="`use_sliding_window`, `layer_types` other than full attention",
    names=TensorNames(shared="mlp.shared_expert."),
    served_untied=True,
)
