"""Planted errors in names, transforms and numbers: every shape is right, and what is computed is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_moe.hf.transforms import ExpertDown, ExpertGateUp, GateThenUp, QueryKeyValue, Vocabulary
from tests.apps.planting import (
    COVERAGE,
    EXPERTS,
    LOGITS,
    UNUSED,
    Break,
    Plant,
    element,
    experts,
    halves_interleaved,
    in_rows,
    layers,
    numbers,
    renamed,
    replaced,
    reversed_rows,
    rolled,
    rounded,
    swapped,
    without,
)

EITHER = f"{EXPERTS}|{LOGITS}"


def each(name: str, breaks: Break, *cases: str, reason: str = EITHER, caught: str = "parity") -> list[Plant]:
    return [Plant(name, case, breaks, reason, caught) for case in cases]


def other_table(name: str) -> str:
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    return {embedding: output, output: embedding}.get(name, name)


def first_norm_last(name: str) -> str:
    first, last = "model.layers.0.input_layernorm.weight", "model.norm.weight"
    return {first: last, last: first}.get(name, name)


# ---- names: each used once, so that coverage has nothing to say

NAMES = [
    *each(
        "gate and up of experts swapped", swapped("gate_proj", "up_proj", r"experts\.\d"),
        "deepseek-v2", "deepseek-v3", "qwen2-moe", "qwen3-moe", "glm4-moe",
    ),
    *each("w1 and w3 swapped", swapped("w1", "w3"), "mixtral"),
    *each(
        "gate and up of dense layers swapped", swapped("gate_proj", "up_proj", r"mlp\.(gate|up)_proj"),
        "deepseek-v3", "qwen2-moe", "glm4-moe",
    ),
    *each(
        "gate and up of shared experts swapped", swapped("gate_proj", "up_proj", r"shared_experts?\."),
        "deepseek-v2", "deepseek-v3", "qwen2-moe", "glm4-moe",
    ),
    *each("norms of queries and keys swapped", swapped("q_norm", "k_norm"), "qwen3-moe", "glm4-moe"),
    *each(
        "keys and values swapped", swapped("k_proj", "v_proj"), "mixtral", "qwen2-moe", "qwen3-moe-tied", "glm4-moe"
    ),
    *each("biases of keys and values swapped", swapped("k_proj", "v_proj", "bias"), "qwen2-moe", "glm4-moe"),
    *each(
        "the norms of a layer swapped", swapped("input_layernorm", "post_attention_layernorm"),
        "deepseek-v3", "qwen3-moe", "mixtral",
    ),
    *each("final norm and the first swapped", renamed(first_norm_last), "qwen2-moe", "moonlight"),
    *each("experts rotated by one", experts(lambda e: (e + 1) % 8), "mixtral", "qwen3-moe"),
    *each("experts rotated by one", experts(lambda e: (e + 1) % 16), "deepseek-v3"),
    *each("experts in reverse", experts(lambda e: 7 - e), "qwen2-moe"),
    *each("experts dealt out in turn", experts(lambda e: e % 4 * 4 + e // 4), "deepseek-v2-grouped"),
    *each(
        "two experts of one layer swapped", experts(lambda e: {2: 3, 3: 2}.get(e, e), r"layers\.1\."),
        "deepseek-v2", "glm4-moe",
    ),
    *each("two down projections swapped", experts(lambda e: {4: 9, 9: 4}.get(e, e), "down_proj"), "moonlight"),
    *each("routers of two layers swapped", layers({1: 2, 2: 1}, r"gate\.weight"), "moonlight", reason=EXPERTS),
    *each("routers of two layers swapped", layers({0: 3, 3: 0}, r"gate\.weight"), "mixtral", reason=EXPERTS),
    *each(
        "router biases of two layers swapped", layers({1: 3, 3: 1}, "correction_bias"),
        "deepseek-v3", "glm4-moe", reason=EXPERTS,
    ),
    *each("two layers swapped", layers({1: 2, 2: 1}), "deepseek-v3", "qwen3-moe-tied"),
    *each("layers shifted by one", layers({0: 1, 1: 2, 2: 3, 3: 0}), "qwen3-moe", "mixtral"),
    *each("layers behind the dense one shifted", layers({1: 2, 2: 3, 3: 1}), "glm4-moe"),
    *each("experts of two layers swapped", layers({1: 2, 2: 1}, r"experts\.\d"), "qwen3-moe"),
    *each("attention outputs of two layers swapped", layers({0: 3, 3: 0}, "o_proj"), "deepseek-v2"),
    *each("embedding and output layer swapped", renamed(other_table), "mixtral", "deepseek-v2"),
    *each("a norm left out", without("q_norm"), "qwen3-moe", reason=f"{UNUSED}.*q_norm", caught=COVERAGE),
    *each("the final norm left out", without(r"model\.norm"), "mixtral", reason=f"{UNUSED}model.norm", caught=COVERAGE),
    *each(
        "an expert left out", without(r"experts\.5\."), "qwen2-moe", reason=rf"{UNUSED}.*experts\.5", caught=COVERAGE
    ),
    *each(
        "an expert read twice", renamed(lambda name: name.replace("experts.3.", "experts.2.")), "deepseek-v3",
        reason=rf"{UNUSED}.*experts\.3", caught=COVERAGE,
    ),
    *each(
        "the router's bias left out", without("correction_bias"), "moonlight",
        reason=f"{UNUSED}.*correction_bias", caught=COVERAGE,
    ),
    *each(
        "the shared expert under another family's name",
        renamed(lambda name: name.replace("shared_experts", "shared_expert")),
        "glm4-moe", reason=r"missing: .*shared_expert\.", caught=COVERAGE,
    ),
]  # fmt: skip


# ---- transforms


def one_behind_the_other(self: QueryKeyValue, tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


def values_before_keys(self: QueryKeyValue, tensors: Sequence[Tensor]) -> Tensor:
    query, key, value = (part.unflatten(0, (self.groups, -1)) for part in tensors)
    return torch.cat([query, value, key], dim=1).flatten(0, 1)


def keys_first(self: QueryKeyValue, tensors: Sequence[Tensor]) -> Tensor:
    query, key, value = (part.unflatten(0, (self.groups, -1)) for part in tensors)
    return torch.cat([key, value, query], dim=1).flatten(0, 1)


def queries_dealt_out(self: QueryKeyValue, tensors: Sequence[Tensor]) -> Tensor:
    query, key, value = tensors
    heads = query.unflatten(0, (-1, self.groups, self.head_size)).transpose(0, 1).flatten(0, 1).flatten(0, 1)
    parts = [part.unflatten(0, (self.groups, -1)) for part in (heads, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def per_head(self: QueryKeyValue, tensors: Sequence[Tensor]) -> Tensor:
    """As if each query head came with a key and a value of its own: the bytes fit, the heads do not."""
    query, key, value = (part.unflatten(0, (-1, self.head_size)) for part in tensors)
    half = self.heads // 2
    return torch.cat([query[:half], key, query[half:], value]).flatten(0, 1)


PACKING = QueryKeyValue.to_native


def biases_only(packing: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, tensors: (packing if self.width is None else PACKING)(self, tensors)


def rows_in_turn(self: Any, tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors), dim=1).flatten(0, 1)


def up_first(self: ExpertGateUp, tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)[::-1]).unsqueeze(0)


def in_turn_within(self: ExpertGateUp, tensors: Sequence[Tensor]) -> Tensor:
    return rows_in_turn(self, tensors).unflatten(0, (2, -1)).unsqueeze(0)


def bytes_of_transposed(self: ExpertDown, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].t().contiguous().view(1, self.hidden, self.width)


def next_token(self: Vocabulary, tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensors[0].roll(1, 0), tensors[0].new_zeros(self.padded - self.size, self.hidden)])


def padded_in_front(self: Vocabulary, tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensors[0].new_zeros(self.padded - self.size, self.hidden), tensors[0]])


def last_token_lost(self: Vocabulary, tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensors[0][:-1], tensors[0].new_zeros(self.padded - self.size + 1, self.hidden)])


def packed(function: Callable[..., Tensor]) -> Break:
    return replaced(QueryKeyValue, "to_native", function)


TRANSFORMS = [
    *each(
        "q, k and v one behind the other", packed(one_behind_the_other),
        "mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe",
    ),
    *each("values before keys", packed(values_before_keys), "mixtral", "glm4-moe"),
    *each("keys before queries", packed(keys_first), "qwen3-moe"),
    *each("query heads dealt out to groups", packed(queries_dealt_out), "mixtral", "qwen2-moe", "qwen3-moe-tied"),
    *each("keys and values packed by query heads", packed(per_head), "glm4-moe"),
    *each("biases one behind the other", packed(biases_only(one_behind_the_other)), "qwen2-moe", "glm4-moe"),
    *each("biases with values first", packed(biases_only(values_before_keys)), "qwen2-moe-sparse-step"),
    *each(
        "rows of gate and up in turn", replaced(GateThenUp, "to_native", rows_in_turn), "deepseek-v3", "qwen2-moe"
    ),
    *each("experts with up first", replaced(ExpertGateUp, "to_native", up_first), "moonlight", "mixtral"),
    *each("rows of an expert's gate and up in turn", replaced(ExpertGateUp, "to_native", in_turn_within), "glm4-moe"),
    *each(
        "an expert's down projection transposed", replaced(ExpertDown, "to_native", bytes_of_transposed),
        "deepseek-v2", "mixtral", "qwen3-moe",
    ),
    *each(
        "the vocabulary shifted by one", replaced(Vocabulary, "to_native", next_token), "deepseek-v2", "qwen3-moe-tied"
    ),
    *each("the vocabulary's padding in front", replaced(Vocabulary, "to_native", padded_in_front), "glm4-moe"),
    *each("the last token lost", replaced(Vocabulary, "to_native", last_token_lost), "mixtral"),
]  # fmt: skip


# ---- numbers


def ones(tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor)


def zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous()


def keys_then_values(tensor: Tensor) -> Tensor:
    """kv_b of 4 heads of 16 + 12 rows: all heads' keys, then all values."""
    heads = tensor.unflatten(0, (4, 28))
    return torch.cat([heads[:, :16].flatten(0, 1), heads[:, 16:].flatten(0, 1)])


