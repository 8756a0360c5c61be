"""A family of models at Hugging Face: its format of config.json and the names of its tensors. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf.config_keys import Keys


@dataclass(frozen=True)
class TensorNames:
    """The names of those tensors that families name differently; those of a layer are relative to it.

    model: prefix of all tensors but the output layer. embedding: the table of tokens. query_key_value: projections of
    attention; one name if one tensor has all queries, then all keys and all values. attention_output: its other
    projection. norms: of attention and of the MLP. head_norms: of queries and of keys. experts: prefix of an expert's
    matrices, {e} being its number; without it all experts are in each. matrices: names of gate, up and down; two names
    are of gate and up in one, and down. router: the gate's weight. router_bias: its expert_bias, which is [1, E] where
    `bias_is_row`. shared: prefix of the shared expert; its gate is named `shared_gate`. fused: prefix of
    one tensor for the matrices of all experts of a layer, gpt-oss' gate_up_proj and down_proj with their biases, in
    place of `experts`; None: each expert has its own.
    """

    model: str = "model."
    embedding: str = "embed_tokens.weight"
    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_output: str = "self_attn.o_proj"
    norms: tuple[str, str] = ("input_layernorm.weight", "post_attention_layernorm.weight")
    head_norms: tuple[str, str] = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    experts: str = "mlp.experts.{e}."
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    bias_is_row: bool = False
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate.weight"
    fused: str | None = None


DEEPSEEK = TensorNames()


@dataclass(frozen=True)
class Family:
    """A family of models that share a configuration format and names of tensors.

    architecture: the class in transformers, `architectures[0]` of config.json. model_types: values of `model_type`;
    the first is written. read: keys of config.json -> fields of `Run`, without those that all families have in common
    (`hf.config.settings`). write: run -> the family's own keys. models, reads, refuses: what the family's page says.
    dense: whether its models have no experts. predicts: whether its folders may have layers of multi-token prediction.
    served_untied: whether a class of vLLM or SGLang reads the output layer from the folder even where config.json ties
    it to the embedding.
    """

    name: str
    architecture: str
    model_types: tuple[str, ...]
    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[Run], dict[str, Any]]
    models: str
    reads: str
    refuses: str
    names: TensorNames = DEEPSEEK
    dense: bool = False
    predicts: bool = False
    served_untied: bool = False
