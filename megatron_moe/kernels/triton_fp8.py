"""Products in FP8 in Triton: numbers are cut into tiles with a scale each, and groups of rows are multiplied.

Operands are written along the terms of the sums that they go into, as tensor cores read FP8, and padded with zeros to
whole tiles of 128. Where an expert's rows begin and end is read on the device. A product adds 128 terms in the tensor
core and multiplies their sum by the two scales in fp32; each of its numbers is written once, by one program.

Triton's interpreter cuts numbers off where it converts to FP8, and takes NaN for a number where it converts back. There
the kernels write quotients in fp32, which torch rounds, and multiply FP8 numbers in fp32.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_moe.kernels.choice import blocks_of, launch, power_of_2
from megatron_moe.platform import hardware

TILE = 128
_TILE = tl.constexpr(TILE)
_FIRST_CAPABILITY, _HOPPER, _BLACKWELL = (8, 9), (9, 0), (10, 0)  # of GPUs with conversions to FP8


Cut = tuple[Tensor, Tensor]
"""Numbers in FP8, and their scales in fp32."""

# ---- Numbers in tiles.


@triton.jit
def scale_of(magnitudes, largest, smallest):
    return tl.maximum(tl.div_rn(magnitudes.to(tl.float32, bitcast=True), largest), smallest, propagate_nan=_NAN)


_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def magnitudes_of(values):
    """Return bits that are ordered as the magnitudes are, a NaN above all others."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def tile_of(offsets, tile, experts, EXPERTS: tl.constexpr):
    """Return the expert of a tile of rows, the tile's first row, and the expert's end: 0 for a tile beyond the last."""
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + expert, mask=expert < experts, other=0)
    begins = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = (ends - begins + _TILE - 1) // _TILE
    until = tl.cumsum(tiles, axis=0)
    mine = tl.sum((until <= tile).to(tl.int32), axis=0)
    first = tl.sum(tl.where(expert == mine, begins - (until - tiles) * _TILE, 0), axis=0)
    return mine, first + tile * _TILE, tl.sum(tl.where(expert == mine, ends, 0), axis=0)


@triton.jit
def read_rows(rows, row, column, stride, own):
    """Return numbers in fp32, with zeros where they are not `own`."""
    return tl.load(rows + row.to(tl.int64)[:, None] * stride + column[None, :], mask=own, other=0.0).to(tl.float32)


@triton.jit
def write_rows(exact, numbers, scales, row, end, block, blocks, height, largest, smallest):
    """Cut one of the blocks of 128 columns into tiles of 1 x 128; rows are written up to `end`."""
    scale = scale_of(tl.max(magnitudes_of(exact), axis=1), largest, smallest)
    found = tl.div_rn(exact, tl.broadcast_to(scale[:, None], exact.shape)).to(numbers.dtype.element_ty)
    place = row.to(tl.int64)[:, None] * (blocks * _TILE) + (block * _TILE + tl.arange(0, _TILE))[None, :]
    tl.store(numbers + place, found, mask=(row < end)[:, None])
    tl.store(scales + block.to(tl.int64) * height + row, scale, mask=row < end)


@triton.jit
def write_columns(exact, scale, turned, place, column, own, places):
    """Write numbers over their column's scale, turned: columns that are `own`, and rows at a place among `places`."""
    found = tl.div_rn(exact, tl.broadcast_to(scale[None, :], exact.shape)).to(turned.dtype.element_ty)
    tl.store(turned + column.to(tl.int64)[None, :] * places + place[:, None], found, mask=own[None, :])