def position_first(width: int) -> list[int]:
    """Of 24 rows of a head, the 8 with the position before the 16 without."""
    return [*range(width - 8, width), *range(width - 8)]


def by_halves(width: int) -> list[int]:
    """The rotary rows, the last 8, reordered."""
    return [*range(width - 8), *(width - 8 + row for row in halves_interleaved(8))]


QK = r"self_attn\.[qk]_proj\.weight"
NUMBERS = [
    *each(
        "the router's bias rounded to bfloat16", numbers("correction_bias", rounded),
        "deepseek-v3", "moonlight", "glm4-moe", reason=EXPERTS,
    ),
    *each("the router's bias zero", numbers("correction_bias", zeros), "deepseek-v3", "glm4-moe", reason=EXPERTS),
    *each("the router's bias shifted", numbers("correction_bias", rolled), "deepseek-v3", "moonlight", reason=EXPERTS),
    *each(
        "the router rounded to bfloat16", numbers(r"gate\.weight", rounded),
        "deepseek-v2", "qwen3-moe", "mixtral", reason=f"{EITHER}|weights of the same",
    ),
    *each("the router's experts shifted", numbers(r"gate\.weight", rolled), "mixtral", "qwen2-moe", reason=EXPERTS),
    *each("all weights rounded to bfloat16", numbers("proj", rounded), "qwen2-moe", "deepseek-v2-grouped"),
    *each("one expert rounded to bfloat16", numbers(r"layers\.1\..*experts\.1\.", rounded), "deepseek-v2"),
    *each("norms of the latent left out", numbers("kv_a_layernorm", ones), "deepseek-v3", "deepseek-v2"),
    *each("norms of the low-rank query left out", numbers("q_a_layernorm", ones), "deepseek-v2-grouped"),
    *each("norms of heads left out", numbers("[qk]_norm", ones), "qwen3-moe", "glm4-moe"),
    *each("the final norm taken for ones", numbers(r"model\.norm", ones), "deepseek-v2", "mixtral"),
    *each("norms counted from zero", numbers("layernorm", lambda norm: norm + 1), "mixtral"),
    *each("biases of queries zero", numbers(r"q_proj\.bias", zeros), "qwen2-moe", "glm4-moe"),
    *each("biases of keys zero", numbers(r"k_proj\.bias", zeros), "qwen2-moe"),
    *each("the shared expert's gate zero", numbers("shared_expert_gate", zeros), "qwen2-moe"),
    *each("the shared expert zero", numbers(r"shared_experts?\.down", zeros), "glm4-moe", "deepseek-v3"),
    *each("an expert zero", numbers(r"experts\.2\.(down_proj|w2)", zeros), "deepseek-v3", "mixtral"),
    *each("the attention's output transposed", numbers("o_proj", transposed), "mixtral", "qwen2-moe"),
    *each(
        "keys and values of latents not by heads", numbers("kv_b_proj", keys_then_values), "deepseek-v3", "moonlight"
    ),
    *each(
        "latent and position swapped", numbers("kv_a_proj", lambda rows: torch.cat([rows[32:], rows[:32]])), "moonlight"
    ),
    *each("a head's position first", numbers("q_b_proj", in_rows(24, position_first)), "deepseek-v3"),
    *each("queries' rotary rows by halves", numbers(r"q_proj", in_rows(24, by_halves)), "deepseek-v2", "moonlight"),
    *each("the key's rotary rows by halves", numbers("kv_a_proj", in_rows(40, by_halves)), "deepseek-v2-grouped"),
    *each("rotary rows by pairs", numbers(QK, in_rows(16, halves_interleaved)), "mixtral", "qwen2-moe"),
    *each("only queries by pairs", numbers(r"q_proj\.weight", in_rows(24, halves_interleaved)), "qwen3-moe"),
    *each("heads in reverse", numbers("o_proj|v_proj", in_rows(16, reversed_rows)), "mixtral"),
    *each("one element of an output projection", numbers(r"layers\.0\..*o_proj", element(100, 0.5)), "deepseek-v2"),
    *each("one element of an expert", numbers(r"layers\.0\..*experts\.1\.w2", element(7, 1.0)), "mixtral"),
    *each("one element of the embedding", numbers("embed_tokens", element(64 * 5 + 3, 3.0)), "qwen3-moe-tied"),
    *each(
        "a NaN", numbers(r"experts\.3\.up_proj", element(5, float("nan"))), "qwen3-moe",
        reason=r"experts\.3\.up_proj.* contains NaN", caught=COVERAGE,
    ),
    *each(
        "an infinity", numbers("kv_b_proj", element(5, float("inf"))), "moonlight",
        reason="kv_b_proj.* contains NaN or infinity", caught=COVERAGE,
    ),
]  # fmt: skip
