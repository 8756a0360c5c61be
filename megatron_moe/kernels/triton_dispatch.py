"""The dispatcher's kernels in Triton: a stable sort of choices by expert, and moving rows from one order to the other.

The sort is a counting sort with one digit. The choices are cut into parts of `PART`; the first kernel counts each
part's choices per expert, torch adds the counts up, experts first and parts second, and the second kernel numbers the
choices of a part from there. Rows are copied and summed by tables of indices, and every row is written once. Nothing
here needs atomics, so the results do not depend on an order.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.choice import launch

PART = 256
# Arguments that change from step to step. A kernel that is specialised for them would be compiled again within a run.
_CHOICES = ["total", "parts"]
_ROWS = ["num_rows"]


@triton.jit(do_not_specialize=_CHOICES)
def _count_part(ids, counts, total, parts, experts, BINS: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    found = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, PART, STEP):
        place = part * PART + start + tl.arange(0, STEP)
        expert = tl.load(ids + place, mask=place < total, other=BINS).to(tl.int32)
        found += tl.sum((expert[:, None] == bins[None, :]).to(tl.int32), axis=0)
    tl.store(counts + bins.to(tl.int64) * parts + part, found, mask=bins < experts)


@triton.jit(do_not_specialize=_CHOICES)
def _place_part(
    ids, counts, ends, order, inverse, total, parts, experts,
    BINS: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
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
    launch(_count_part, (parts,), ids, counts, total, parts, num_experts, **constants)
    ends = counts.flatten().cumsum(0)
    launch(_place_part, (parts,), ids, counts, ends, order, inverse, total, parts, num_experts, **constants)
    return order, inverse, ends.view(num_experts, parts)[:, -1]


@triton.jit(do_not_specialize=_ROWS)
def _spread(rows, slots, copies, num_rows, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(rows + token * width + column, mask=inside)
    for copy in tl.static_range(COPIES):
        slot = tl.load(slots + token * COPIES + copy).to(tl.int64)
        tl.store(copies + slot * width + column, value, mask=inside & (slot < num_rows))


@triton.jit(do_not_specialize=_ROWS)
def _gather_and_sum(copies, slots, rows, num_rows, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for copy in tl.static_range(COPIES):
        slot = tl.load(slots + token * COPIES + copy).to(tl.int64)
        total += tl.load(copies + slot * width + column, mask=inside & (slot < num_rows), other=0.0).to(tl.float32)
    tl.store(rows + token * width + column, total.to(rows.dtype.element_ty), mask=inside)


def _grid(tokens: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(triton.next_power_of_2(width), 2048)
    return (tokens, triton.cdiv(width, block)), block


def gather_rows(rows: Tensor, source: Tensor, slots: Tensor) -> Any:
    if rows.dim() != 2:  # routing weights, one number a copy
        return NotImplemented
    copies = rows.new_empty((source.shape[0], rows.shape[1]))
    grid, block = _grid(*rows.shape)
    launch(_spread, grid, rows.contiguous(), slots, copies, *copies.shape, COPIES=slots.shape[1], BLOCK=block)
    return copies


def sum_rows(copies: Tensor, slots: Tensor, partial: bool) -> Any:
    if copies.dim() != 2:
        return NotImplemented
    rows = copies.new_empty((slots.shape[0], copies.shape[1]))
    grid, block = _grid(*rows.shape)
    launch(_gather_and_sum, grid, copies.contiguous(), slots, rows, *copies.shape, COPIES=slots.shape[1], BLOCK=block)
    return rows
