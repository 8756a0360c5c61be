"""A stable sort of choices by expert, in Triton: counts per part, their running sums, and each choice's place.

It is a counting sort with one digit. The choices are cut into parts of `PART`; the first kernel counts each part's
choices per expert, torch adds the counts up, experts first and parts second, and the second kernel numbers the choices
of a part from there. All in integers, without atomics.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.launching import launch

PART = 256


@triton.jit
def _count(ids, counts, total, parts, experts, BINS: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    found = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, PART, STEP):
        place = part * PART + start + tl.arange(0, STEP)
        expert = tl.load(ids + place, mask=place < total, other=BINS).to(tl.int32)
        found += tl.sum((expert[:, None] == bins[None, :]).to(tl.int32), axis=0)
    tl.store(counts + bins.to(tl.int64) * parts + part, found, mask=bins < experts)


@triton.jit
def _place(
    ids,
    counts,
    ends,
    order,
    inverse,
    total,
    parts,
    experts,
    BINS: tl.constexpr,
    STEP: tl.constexpr,
    PART: tl.constexpr,
):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    cell = bins.to(tl.int64) * parts + part
    known = bins < experts
    # Where this part's choices of each expert begin: all before them, without its own.
    begin = tl.load(ends + cell, mask=known, other=0).to(tl.int32) - tl.load(counts + cell, mask=known, other=0)
    for start in range(0, PART, STEP):
        place = part * PART + start + tl.arange(0, STEP)
        inside = place < total
        expert = tl.load(ids + place, mask=inside, other=BINS).to(tl.int32)
        mine = (expert[:, None] == bins[None, :]).to(tl.int32)
        before = tl.cumsum(mine, axis=0) - mine
        position = tl.sum(mine * (before + begin[None, :]), axis=1)
        tl.store(inverse + place, position, mask=inside)
        tl.store(order + position, place, mask=inside)
        begin += tl.sum(mine, axis=0)


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = expert_ids.flatten()
    total, parts = ids.shape[0], max(triton.cdiv(ids.shape[0], PART), 1)
    bins = triton.next_power_of_2(num_experts)
    constants = {"BINS": bins, "STEP": max(16, min(PART, 8192 // bins)), "PART": PART}
    counts = torch.empty((num_experts, parts), dtype=torch.int32, device=ids.device)
    order, inverse = torch.empty_like(ids), torch.empty_like(ids)
    launch(_count, (parts,), ids, counts, total, parts, num_experts, **constants)
    ends = counts.flatten().cumsum(0)
    launch(_place, (parts,), ids, counts, ends, order, inverse, total, parts, num_experts, **constants)
    return order, inverse, ends.view(num_experts, parts)[:, -1]
