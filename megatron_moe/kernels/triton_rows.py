"""Moving rows between the order of tokens and that of experts, in Triton. No atomics: every row is written once."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.launching import launch


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
