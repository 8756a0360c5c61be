"""The choice of experts, their weights and their counts in Triton; a program has one token.

Values are compared as integers that sort like floating-point numbers, with the expert's number behind them: no two are
equal, the lower expert wins a tie, and a NaN cannot make one expert be chosen twice.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.choice import blocks_of, launch, power_of_2


@triton.jit
def _sortable(value):
    """Integers in the order of fp32 values, -inf first, NaN of either sign beyond infinity."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0: of the two zeros none is larger
    bits = tl.where(value != value, 0x7FC00000, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _best(
    ranked, bias, token, experts,
    BINS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr, GROUP_BEST: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    """Return the experts of a token, [SLOTS]."""
    expert = tl.arange(0, BINS)
    known = expert < experts
    value = tl.load(ranked + token * experts + expert, mask=known, other=float("-inf"))
    if BIASED:
        value += tl.load(bias + expert, mask=known, other=0.0)
    key = tl.where(known, _sortable(value) * BINS + (BINS - 1 - expert), -(2**62))
    if GROUPS > 1:
        group = expert // (experts // GROUPS)
        slot = tl.arange(0, GROUPS)
        of_group = tl.zeros((GROUPS,), dtype=tl.float32)
        left = key
        for _best in tl.static_range(GROUP_BEST):
            inside = (group[None, :] == slot[:, None]) & known[None, :]
            top = tl.max(tl.where(inside, left[None, :], -(2**62)), axis=1)
            picked = inside & (left[None, :] == top[:, None])
            of_group += tl.sum(tl.where(picked, value[None, :], 0.0), axis=1)
            left = tl.where(tl.sum(picked.to(tl.int32), axis=0) > 0, -(2**62), left)
        group_key = _sortable(of_group) * GROUPS + (GROUPS - 1 - slot)
        allowed = tl.zeros((BINS,), dtype=tl.int32)
        for _best in tl.static_range(GROUP_TOPK):
            mine = group_key == tl.max(group_key, axis=0)
            allowed += (group == tl.sum(tl.where(mine, slot, 0), axis=0)).to(tl.int32)
            group_key = tl.where(mine, -(2**62), group_key)
        key = tl.where(allowed > 0, key, key - 2**45)  # behind all that are allowed, in their own order
    place = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), dtype=tl.int32)
    for rank in tl.static_range(TOPK):
        mine = key == tl.max(key, axis=0)
        chosen = tl.where(place == rank, tl.sum(tl.where(mine, expert, 0), axis=0), chosen)
        key = tl.where(mine, -(2**63) + 1, key)
    return chosen


@triton.jit
def _weights(
    logits, weighed, chosen, inside, token, experts, scaling,
    BINS: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr
):  # fmt: skip
    """Return the weights of a token's experts, [SLOTS]."""
    weight = tl.load(weighed + token * experts + chosen, mask=inside, other=float("-inf") if SOFTMAX else 0.0)
    if SOFTMAX:
        weight = tl.exp(weight - tl.max(weight, axis=0))
        weight = weight / tl.sum(weight, axis=0)
    elif NORMALIZE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    # A logit that is not finite makes the token's weights NaN, as in the eager form.
    expert = tl.arange(0, BINS)
    every = tl.load(logits + token * experts + expert, mask=expert < experts, other=0.0)
    return weight * scaling + tl.sum(every, axis=0) * 0.0


