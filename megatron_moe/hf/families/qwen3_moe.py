"""Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return Qwen3-MoE's settings: softmax over all experts, none shared, queries and keys normalised per head."""
    keys.only("attention_bias", (False,), "it means a bias of the output projection too, which has none here")
    # transformers reads none of these for Qwen3: a file that sets them otherwise was written for other code
    keys.only("qkv_bias", (False,), "Qwen3's queries, keys and values have no biases")
    keys.only("use_qk_norm", (True,), "Qwen3's queries and keys are normalised")
    keys.only("shared_expert_intermediate_size", (0,), "Qwen3 has no shared expert")
    return {**parts.qwen(keys), "qk_layernorm": True}


def write(run: Run) -> dict[str, Any]:
    """Return Qwen3-MoE's own keys of config.json; transformers 5 has another name for the number of experts."""
    return {**parts.qwen_keys(run), "num_local_experts": run.moe.num_experts, "attention_bias": False}


FAMILY = Family(
    name="qwen3-moe",
    architecture="Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    read=read,
    write=write,
    models="30B-A3B, 235B-A22B",
    reads="`decoder_sparse_step`, `mlp_only_layers`, `num_experts` or `num_local_experts`",
    refuses="`attention_bias`, `qkv_bias`, `use_qk_norm` false, a shared expert",
    served_untied=True,
)
