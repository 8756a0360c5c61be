"""The dispatcher's kernels in Triton: a stable sort of choices by expert, and moving rows from one order to the other.

The sort is a counting sort with one digit. The choices are cut into parts: the first kernel counts each part's choices
per expert; the second adds up what comes before those of its part, experts first and parts second, and numbers them
from there. Rows are copied and summed by tables of indices, and every row is written once. Nothing
here needs atomics, so the results do not depend on an order.

A row is moved in vectors of 16 bytes where its width and its strides are multiples of 16 elements.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.choice import blocks_of, launch, power_of_2

PART, MOST_PARTS = 256, 256  # choices of a part, unless there would be more parts
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
    tl.store(counts + part * experts + bins, found, mask=bins < experts)


@triton.jit(do_not_specialize=_CHOICES)
def _place_part(
    ids, counts, ends, order, source, inverse, per_expert, total, parts, experts, real,
    BINS: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, TOPK: tl.constexpr,
    COUNTED: tl.constexpr
):  # fmt: skip
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    known = bins < experts
    every = tl.zeros((BINS,), dtype=tl.int32)
    earlier = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        cell = row[:, None] * experts + bins[None, :]
        found = tl.load(counts + cell, mask=(row < parts)[:, None] & known[None, :], other=0)
        every += tl.sum(found, axis=0)
        earlier += tl.sum(tl.where((row < part)[:, None], found, 0), axis=0)
    end = tl.cumsum(every, axis=0)
    if part == 0:
        tl.store(ends + bins, end, mask=known)
        if COUNTED:
            tl.store(per_expert + bins, every.to(tl.int64), mask=bins < real)
    begin = end - every + earlier
    for start in range(0, PART, STEP):
        place = part * PART + start + tl.arange(0, STEP)
        inside = place < total
        expert = tl.load(ids + place, mask=inside, other=BINS).to(tl.int32)
        mine = (expert[:, None] == bins[None, :]).to(tl.int32)
        before = tl.cumsum(mine, axis=0) - mine
        position = tl.sum(mine * (before + begin[None, :]), axis=1)
        tl.store(inverse + place, position, mask=inside)
        tl.store(order + position, place, mask=inside)
        tl.store(source + position, place // TOPK, mask=inside)
        begin += tl.sum(mine, axis=0)


def sort_by_expert(expert_ids: Tensor, num_experts: int, partial: bool = False, counts: Tensor | None = None) -> Any:
    ids = expert_ids.contiguous()
    total, bins, room = ids.numel(), num_experts + partial, power_of_2(num_experts + partial)
    size = max(PART, power_of_2(blocks_of(total, MOST_PARTS)))
    parts, constants = max(blocks_of(total, size), 1), {"BINS": room, "STEP": max(16, min(PART, 8192 // room))}
    order, source, inverse = ids.new_empty(total), ids.new_empty(total), ids.new_empty(total)
    found = torch.empty((parts, bins), dtype=torch.int32, device=ids.device)
    ends = found.new_empty(bins)
    launch(_count_part, (parts,), ids, found, total, parts, bins, **constants, PART=size)
    tables = (ids, found, ends, order, source, inverse, ends if counts is None else counts)
    constants |= {"ROWS": max(1, 4096 // room), "PART": size, "TOPK": ids.shape[1], "COUNTED": counts is not None}
    launch(_place_part, (parts,), *tables, total, parts, bins, num_experts, **constants)
    return order, source, inverse, ends if bins == num_experts else ends[:num_experts]


@triton.jit
def _order_chunk(counts, order, inverse, ends, experts, chunks, CELLS: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    cell = tl.arange(0, CELLS)
    size = tl.load(counts + cell, mask=cell < chunks, other=0)
    expert, mine = cell % experts, chunk % experts
    rows = tl.sum(tl.where(cell == chunk, size, 0), axis=0)
    arrived_at = tl.sum(tl.where(cell < chunk, size, 0), axis=0)
    sorted_at = tl.sum(tl.where((expert < mine) | ((expert == mine) & (cell < chunk)), size, 0), axis=0)
    if chunk < experts:
        tl.store(ends + chunk, tl.sum(tl.where(expert <= mine, size, 0), axis=0).to(tl.int32))
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(order + sorted_at + row, arrived_at + row, mask=row < rows)
        tl.store(inverse + arrived_at + row, sorted_at + row, mask=row < rows)


def sort_arrived(counts: Tensor, num_rows: int) -> Any:
    chunks, experts = counts.numel(), counts.shape[1]
    order, inverse = counts.new_empty(num_rows), counts.new_empty(num_rows)
    ends = torch.empty(experts, dtype=torch.int32, device=counts.device)
    cells = power_of_2(chunks)
    launch(_order_chunk, (chunks,), counts, order, inverse, ends, experts, chunks, CELLS=cells, BLOCK=256)
    return order, inverse, ends


@triton.jit(do_not_specialize=_ROWS)
def _spread(
    rows, weights, slots, copies, copy_weights, num_rows, width, row_stride, copy_stride, weight_stride,
    copy_weight_stride, COPIES: tl.constexpr, SHARING: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(rows + token * row_stride + column, mask=inside)
    for copy in tl.static_range(COPIES):
        slot = tl.load(slots + token * COPIES + copy).to(tl.int64)
        tl.store(copies + slot * copy_stride + column, value, mask=inside & (slot < num_rows))
        if WEIGHTED:  # noqa: SIM102 (a constant, which decides what is compiled)
            if tl.program_id(1) == 0:
                place = token * (COPIES // SHARING) + copy // SHARING
                weight = tl.load(weights + place * weight_stride)
                tl.store(copy_weights + slot * copy_weight_stride, weight, mask=slot < num_rows)


@triton.jit(do_not_specialize=_ROWS)
def _gather_and_sum(
    rows, weights, slots, copies, copy_weights, num_rows, width, row_stride, copy_stride, weight_stride,
    copy_weight_stride, COPIES: tl.constexpr, SHARING: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for copy in tl.static_range(COPIES):
        slot = tl.load(slots + token * COPIES + copy).to(tl.int64)
        found = tl.load(copies + slot * copy_stride + column, mask=inside & (slot < num_rows), other=0.0)
        total += found.to(tl.float32)
    tl.store(rows + token * row_stride + column, total.to(rows.dtype.element_ty), mask=inside)
    if WEIGHTED:  # noqa: SIM102
        if tl.program_id(1) == 0:
            for choice in tl.static_range(COPIES // SHARING):
                weight = tl.zeros((), dtype=weights.dtype.element_ty)
                for shared in tl.static_range(SHARING):
                    slot = tl.load(slots + token * COPIES + choice * SHARING + shared).to(tl.int64)
                    weight += tl.load(copy_weights + slot * copy_weight_stride, mask=slot < num_rows, other=0.0)
                tl.store(weights + (token * (COPIES // SHARING) + choice) * weight_stride, weight)


def _move(
    kernel: Any, rows: Tensor, weights: Tensor | None, slots: Tensor, copies: Tensor, copy_weights: Tensor | None
) -> None:
    (tokens, copied), width = slots.shape, min(rows.shape[1], copies.shape[1])
    block = min(power_of_2(width), 2048)
    constants = {"COPIES": copied, "SHARING": copied, "WEIGHTED": weights is not None, "BLOCK": block}
    strides = (rows.stride(0), copies.stride(0), 1, 1)
    if weights is None or copy_weights is None:
        operands = (rows, rows, slots, copies, copies)
    else:
        operands = (rows, weights, slots, copies, copy_weights)
        strides = (*strides[:2], weights.stride(-1), copy_weights.stride(0))
        constants["SHARING"] = slots.numel() // max(weights.numel(), 1)
    launch(kernel, (tokens, blocks_of(width, block)), *operands, copies.shape[0], width, *strides, **constants)


def spread_rows(
    rows: Tensor,
    weights: Tensor | None,
    order: Tensor,
    source: Tensor,
    slots: Tensor,
    copies: Tensor,
    copy_weights: Tensor | None,
) -> Any:
    if rows.dim() != 2:  # routing weights alone, one number a copy
        return NotImplemented
    _move(_spread, rows if rows.stride(1) == 1 else rows.contiguous(), weights, slots, copies, copy_weights)
    return None


def add_up_rows(
    copies: Tensor, copy_weights: Tensor | None, slots: Tensor, partial: bool, hidden: int, sharing: int = 1
) -> Any:
    if copies.dim() != 2:
        return NotImplemented
    rows, weights = copies.new_empty((slots.shape[0], hidden)), None
    if copy_weights is not None:
        weights = copy_weights.new_empty(slots.numel() // sharing)
    copies = copies if copies.stride(1) == 1 else copies.contiguous()
    _move(_gather_and_sum, rows, weights, slots, copies, copy_weights)
    return rows, weights