@triton.jit
def _choose(
    ranked, bias, ids, experts,
    BINS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr, GROUP_BEST: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    chosen = _best(ranked, bias, token, experts, BINS, TOPK, SLOTS, GROUPS, GROUP_TOPK, GROUP_BEST, BIASED)
    place = tl.arange(0, SLOTS)
    tl.store(ids + token * TOPK + place, chosen.to(tl.int64), mask=place < TOPK)


@triton.jit
def _weigh(
    logits, weighed, ids, padding, probs, experts, scaling,
    BINS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SLOTS)
    inside = place < TOPK
    chosen = tl.load(ids + token * TOPK + place, mask=inside, other=0)
    weight = _weights(logits, weighed, chosen, inside, token, experts, scaling, BINS, SOFTMAX, NORMALIZE)
    if PADDED:
        weight = tl.where(tl.load(padding + token) == 0, weight, 0.0)
    tl.store(probs + token * TOPK + place, weight, mask=inside)


@triton.jit
def _choose_and_weigh(
    ranked, bias, logits, weighed, padding, ids, probs, counts, tokens, experts, scaling,
    BINS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr, GROUP_BEST: tl.constexpr, BIASED: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, PADDED: tl.constexpr, COUNTED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SLOTS)
    inside = place < TOPK
    chosen = _best(ranked, bias, token, experts, BINS, TOPK, SLOTS, GROUPS, GROUP_TOPK, GROUP_BEST, BIASED)
    choice = token * TOPK + place
    if PADDED:
        real = tl.load(padding + token) == 0
        chosen = tl.where(real, chosen, (choice % experts).to(tl.int32))
    weight = _weights(logits, weighed, chosen, inside, token, experts, scaling, BINS, SOFTMAX, NORMALIZE)
    if PADDED:
        weight = tl.where(real, weight, 0.0)
    tl.store(ids + choice, chosen.to(tl.int64), mask=inside)
    tl.store(probs + choice, weight, mask=inside)
    if COUNTED:
        # Whole numbers that are exact in the dtype: atomics may add in any order and give the same bits.
        one = tl.full((SLOTS,), 1, dtype=counts.dtype.element_ty)
        if PADDED:
            tl.atomic_add(counts + chosen, one, mask=inside & real)
            tl.atomic_add(tokens, real.to(tl.int64))
        else:
            tl.atomic_add(counts + chosen, one, mask=inside)
            if token == 0:
                tl.atomic_add(tokens, tl.num_programs(0).to(tl.int64))


@triton.jit
def _weigh_backward(
    grad, weighed, ids, padding, grad_weighed, experts, scaling,
    BINS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SLOTS)
    inside = place < TOPK
    chosen = tl.load(ids + token * TOPK + place, mask=inside, other=-1)
    weight = tl.load(weighed + token * experts + chosen, mask=inside, other=float("-inf") if SOFTMAX else 0.0)
    slope = tl.load(grad + token * TOPK + place, mask=inside, other=0.0) * scaling
    if PADDED:
        slope = tl.where(tl.load(padding + token) == 0, slope, 0.0)
    if SOFTMAX:
        weight = tl.exp(weight - tl.max(weight, axis=0))
        weight = weight / tl.sum(weight, axis=0)
        slope = weight * (slope - tl.sum(slope * weight, axis=0))
    elif NORMALIZE:
        total = tl.sum(weight, axis=0) + 1e-20
        slope = (slope - tl.sum(slope * (weight / total), axis=0)) / total
    expert = tl.arange(0, BINS)
    spread = tl.zeros((BINS,), dtype=tl.float32)
    for rank in tl.static_range(TOPK):
        number = tl.sum(tl.where(place == rank, chosen, 0), axis=0)
        spread = tl.where(expert == number, tl.sum(tl.where(place == rank, slope, 0.0), axis=0), spread)
    tl.store(grad_weighed + token * experts + expert, spread, mask=expert < experts)


@triton.jit
def _count(
    ids, padding, counts, tokens, total, experts, sequences,
    TOPK: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = place // TOPK
    inside = place < total
    if PADDED:
        inside = inside & (tl.load(padding + token, mask=inside, other=1) == 0)
    expert = tl.load(ids + place, mask=inside, other=0)
    # Whole numbers that are exact in the dtype: atomics may add in any order and give the same bits.
    one = tl.full((BLOCK,), 1, dtype=counts.dtype.element_ty)
    tl.atomic_add(counts + (token % sequences) * experts + expert, one, mask=inside)
    if TOKENS:
        tl.atomic_add(tokens, tl.sum((inside & (place % TOPK == 0)).to(tl.int64), axis=0))


def _grouping(options: Any) -> dict[str, int] | None:
    """Return how `_best` ranks groups of experts; None if it cannot."""
    if options.num_groups is None or options.group_topk is None:
        return {"GROUPS": 1, "GROUP_TOPK": 1, "GROUP_BEST": 1}
    groups, group_topk = options.num_groups, options.group_topk
    best = {"max": 1, "top2": 2}.get(options.group_score, options.topk // group_topk)
    # A sum of more than two depends on the order in which it is added up; groups are compared as a power of two.
    if best > 2 or groups & (groups - 1):
        return None
    return {"GROUPS": groups, "GROUP_TOPK": group_topk, "GROUP_BEST": best}


@functools.cache
def _sizes(experts: int, topk: int) -> dict[str, int]:
    return {"BINS": power_of_2(experts), "TOPK": topk, "SLOTS": power_of_2(topk)}


def choose_experts(ranked: Tensor, expert_bias: Tensor | None, options: Any) -> Any:
    grouping = _grouping(options)
    if grouping is None:
        return NotImplemented
    (tokens, experts), topk = ranked.shape, options.topk
    ids = torch.empty((tokens, topk), dtype=torch.int64, device=ranked.device)
    operands = (ranked.contiguous(), ranked if expert_bias is None else expert_bias, ids)
    constants = {**_sizes(experts, topk), **grouping, "BIASED": expert_bias is not None, "num_warps": 2}
    launch(_choose, (tokens,), *operands, experts, **constants)
    return ids


def choose_and_weigh(
    ranked: Tensor,
    expert_bias: Tensor | None,
    weighed: Tensor,
    logits: Tensor,
    padding: Tensor | None,
    options: Any,
    counts: tuple[Tensor, Tensor] | None,
    softmax: bool,
    normalize: bool,
    scaling: float,
) -> Any:
    grouping = _grouping(options)
    if grouping is None:
        return NotImplemented
    (tokens, experts), topk = ranked.shape, options.topk
    ids = torch.empty((tokens, topk), dtype=torch.int64, device=ranked.device)
    probs = weighed.new_empty((tokens, topk))
    of_choice = (ranked.contiguous(), ranked if expert_bias is None else expert_bias)
    operands = (logits.contiguous(), weighed.contiguous(), ids if padding is None else padding, ids, probs)
    of_weights = {"SOFTMAX": softmax, "NORMALIZE": normalize, "PADDED": padding is not None}
    constants = {**_sizes(experts, topk), **grouping, "BIASED": expert_bias is not None, **of_weights}
    constants |= {"COUNTED": counts is not None, "num_warps": 2}
    launch(_choose_and_weigh, (tokens,), *of_choice, *operands, *(counts or (ids, ids)), experts, scaling, **constants)
    return ids, probs


def _constants(ids: Tensor, experts: int, padding: Tensor | None, softmax: bool, normalize: bool) -> dict[str, Any]:
    sizes = _sizes(experts, ids.shape[1])
    return {**sizes, "SOFTMAX": softmax, "NORMALIZE": normalize, "PADDED": padding is not None, "num_warps": 1}


def expert_weights(
    weighed: Tensor,
    logits: Tensor,
    ids: Tensor,
    padding: Tensor | None,
    softmax: bool,
    normalize: bool,
    scaling: float,
) -> Tensor:
    probs = weighed.new_empty(ids.shape)
    constants = _constants(ids, weighed.shape[1], padding, softmax, normalize)
    operands = (logits.contiguous(), weighed.contiguous(), ids, ids if padding is None else padding, probs)
    launch(_weigh, (ids.shape[0],), *operands, weighed.shape[1], scaling, **constants)
    return probs


def expert_weights_backward(
    grad: Tensor,
    weighed: Tensor,
    ids: Tensor,
    padding: Tensor | None,
    softmax: bool,
    normalize: bool,
    scaling: float,
) -> Tensor:
    found = torch.empty_like(weighed, memory_format=torch.contiguous_format)
    constants = _constants(ids, weighed.shape[1], padding, softmax, normalize)
    operands = (grad.contiguous(), weighed.contiguous(), ids, ids if padding is None else padding, found)
    launch(_weigh_backward, (ids.shape[0],), *operands, weighed.shape[1], scaling, **constants)
    return found


def count_tokens(
    expert_ids: Tensor, num_experts: int, is_padding: Tensor | None = None, num_sequences: int = 1
) -> Tensor:
    counts = torch.zeros((num_sequences, num_experts), dtype=torch.int64, device=expert_ids.device)
    _launch_count(counts, num_sequences, None, expert_ids, is_padding)
    return counts


def add_counts(
    tokens_per_expert: Tensor, num_tokens: Tensor, expert_ids: Tensor, is_padding: Tensor | None = None
) -> None:
    _launch_count(tokens_per_expert, 1, num_tokens, expert_ids, is_padding)


def _launch_count(
    counts: Tensor, sequences: int, tokens: Tensor | None, expert_ids: Tensor, is_padding: Tensor | None
) -> None:
    ids = expert_ids.contiguous()
    operands = (ids, ids if is_padding is None else is_padding, counts, counts if tokens is None else tokens)
    constants = {"TOPK": ids.shape[1], "PADDED": is_padding is not None, "TOKENS": tokens is not None, "BLOCK": 256}
    total, experts = ids.numel(), counts.shape[-1]
    launch(_count, (blocks_of(total, 256),), *operands, total, experts, sequences, **constants)
