"""The weighted SwiGLU in Triton: one pass over the rows forward, one backward.

Between two products in FP8 its result and its gradient are cut into tiles where they are made. They are rounded to the
rows' dtype first: the tiles have the bits of those that are cut from what is written.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.choice import blocks_of, launch, power_of_2
from megatron_moe.kernels.triton_fp8 import (
    TILE,
    Cut,
    limits_of,
    magnitudes_of,
    read_rows,
    room_for,
    scale_of,
    tile_of,
    tiles_of_rows,
    write_columns,
    write_rows,
)

_TILE = tl.constexpr(TILE)


@triton.jit
def _swiglu(gate, up, prob):
    return gate / (1.0 + tl.exp(-gate)) * up * prob


@triton.jit
def _swiglu_gradients(grad, gate, up, prob):
    """Return the gradients of gate and up, and the terms of the weight's."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    weighted = grad * prob
    # d silu(g)/dg = s + g s (1 - s)
    return (sigmoid + silu * (1.0 - sigmoid)) * up * weighted, silu * weighted, grad * silu * up


@triton.jit
def _forward(gate_up, probs, hidden, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    prob = tl.load(probs + row)
    value = _swiglu(gate, up, prob)
    tl.store(hidden + row * width + column, value.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, gate_up, probs, grad_gate_up, grad_probs, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
        wide = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        grad_gate, grad_up, of_prob = _swiglu_gradients(wide, gate, up, prob)
        total += of_prob
        kind = grad_gate_up.dtype.element_ty
        tl.store(grad_gate_up + row * 2 * width + column, grad_gate.to(kind), mask=inside)
        tl.store(grad_gate_up + (row * 2 + 1) * width + column, grad_up.to(kind), mask=inside)
    tl.store(grad_probs + row, tl.sum(total, axis=0))


def weighted_swiglu_forward(gate_up: Tensor, probs: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    hidden = gate_up.new_empty((rows, width))
    block = min(power_of_2(width), 1024)
    launch(_forward, (rows, blocks_of(width, block)), gate_up, probs, hidden, width, BLOCK=block)
    return hidden


def weighted_swiglu_backward(grad: Tensor, gate_up: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = grad.shape
    grad_gate_up, grad_probs = torch.empty_like(gate_up), torch.empty_like(probs)
    block = min(power_of_2(width), 1024)
    launch(_backward, (rows,), grad.contiguous(), gate_up, probs, grad_gate_up, grad_probs, width, BLOCK=block)
    return grad_gate_up, grad_probs


# ---- Cut into tiles.


@triton.jit
def _as_written(value, rows, own):
    """Return what would be read again, and zeros where nothing is: a weight that is not finite would make NaN of it."""
    return tl.where(own, value.to(rows.dtype.element_ty).to(tl.float32), 0.0)


@triton.jit(do_not_specialize=["height"])
def _cut_activated(gate_up, probs, numbers, scales, height, width, across, largest, smallest, ROWS: tl.constexpr):
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = block * _TILE + tl.arange(0, _TILE)
    own = (row < height)[:, None] & (column < width)[None, :]
    gate, up = read_rows(gate_up, row, column, 2 * width, own), read_rows(gate_up + width, row, column, 2 * width, own)
    prob = tl.load(probs + row, mask=row < height, other=0.0)[:, None]
    exact = _as_written(_swiglu(gate, up, prob), gate_up, own)
    write_rows(exact, numbers, scales, row, height, block, across, height, largest, smallest)


@triton.jit
def _activated(grad, gate_up, probs, row, end, column, width):
    """Return the activation's result, and the gradients of gate, up and weight, of rows up to `end`."""
    own = (row < end)[:, None] & (column < width)[None, :]
    gate, up = read_rows(gate_up, row, column, 2 * width, own), read_rows(gate_up + width, row, column, 2 * width, own)
    prob = tl.load(probs + row, mask=row < end, other=0.0)[:, None]
    of_gate, of_up, of_prob = _swiglu_gradients(read_rows(grad, row, column, width, own), gate, up, prob)
    hidden, of_gate = _as_written(_swiglu(gate, up, prob), gate_up, own), _as_written(of_gate, gate_up, own)
    return hidden, of_gate, _as_written(of_up, gate_up, own), tl.sum(of_prob, axis=1)


@triton.jit(do_not_specialize=["height"])
def _cut_activation(
    grad, gate_up, probs, offsets, grad_probs, numbers, scales, turned, turned_scales, hidden, hidden_scales,
    height, width, across, experts, places, largest, largest_hidden, smallest,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    _expert, first, end = tile_of(offsets, tile, experts, EXPERTS)
    if first < end:
        column = block * _TILE + tl.arange(0, _TILE)
        own, blocks = column < width, 2 * across
        # The registers do not hold a tile's rows. They are computed for the scales of columns, and, from what is in the
        # cache, once more for the columns.
        most = tl.zeros((_TILE,), dtype=tl.int32)
        most_gate, most_up = most, most
        for start in range(0, _TILE, ROWS):
            row = first + start + tl.arange(0, ROWS)
            exact, of_gate, of_up, of_prob = _activated(grad, gate_up, probs, row, end, column, width)
            tl.store(grad_probs + block.to(tl.int64) * height + row, of_prob, mask=row < end)
            write_rows(of_gate, numbers, scales, row, end, block, blocks, height, largest, smallest)
            write_rows(of_up, numbers, scales, row, end, across + block, blocks, height, largest, smallest)
            most = tl.maximum(most, tl.max(magnitudes_of(exact), axis=0))
            most_gate = tl.maximum(most_gate, tl.max(magnitudes_of(of_gate), axis=0))
            most_up = tl.maximum(most_up, tl.max(magnitudes_of(of_up), axis=0))
        scale, scale_gate = scale_of(most, largest_hidden, smallest), scale_of(most_gate, largest, smallest)
        scale_up = scale_of(most_up, largest, smallest)
        place = tile.to(tl.int64) * width + column
        tl.store(hidden_scales + place, scale, mask=own)
        tl.store(turned_scales + tile.to(tl.int64) * width + place, scale_gate, mask=own)
        tl.store(turned_scales + (tile.to(tl.int64) + 1) * width + place, scale_up, mask=own)
        for start in range(0, _TILE, ROWS):
            inside = start + tl.arange(0, ROWS)
            exact, of_gate, of_up, of_prob = _activated(grad, gate_up, probs, first + inside, end, column, width)
            write_columns(exact, scale, hidden, tile * _TILE + inside, column, own, places)
            write_columns(of_gate, scale_gate, turned, tile * _TILE + inside, column, own, places)
            write_columns(of_up, scale_up, turned, tile * _TILE + inside, width + column, own, places)


def cut_activated(gate_up: Tensor, probs: Tensor) -> Cut:
    """Return what `cut_rows` returns for the weighted SwiGLU of gate_up [R, 2F] and probs [R], in e4m3."""
    height, width = gate_up.shape[0], gate_up.shape[1] // 2
    across, dtype = blocks_of(width, TILE), torch.float8_e4m3fn
    numbers = room_for(gate_up, (height, 1, across * TILE), dtype)
    scales = gate_up.new_empty((across, height), dtype=torch.float32)
    sizes = (height, width, across, *limits_of(dtype))
    launch(
        _cut_activated, (blocks_of(height, 32), across), gate_up, probs, numbers, scales, *sizes, ROWS=32, num_warps=4
    )
    return numbers.to(dtype), scales


def cut_activation(
    grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor, dtype: torch.dtype
) -> tuple[list[Cut], Cut, Tensor]:
    """Return the gradients of the weighted SwiGLU, that of gate_up in tiles, and its result in tiles once more.

    Args:
        grad: [R, F], of the result. gate_up: [R, 2F]. probs: [R].
        dtype: of the gradient's tiles.

    Returns:
        what `cut_columns` returns `with_rows` for the gradient of gate_up, [R, 2, F]; columns of the result [R, F], in
        e4m3; the gradient of probs.
    """
    (height, width), experts, e4m3 = grad.shape, offsets.shape[0], torch.float8_e4m3fn
    across, tiles = blocks_of(width, TILE), tiles_of_rows(height, experts)
    numbers, turned = (
        room_for(grad, (height, 2, across * TILE), dtype),
        room_for(grad, (2 * width, tiles * TILE), dtype),
    )
    hidden, fp32 = room_for(grad, (width, tiles * TILE), e4m3), partial(grad.new_empty, dtype=torch.float32)
    scales, turned_scales = fp32((2 * across, height)), fp32((tiles, 2 * width))
    hidden_scales, grad_probs = fp32((tiles, width)), probs.new_empty((across, height))
    (largest, smallest), (largest_hidden, _) = limits_of(dtype), limits_of(e4m3)
    operands = (
        grad,
        gate_up,
        probs,
        offsets,
        grad_probs,
        numbers,
        scales,
        turned,
        turned_scales,
        hidden,
        hidden_scales,
    )
    sizes = (height, width, across, experts, tiles * TILE, largest, largest_hidden, smallest)
    constants = {"EXPERTS": power_of_2(experts), "ROWS": 16, "num_warps": 8}
    launch(_cut_activation, (tiles, across), *operands, *sizes, **constants)
    of_gate_up = [(turned.to(dtype), turned_scales), (numbers.to(dtype), scales)]
    return of_gate_up, (hidden.to(e4m3), hidden_scales), grad_probs.sum(0)
