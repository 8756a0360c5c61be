"""The choice of experts and their weights in Triton: groups, top-k, weights and counts in one pass over the scores.

A program has one token. Values are compared as integers that sort like the floating-point numbers, with the expert's
number behind them: no two are equal, the lower expert wins a tie, and a NaN cannot make one expert be chosen twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sortable(value):
    """Integers in the order of fp32 values, -inf first, NaN of either sign beyond infinity."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0: of the two zeros none is larger
    bits = tl.where(value != value, 0x7FC00000, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _route(
    logits,
    ranked,
    weighed,
    bias,
    padding,
    ids,
    probs,
    counts,
    experts,
    sequences,
    scaling,
    BINS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    COUNTED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BINS)
    known = expert < experts
    choice = tl.load(ranked + token * experts + expert, mask=known, other=float("-inf"))
    weigh = tl.load(weighed + token * experts + expert, mask=known, other=0.0)
    if BIASED:
        choice += tl.load(bias + expert, mask=known, other=0.0)
    behind = BINS - 1 - expert
    key = tl.where(known, _sortable(choice) * BINS + behind, -(2**62))
    if GROUPS > 1:
        size = experts // GROUPS
        group = expert // size
        slot = tl.arange(0, GROUPS)
        of_group = tl.zeros((GROUPS,), dtype=tl.float32)
        left = key
        for best in tl.static_range(GROUP_BEST):
            inside = group[None, :] == slot[:, None]
            top = tl.max(tl.where(inside & known[None, :], left[None, :], -(2**62)), axis=1)
            picked = inside & (left[None, :] == top[:, None])
            of_group += tl.sum(tl.where(picked, choice[None, :], 0.0), axis=1)
            left = tl.where(tl.sum(picked.to(tl.int32), axis=0) > 0, -(2**62), left)
        group_key = _sortable(of_group) * GROUPS + (GROUPS - 1 - slot)
        allowed = tl.zeros((BINS,), dtype=tl.int32)
        for best in tl.static_range(GROUP_TOPK):
            top = tl.max(group_key, axis=0)
            number = GROUPS - 1 - ((top % GROUPS) + GROUPS) % GROUPS
            allowed += (group == number).to(tl.int32)
            group_key = tl.where(slot == number, -(2**62), group_key)
        key = tl.where(allowed > 0, key, key - 2**45)
    place = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), dtype=tl.int32)
    weight = tl.zeros((SLOTS,), dtype=tl.float32)
    for rank in tl.static_range(TOPK):
        top = tl.max(key, axis=0)
        mine = key == top
        chosen = tl.where(place == rank, tl.sum(tl.where(mine, expert, 0), axis=0), chosen)
        weight = tl.where(place == rank, tl.sum(tl.where(mine, weigh, 0.0), axis=0), weight)
        key = tl.where(mine, -(2**63) + 1, key)
    inside = place < TOPK
    if SOFTMAX:
        weight = tl.where(inside, weight, float("-inf"))
        weight = tl.exp(weight - tl.max(weight, axis=0))
        weight = weight / tl.sum(weight, axis=0)
    elif NORMALIZE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    # A logit that is not finite makes the token's weights NaN, as the eager form does.
    given = tl.load(logits + token * experts + expert, mask=known, other=0.0)
    weight = weight * scaling + tl.sum(given, axis=0) * 0.0
    counts_here = True
    if PADDED:
        counts_here = tl.load(padding + token) == 0
        weight = tl.where(counts_here, weight, 0.0)
    tl.store(ids + token * TOPK + place, chosen.to(tl.int64), mask=inside)
    tl.store(probs + token * TOPK + place, weight, mask=inside)
    if COUNTED:
        cell = counts + (token % sequences) * experts + chosen
        tl.atomic_add(cell, tl.full((SLOTS,), 1, dtype=tl.int64), mask=inside & counts_here)


@triton.jit
def _route_backward(
    grad,
    weighed,
    ids,
    padding,
    grad_weighed,
    experts,
    scaling,
    BINS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
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
