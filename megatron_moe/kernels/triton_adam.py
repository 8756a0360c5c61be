"""AdamW on packed state in Triton (`precision/packed_state.py`): one pass over memory, one launch for many weights.

A program takes 8 groups of 128 elements of one weight, whose addresses it reads from a table. What a group shares, the
exponent of its codes, stays within the program.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.choice import launch
from megatron_moe.platform.hardware import on_device
from megatron_moe.precision.packed_state import GROUP, NOT_FINITE, AdamState, AdamStep, StochasticRounding

_GROUPS = 8
_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3, torch.float8_e4m3fn: 4}
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_STORED_AS = tl.constexpr((tl.float32, tl.uint16, tl.int8, tl.uint8, tl.uint8))
# The columns of the table: addresses, and what else is known of a weight.
_GRAD, _MAIN, _WEIGHT, _REST, _TIES, _FIRST, _SECOND = (tl.constexpr(column) for column in range(7))
_FIRST_EXPONENTS, _SECOND_EXPONENTS, _PLACES = (tl.constexpr(column) for column in range(7, 10))
_NUMEL, _WIDTH, _START, _FIRST_COLUMN, _FIRST_PROGRAM = (tl.constexpr(column) for column in range(10, 15))
_COLUMNS = tl.constexpr(15)


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _unpacked(stored, exponents, group, inside, FORMAT: tl.constexpr):
    values = tl.load(stored, mask=inside, other=0)
    if FORMAT == 4:
        code = values.to(tl.int32)
        size = code & 0x7F
        small = size.to(tl.float32) * 0.001953125
        values = tl.where(size < 8, small, ((size + 960) << 20).to(tl.float32, bitcast=True))
        values = tl.where((code & 0x80) != 0, -values, values)
    elif FORMAT == 1:
        values = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        values = values.to(tl.float32)
    if FORMAT >= 2:
        exponent = tl.load(exponents + group, mask=inside, other=0).to(tl.int32)
        scale = tl.where(exponent == _NOT_FINITE, float("nan"), _power_of_two(exponent))
        if FORMAT == 3:
            values = values * values * scale
        values = values * scale
    return values


@triton.jit
def _pack(
    values, chance, stored, exponents, groups, inside, numel,
    FORMAT: tl.constexpr, SECOND: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    if FORMAT == 0:
        tl.store(stored, values, mask=inside)
    elif FORMAT == 1:
        bits = values.to(tl.uint32, bitcast=True)
        tl.store(stored, ((bits + chance) >> 16).to(tl.uint16), mask=inside)
    else:
        square: tl.constexpr = FORMAT == 3
        base: tl.constexpr = 2 if square else 1
        # Of 255 squared, 448 and 127 in fp32.
        limit_bits: tl.constexpr = 0x477E0100 if square else (0x43E00000 if FORMAT == 4 else 0x42FE0000)
        sizes = values.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
        sizes = tl.where(inside, sizes, 0).to(tl.int32)
        top = tl.max(tl.reshape(sizes, (GROUPS, GROUP)), axis=1)
        finite = top < 0x7F800000
        # As in C: the bits of 2^e times a number are e times 2^23 more than its own.
        exponent = (tl.where(finite, top, 0) - limit_bits + 0x7FFFFF) >> 23
        exponent = (exponent + 1) >> 1 if square else exponent
        exponent = tl.maximum(exponent, -(126 // base))
        tl.store(exponents + groups, tl.where(finite, exponent, _NOT_FINITE).to(tl.int8), mask=groups * GROUP < numel)
        inverse = tl.where(finite, _power_of_two(-exponent), 0.0)
        inverse = tl.reshape(tl.broadcast_to(inverse[:, None], (GROUPS, GROUP)), (GROUPS * GROUP,))
        whole = tl.reshape(tl.broadcast_to(finite[:, None], (GROUPS, GROUP)), (GROUPS * GROUP,))
        size = tl.where(whole, tl.abs(values), 0.0) * inverse
        share = chance.to(tl.float32) * 0.0000152587890625
        if square:
            value = size * inverse
            root = tl.floor(tl.sqrt(value))
            root = tl.where(root * root > value, root - 1.0, root)
            root = tl.where((root + 1.0) * (root + 1.0) <= value, root + 1.0, root)
            over = value - root * root
            code = root.to(tl.int32) + tl.where(over > share * (root + root + 1.0), 1, 0)
        elif FORMAT == 4:
            small = (size * 512.0 + share).to(tl.int32)
            large = ((size.to(tl.uint32, bitcast=True) + (chance << 4)) >> 20).to(tl.int32) - 960
            code = tl.where(size < 0.015625, small, large)
        else:
            code = (size + share).to(tl.int32)
        if SECOND:
            code = tl.where((code == 0) & (values > 0.0), 1, code)
        elif FORMAT == 4:
            code = code | ((values.to(tl.uint32, bitcast=True) >> 24) & 0x80).to(tl.int32)  # of a zero too
        else:
            code = tl.where(values < 0.0, -code, code)
        tl.store(stored, (tl.where(whole, code, 1) & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def _pointer(row, COLUMN: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(row + COLUMN).to(tl.pointer_type(TYPE))


@triton.jit
def _addresses(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, at, ALIGNED: tl.constexpr):
    addresses = _pointer(row, COLUMN, TYPE) + at
    if ALIGNED:  # the compiler cannot know it of what a table has, and would load each number by itself
        addresses = tl.multiple_of(addresses, [16])
    return addresses


@triton.jit
def _update(
    table, weights, seed,
    keep, first_share, second_share, second_decay, step_size, root_correction, eps,
    PACKED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, DRAWN: tl.constexpr, ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    row = table + tl.load(weights + tl.program_id(0)).to(tl.int64) * _COLUMNS
    numel = tl.load(row + _NUMEL)
    if ALIGNED:
        numel = numel // 16 * 16  # it is, which the compiler learns: it masks 16 numbers at once
    program = tl.program_id(0) - tl.load(row + _FIRST_PROGRAM)
    at = program * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)
    groups = program * GROUPS + tl.arange(0, GROUPS)
    first = _addresses(row, _FIRST, _STORED_AS[FIRST], at, ALIGNED)
    second = _addresses(row, _SECOND, _STORED_AS[SECOND], at, ALIGNED)
    first_exponents = _pointer(row, _FIRST_EXPONENTS, tl.int8)
    second_exponents = _pointer(row, _SECOND_EXPONENTS, tl.int8)
    inside = at < numel
    slope = tl.load(_addresses(row, _GRAD, tl.float32, at, ALIGNED), mask=inside, other=0.0)
    if PACKED:
        weight = _addresses(row, _WEIGHT, tl.uint16, at, ALIGNED)
        rest = _addresses(row, _REST, tl.int16, at, ALIGNED)
        ties = _pointer(row, _TIES, tl.uint8)
        upper = tl.load(weight, mask=inside, other=0).to(tl.uint32) << 16
        lower = tl.load(rest, mask=inside, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
        tied = (tl.load(ties + at // 8, mask=inside, other=0).to(tl.uint32) >> (at % 8).to(tl.uint32)) & 1
        old = (upper + lower + (tied << 16)).to(tl.float32, bitcast=True)
    else:
        main = _addresses(row, _MAIN, tl.float32, at, ALIGNED)
        old = tl.load(main, mask=inside, other=0.0)
    m = _unpacked(first, first_exponents, at // GROUP, inside, FIRST)
    v = _unpacked(second, second_exponents, at // GROUP, inside, SECOND)
    m = tl.fma(tl.full(m.shape, first_share, tl.float32), slope - m, m)
    v = tl.fma(second_share * slope, slope, v * second_decay)
    size = tl.sqrt_rn(v) / root_correction + eps
    new = old * keep - step_size * m / size
    if PACKED:
        bits = new.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        over = bits - (rounded << 16)
        tl.store(weight, rounded.to(tl.uint16), mask=inside)
        tl.store(rest, over.to(tl.int16), mask=inside)
        bit = tl.where(inside & (over == 0x8000), 1 << (at % 8).to(tl.int32), 0)
        byte = tl.sum(tl.reshape(bit, (GROUPS * GROUP // 8, 8)), axis=1)
        place = program * (GROUPS * GROUP // 8) + tl.arange(0, GROUPS * GROUP // 8)
        tl.store(ties + place, byte.to(tl.uint8), mask=place * 8 < numel)
    else:
        tl.store(main, new, mask=inside)
    if DRAWN:
        width, start = tl.load(row + _WIDTH), tl.load(row + _START)
        line = (start + at) // width
        column = (start + at - line * width + tl.load(row + _FIRST_COLUMN)).to(tl.uint32)
        place = tl.load(_pointer(row, _PLACES, tl.int64) + line, mask=inside, other=0) ^ seed
        of_row = _mixed(_mixed(place.to(tl.uint32)) ^ (place >> 32).to(tl.uint32))
        chance = _mixed(of_row + column * 0x9E3779B9)
    else:
        chance = tl.zeros((GROUPS * GROUP,), tl.uint32)
    _pack(m, chance & 0xFFFF, first, first_exponents, groups, inside, numel, FIRST, False, GROUPS, GROUP)
    _pack(v, chance >> 16, second, second_exponents, groups, inside, numel, SECOND, True, GROUPS, GROUP)


def adam_update(
    grads: Sequence[Tensor], states: Sequence[AdamState], step: AdamStep, rounding: Sequence[StochasticRounding] | None
) -> None:
    alike: dict[tuple[bool, int, int, bool], list[tuple[int, ...]]] = defaultdict(list)
    for number, (grad, state) in enumerate(zip(grads, states)):
        row = _row(grad, state, None if rounding is None else rounding[number])
        aligned = not any(one % 16 for one in (*row[: _PLACES.value], row[_NUMEL.value]))
        first, second = (_FORMATS[moment.dtype] for moment in state.moments)
        alike[state.main is None, first, second, aligned].append(row)
    seed = 0 if rounding is None else rounding[0].seeds[0] | rounding[0].seeds[1] << 32
    seed -= 2**64 if seed >= 2**63 else 0  # signed, with the same bits
    for (packed, first, second, aligned), rows in alike.items():
        table, weights = _table(tuple(rows), grads[0].device)
        of_state = {"PACKED": packed, "FIRST": first, "SECOND": second, "DRAWN": rounding is not None}
        of_layout = {"ALIGNED": aligned, "GROUPS": _GROUPS, "GROUP": GROUP}
        factors = step.factors().values()
        launch(_update, (weights.numel(),), table, weights, seed, *factors, **of_state, **of_layout)


def _row(grad: Tensor, state: AdamState, rounding: StochasticRounding | None) -> tuple[int, ...]:
    """Return a weight's row of the table but for its last column; 0 is the address of what it does not have."""
    stored = (grad, state.main, state.weight, state.low_bits, state.carry_bits, *state.moments, *state.exponents)
    places, drawn = (None, (1, 0, 0)) if rounding is None else (rounding.row_ids, rounding[1:3] + rounding[4:])
    addresses = [0 if one is None else one.data_ptr() for one in (*stored, places)]
    return (*addresses, grad.numel(), *drawn)


@functools.lru_cache(maxsize=16)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the table, int64, and the weight of each program, int32; once for weights that stay where they are."""
    programs = [-(-row[_NUMEL.value] // (_GROUPS * GROUP)) for row in rows]
    before = itertools.accumulate(programs, initial=0)
    table = on_device([number for row, first in zip(rows, before) for number in (*row, first)], torch.int64, device)
    weights = torch.arange(len(rows), dtype=torch.int32, device=device)
    counts = on_device(programs, torch.int64, device)
    return table, weights.repeat_interleave(counts, output_size=sum(programs))