@triton.jit(do_not_specialize=["height"])
def _cut_rows(values, numbers, scales, height, width, parts, across, largest, smallest, ROWS: tl.constexpr):
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = block % across * _TILE + tl.arange(0, _TILE)
    place = (row.to(tl.int64) * parts + block // across)[:, None] * width + column[None, :]
    exact = tl.load(values + place, mask=(row < height)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
    write_rows(exact, numbers, scales, row, height, block, parts * across, height, largest, smallest)


@triton.jit
def _cut_blocks(
    values, numbers, scales, parts, height, width, down, across, largest, smallest, TURNED: tl.constexpr
):  # fmt: skip
    matrix, high, wide = tl.program_id(1), tl.program_id(0) // across, tl.program_id(0) % across
    row, column = high * _TILE + tl.arange(0, _TILE), wide * _TILE + tl.arange(0, _TILE)
    place = (matrix.to(tl.int64) * height + row)[:, None] * width + column[None, :]
    exact = tl.load(values + place, mask=(row < height)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.max(magnitudes_of(exact), axis=1), axis=0), largest, smallest)
    found = tl.div_rn(exact, tl.broadcast_to(scale, exact.shape)).to(numbers.dtype.element_ty)
    if TURNED:  # an expert's matrices, one below the other, with rows for columns
        block, deep = (matrix // parts).to(tl.int64) * across + wide, parts * down
        tile = matrix % parts * down + high
        place = (block * _TILE + tl.arange(0, _TILE))[None, :] * (deep * _TILE) + tile * _TILE
        tl.store(numbers + place + tl.arange(0, _TILE)[:, None], found)
        tl.store(scales + block * deep + tile, scale)
    else:
        block = matrix.to(tl.int64) * down + high
        place = (block * _TILE + tl.arange(0, _TILE))[:, None] * (across * _TILE) + column[None, :]
        tl.store(numbers + place, found)
        tl.store(scales + block * across + wide, scale)


@triton.jit(do_not_specialize=["height"])
def _cut_columns(
    values, source, numbers, scales, turned, turned_scales, offsets, height, width, stride, parts, across, experts,
    places, largest, smallest, EXPERTS: tl.constexpr, ROWS: tl.constexpr, GATHERED: tl.constexpr
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    _, first, end = tile_of(offsets, tile, experts, EXPERTS)
    if first < end:
        inside, depth = tl.arange(0, _TILE), parts * width
        row, column = first + inside, block % across * _TILE + inside
        own, column = column < width, block // across * width + column
        place = row
        if GATHERED:
            place = tl.load(source + row, mask=row < end, other=0)
        exact = read_rows(values, place, column, stride, (row < end)[:, None] & own[None, :])
        if ROWS:
            write_rows(exact, numbers, scales, row, end, block, parts * across, height, largest, smallest)
        scale = scale_of(tl.max(magnitudes_of(exact), axis=0), largest, smallest)
        tl.store(turned_scales + tile.to(tl.int64) * depth + column, scale, mask=own)
        write_columns(exact, scale, turned, tile * _TILE + inside, column, own, places)


@triton.jit(do_not_specialize=["height", "num_rows"])
def _cut_copies(
    values, weights, slots, numbers, scales, copy_weights, height, num_rows, width, stride, weight_stride, across,
    largest, smallest, COPIES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column, here = block * _TILE + tl.arange(0, _TILE), row < height
    exact = read_rows(values, row, column, stride, here[:, None] & (column < width)[None, :])
    for copy in tl.static_range(COPIES):
        choice = row.to(tl.int64) * COPIES + copy
        slot = tl.load(slots + choice, mask=here, other=num_rows)
        write_rows(exact, numbers, scales, slot, num_rows, block, across, num_rows, largest, smallest)
        if block == 0:
            weight = tl.load(weights + choice * weight_stride, mask=here)
            tl.store(copy_weights + slot, weight, mask=slot < num_rows)


def _interpreted(numbers: Tensor) -> bool:
    return not isinstance(_multiply, triton.JITFunction) and not numbers.is_meta


def room_for(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32 if _interpreted(like) else dtype)


def limits_of(dtype: torch.dtype) -> tuple[float, float]:
    return torch.finfo(dtype).max, torch.finfo(torch.float32).tiny


def cut_into_tiles(values: Tensor, high: int, wide: int, dtype: torch.dtype) -> Any:
    if (hardware.capability(values) or _FIRST_CAPABILITY) < _FIRST_CAPABILITY:
        return NotImplemented
    if (high, wide) == (1, TILE):
        numbers, scales = cut_rows(values.reshape(-1, 1, values.shape[-1]), dtype)
        return numbers.view(*values.shape[:-1], -1), scales.t().reshape(*values.shape[:-1], -1)
    if (high, wide) == (TILE, TILE) and dtype == torch.float8_e4m3fn:
        numbers, scales = cut_matrices(values.reshape(1, -1, *values.shape[-2:]))
        several = values.shape[:-2]
        return numbers.view(*several, *numbers.shape[-2:]), scales.view(*several, *scales.shape[-2:])
    return NotImplemented


def cut_rows(values: Tensor, dtype: torch.dtype) -> Cut:
    """Return numbers [R, P, N'] and scales [P x N' / 128, R] of values [R, P, N], in tiles of 1 x 128."""
    height, parts, width = values.shape
    across = blocks_of(width, TILE)
    numbers = room_for(values, (height, parts, across * TILE), dtype)
    scales = values.new_empty((parts * across, height), dtype=torch.float32)
    sizes = (height, width, parts, across, *limits_of(dtype))
    grid = (blocks_of(height, 32), parts * across)
    launch(_cut_rows, grid, values.contiguous(), numbers, scales, *sizes, ROWS=32, num_warps=4)
    return numbers.to(dtype), scales


def cut_matrices(values: Tensor, turned: bool = False) -> Cut:
    """Return numbers and scales of matrices [e, P, M, N] in blocks of 128 x 128, in e4m3.

    [e, P, M', N'] and [e, P, M' / 128, N' / 128]; turned: [e, N', P x M'] and [e, N' / 128, P x M' / 128].
    """
    experts, parts, height, width = values.shape
    down, across = blocks_of(height, TILE), blocks_of(width, TILE)
    blocks = (experts, across, parts * down) if turned else (experts, parts, down, across)
    numbers = room_for(values, (*blocks[:-2], blocks[-2] * TILE, blocks[-1] * TILE), torch.float8_e4m3fn)
    scales = values.new_empty(blocks, dtype=torch.float32)
    sizes = (parts, height, width, down, across, *limits_of(torch.float8_e4m3fn))
    operands = (values.contiguous(), numbers, scales)
    launch(_cut_blocks, (down * across, experts * parts), *operands, *sizes, TURNED=turned, num_warps=8)
    return numbers.to(torch.float8_e4m3fn), scales


def tiles_of_rows(num_rows: int, experts: int) -> int:
    """Return the most tiles of 128 rows of one expert that there can be."""
    return num_rows // TILE + experts


def cut_columns(
    values: Tensor, offsets: Tensor, dtype: torch.dtype, with_rows: bool = False, source: Tensor | None = None
) -> list[Cut]:
    """Return numbers and scales of values [R, P, N] in tiles of 128 rows of one expert.

    Args:
        source: [R], the rows among values [T, P, N] that are cut.

    Returns:
        numbers [P x N, places] and scales [places / 128, P x N], each expert's rows from a whole tile on; `with_rows`:
        also what `cut_rows` returns, from values that are read once.
    """
    (_, parts, width), experts = values.shape, offsets.shape[0]
    height = values.shape[0] if source is None else source.shape[0]
    across, tiles = blocks_of(width, TILE), tiles_of_rows(height, experts)
    turned = room_for(values, (parts * width, tiles * TILE), dtype)
    turned_scales = values.new_empty((tiles, parts * width), dtype=torch.float32)
    numbers, scales = turned, turned_scales
    if with_rows:
        numbers = room_for(values, (height, parts, across * TILE), dtype)
        scales = values.new_empty((parts * across, height), dtype=torch.float32)
    values = values if values.stride()[1:] == (width, 1) else values.contiguous()
    operands = (values, offsets if source is None else source, numbers, scales, turned, turned_scales, offsets)
    sizes = (height, width, values.stride(0), parts, across, experts, tiles * TILE, *limits_of(dtype))
    constants = {"EXPERTS": power_of_2(experts), "ROWS": with_rows, "GATHERED": source is not None, "num_warps": 16}
    launch(_cut_columns, (tiles, parts * across), *operands, *sizes, **constants)
    columns = turned.to(dtype), turned_scales
    return [columns, (numbers.to(dtype), scales)] if with_rows else [columns]


def cut_copies(values: Tensor, weights: Tensor, slots: Tensor, num_rows: int) -> tuple[Cut, Tensor]:
    """Return copies of rows, as `cut_rows` cuts them to e4m3, and of their weights.

    Args:
        values: [T, N]; rows may be apart. weights: [T x C].
        slots: [T, C], where each copy is among `num_rows`; `num_rows` for one that is not.
    """
    (height, width), dtype = values.shape, torch.float8_e4m3fn
    across = blocks_of(width, TILE)
    numbers = room_for(values, (num_rows, 1, across * TILE), dtype)
    scales = values.new_empty((across, num_rows), dtype=torch.float32)
    values, copy_weights = values if values.stride(1) == 1 else values.contiguous(), weights.new_empty(num_rows)
    sizes = (height, num_rows, width, values.stride(0), weights.stride(0), across, *limits_of(dtype))
    operands = (values, weights, slots, numbers, scales, copy_weights)
    constants = {"COPIES": slots.shape[1], "ROWS": 32, "num_warps": 4}
    launch(_cut_copies, (blocks_of(height, 32), across), *operands, *sizes, **constants)
    return (numbers.to(dtype), scales), copy_weights


# ---- Products of groups of rows.
#
# A program computes two tiles next to each other that share an operand: their sums fill a thread's registers, and the
# more of a result a program computes, the less it reads for each product. Operands come by TMA, which fills what is
# beyond an operand with zeros; what is beyond an expert's rows is of the next expert, computed and not written.


@triton.jit
def _place_in_band(down, across, BAND: tl.constexpr):
    """Return the tile of a program: down a band of `BAND` tiles first, then across, then the next band."""
    band, inside = tl.program_id(0) // (BAND * across), tl.program_id(0) % (BAND * across)
    tall = min(BAND, down - band * BAND)
    return band * BAND + inside % tall, inside // tall


@triton.jit
def _product(left, right):
    return tl.dot(left, tl.trans(right), input_precision="ieee")


@triton.jit
def _write(results, found, row, end, unit, WIDTH: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr):
    of_part: tl.constexpr = (WIDTH + _TILE - 1) // _TILE * (_TILE // WIDE)
    column = unit % of_part * WIDE + tl.arange(0, WIDE)
    place = row.to(tl.int64)[:, None] * (PARTS * WIDTH) + (unit // of_part * WIDTH + column)[None, :]
    own = (row < end)[:, None] & (column < WIDTH)[None, :]
    tl.store(results + place, found.to(results.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["num_rows", "down"])
def _multiply(
    row_scales, rows, matrices, matrix_scales, offsets, results, num_rows, experts, down,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
    BAND: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    deep: tl.constexpr = DEPTH // _TILE
    of_tile: tl.constexpr = _TILE // WIDE
    units: tl.constexpr = PARTS * ((WIDTH + _TILE - 1) // _TILE) * of_tile
    high, pair = _place_in_band(down, (units + 1) // 2, BAND)
    expert, first, end = tile_of(offsets, high, experts, EXPERTS)
    if first < end:
        row = first + tl.arange(0, _TILE)
        unit, then = 2 * pair, min(2 * pair + 1, units - 1)  # the last pair may be a single one
        place = expert * (units * WIDE)
        of_rows, matrix_scales = row_scales + row, matrix_scales + expert.to(tl.int64) * (units // of_tile * deep)
        one, two = unit // of_tile * deep, then // of_tile * deep
        found, other = tl.zeros((_TILE, WIDE), dtype=tl.float32), tl.zeros((_TILE, WIDE), dtype=tl.float32)
        for tile in range(deep):
            scale = tl.load(of_rows, mask=row < end, other=0.0)
            left, right = rows.load([first, tile * _TILE]), matrices.load([place + unit * WIDE, tile * _TILE])
            found += _product(left, right) * (scale * tl.load(matrix_scales + one + tile))[:, None]
            right = matrices.load([place + then * WIDE, tile * _TILE])
            other += _product(left, right) * (scale * tl.load(matrix_scales + two + tile))[:, None]
            of_rows += num_rows
        _write(results, found, row, end, unit, WIDTH, PARTS, WIDE)
        if then > unit:
            _write(results, other, row, end, then, WIDTH, PARTS, WIDE)


@triton.jit
def _add_or_write(
    results, found, high, wide, some, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    row, column = tl.arange(0, _TILE), tl.arange(0, WIDE)
    own = (high + row < HEIGHT)[:, None] & (wide + column < WIDTH)[None, :]
    place = results + high * WIDTH + wide + row[:, None] * WIDTH + column[None, :]
    if ADD:
        own = own & some
        found += tl.load(place, mask=own, other=0.0)
    tl.store(place, found.to(results.dtype.element_ty), mask=own)


@triton.jit
def _multiply_columns(
    left_scales, left, right, right_scales, offsets, results,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    BAND: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    down: tl.constexpr = (HEIGHT + 2 * _TILE - 1) // (2 * _TILE)
    pair, block = _place_in_band(down, (WIDTH + WIDE - 1) // WIDE, BAND)
    expert, every = tl.program_id(1), tl.arange(0, EXPERTS)
    ends = tl.load(offsets + every, mask=every <= expert, other=0)
    begins = tl.load(offsets + every - 1, mask=(every > 0) & (every <= expert), other=0)
    tiles = (ends - begins + _TILE - 1) // _TILE
    last = tl.sum(tiles, axis=0)
    first = last - tl.sum(tl.where(every == expert, tiles, 0), axis=0)
    high, wide = pair * (2 * _TILE), block * WIDE
    row, column = high + tl.arange(0, _TILE), wide + tl.arange(0, WIDE)
    of_rows, of_columns = left_scales + first.to(tl.int64) * HEIGHT, right_scales + first.to(tl.int64) * WIDTH
    found, other = tl.zeros((_TILE, WIDE), dtype=tl.float32), tl.zeros((_TILE, WIDE), dtype=tl.float32)
    for tile in range(first, last):
        scale = tl.load(of_columns + column, mask=column < WIDTH, other=0.0)[None, :]
        one = tl.load(of_rows + row, mask=row < HEIGHT, other=0.0)[:, None]
        two = tl.load(of_rows + _TILE + row, mask=row < HEIGHT - _TILE, other=0.0)[:, None]
        numbers = right.load([wide, tile * _TILE])
        found += _product(left.load([high, tile * _TILE]), numbers) * one * scale
        other += _product(left.load([high + _TILE, tile * _TILE]), numbers) * two * scale
        of_rows += HEIGHT
        of_columns += WIDTH
    results += expert.to(tl.int64) * HEIGHT * WIDTH
    _add_or_write(results, found, high, wide, first < last, HEIGHT, WIDTH, WIDE, ADD)
    _add_or_write(results, other, high + _TILE, wide, first < last, HEIGHT, WIDTH, WIDE, ADD)


def _sizes(values: Tensor) -> dict[str, int]:
    """Return what a kernel of products is compiled with. Blackwell reads sums in a layout that takes more registers."""
    wide = TILE // 2 if (hardware.capability(values) or _HOPPER) >= _BLACKWELL else TILE
    return {"BAND": 8, "WIDE": wide, "num_warps": 8, "num_stages": 4}


def _described(numbers: Tensor, high: int) -> TensorDescriptor:
    """Return numbers [M, K] as TMA reads them, in tiles of `high` x 128; in fp32 in the interpreter."""
    return TensorDescriptor.from_tensor(numbers.float() if _interpreted(numbers) else numbers, [high, TILE])


def multiply(rows: Cut, matrices: Cut, offsets: Tensor, shape: tuple[int, ...], result: torch.dtype) -> Tensor:
    """Return rows times the transpose of their expert's matrices, [R, P x N] in the dtype `result`.

    Args:
        rows: numbers [R, ..., K'] of depth P x K' in all, and scales, of `cut_rows`.
        matrices: numbers [e, ..., K'] and scales of `cut_matrices`.
        offsets: [e] int32, the end of each expert's rows.
        shape: P and N, of each of an expert's matrices.
    """
    parts, width = shape
    (numbers, scales), (blocks, block_scales) = rows, matrices
    height, experts, depth = numbers.shape[0], offsets.shape[0], blocks.shape[-1]
    down, sizes = tiles_of_rows(height, experts), _sizes(numbers)
    results = numbers.new_empty((height, parts * width), dtype=result)
    left, right = _described(numbers.view(height, depth), TILE), _described(blocks.view(-1, depth), sizes["WIDE"])
    operands = (scales, left, right, block_scales, offsets, results)
    constants = {"DEPTH": depth, "WIDTH": width, "PARTS": parts, "EXPERTS": power_of_2(experts), **sizes}
    pairs = blocks_of(parts * blocks_of(width, TILE) * TILE, 2 * sizes["WIDE"])
    launch(_multiply, (down * pairs,), *operands, height, experts, down, **constants)
    return results


def multiply_columns(left: Cut, right: Cut, offsets: Tensor, results: Tensor, add: bool) -> None:
    """Write left_e^T right_e of each expert e to `results` [e, M, N], or add it in fp32.

    left, right: numbers and scales of `cut_columns`, of rows [R, M] and [R, N].
    """
    experts, height, width = results.shape
    (numbers, scales), (others, other_scales) = left, right
    sizes = _sizes(numbers)
    operands = (scales, _described(numbers, TILE), _described(others, sizes["WIDE"]), other_scales, offsets, results)
    constants = {"HEIGHT": height, "WIDTH": width, "EXPERTS": power_of_2(experts), **sizes, "ADD": add}
    grid = (blocks_of(height, 2 * TILE) * blocks_of(width, sizes["WIDE"]), experts)
    launch(_multiply_columns, grid, *operands, **constants)
