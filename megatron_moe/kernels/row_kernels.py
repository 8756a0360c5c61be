"""Moving rows between the order of tokens and that of experts, in Triton. No atomics: every row is written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _spread(rows, slots, copies, num_rows, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(rows + token * width + column, mask=inside)
    for copy in tl.static_range(COPIES):
        slot = tl.load(slots + token * COPIES + copy).to(tl.int64)
        tl.store(copies + slot * width + column, value, mask=inside & (slot < num_rows))


@triton.jit
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


def spread_rows(rows: Tensor, slots: Tensor, num_rows: int) -> Tensor:
    copies = rows.new_empty((num_rows, rows.shape[1]))
    if copies.numel():
        grid, block = _grid(*rows.shape)
        _spread[grid](rows, slots, copies, num_rows, rows.shape[1], COPIES=slots.shape[1], BLOCK=block)
    return copies


def gather_and_sum(copies: Tensor, slots: Tensor) -> Tensor:
    rows = copies.new_empty((slots.shape[0], copies.shape[1]))
    if rows.numel():
        grid, block = _grid(*rows.shape)
        _gather_and_sum[grid](
            copies, slots, rows, copies.shape[0], copies.shape[1], COPIES=slots.shape[1], BLOCK=block
        )
    return rows
