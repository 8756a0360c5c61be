"""AdamW on packed state in Triton (`precision/packed_state.py`): one pass over memory.

A program takes 8 groups of 128 elements. What a group shares, the exponent of its codes, stays within the program.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.launching import launch
from megatron_moe.precision.packed_state import GROUP, NOT_FINITE, AdamState, AdamStep, Chances

_GROUPS = 8
_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3, torch.float8_e4m3fn: 4}
_NOT_FINITE = tl.constexpr(NOT_FINITE)


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _unpacked(stored, exponents, at, group, inside, FORMAT: tl.constexpr):
    values = tl.load(stored + at, mask=inside, other=0)
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
    values, chance, stored, exponents, at, groups, inside, numel,
    FORMAT: tl.constexpr, SECOND: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    if FORMAT == 0:
        tl.store(stored + at, values, mask=inside)
    elif FORMAT == 1:
        bits = values.to(tl.uint32, bitcast=True)
        tl.store(stored + at, ((bits + chance) >> 16).to(tl.uint16), mask=inside)
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
        tl.store(stored + at, (tl.where(whole, code, 1) & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def _update(
    grad, main, weight, rest, ties, first, first_exponents, second, second_exponents,
    places, numel, width, start, first_column, seed,
    keep, first_share, second_share, second_decay, step_size, root_correction, eps,
    PACKED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, DRAWN: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = program * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)
    groups = program * GROUPS + tl.arange(0, GROUPS)
    inside = at < numel
    slope = tl.load(grad + at, mask=inside, other=0.0)
    if PACKED:
        upper = tl.load(weight + at, mask=inside, other=0).to(tl.uint32) << 16
        lower = tl.load(rest + at, mask=inside, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
        tied = (tl.load(ties + at // 8, mask=inside, other=0).to(tl.uint32) >> (at % 8).to(tl.uint32)) & 1
        old = (upper + lower + (tied << 16)).to(tl.float32, bitcast=True)
    else:
        old = tl.load(main + at, mask=inside, other=0.0)
    m = _unpacked(first, first_exponents, at, at // GROUP, inside, FIRST)
    v = _unpacked(second, second_exponents, at, at // GROUP, inside, SECOND)
    m = tl.fma(tl.full(m.shape, first_share, tl.float32), slope - m, m)
    v = tl.fma(second_share * slope, slope, v * second_decay)
    size = tl.sqrt_rn(v) / root_correction + eps
    new = old * keep - step_size * m / size
    if PACKED:
        bits = new.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        over = bits - (rounded << 16)
        tl.store(weight + at, rounded.to(tl.uint16), mask=inside)
        tl.store(rest + at, over.to(tl.int16), mask=inside)
        bit = tl.where(inside & (over == 0x8000), 1 << (at % 8).to(tl.int32), 0)
        byte = tl.sum(tl.reshape(bit, (GROUPS * GROUP // 8, 8)), axis=1)
        place = program * (GROUPS * GROUP // 8) + tl.arange(0, GROUPS * GROUP // 8)
        tl.store(ties + place, byte.to(tl.uint8), mask=place * 8 < numel)
    else:
        tl.store(main + at, new, mask=inside)
    if DRAWN:
        row = (start + at) // width
        column = (start + at - row * width + first_column).to(tl.uint32)
        place = tl.load(places + row, mask=inside, other=0) ^ seed
        of_row = _mixed(_mixed(place.to(tl.uint32)) ^ (place >> 32).to(tl.uint32))
        chance = _mixed(of_row + column * 0x9E3779B9)
    else:
        chance = tl.zeros((GROUPS * GROUP,), tl.uint32)
    _pack(m, chance & 0xFFFF, first, first_exponents, at, groups, inside, numel, FIRST, False, GROUPS, GROUP)
    _pack(v, chance >> 16, second, second_exponents, at, groups, inside, numel, SECOND, True, GROUPS, GROUP)


def adam_update(grad: Tensor, state: AdamState, step: AdamStep, chances: Chances | None) -> None:
    formats = [_FORMATS[moment.dtype] for moment in state.moments]
    packed = state.main is None

    def bits(tensor: Tensor | None) -> Tensor:
        """Return what the kernel takes for a tensor: integers for what it stores as bits, anything for None."""
        if tensor is None:
            return grad
        return tensor.view(
            {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype, tensor.dtype)
        )

    stored = []
    for moment, exponents in zip(state.moments, state.exponents):
        stored += [bits(moment), bits(exponents)]
    launch(
        _update,
        (triton.cdiv(grad.numel(), _GROUPS * GROUP),),
        grad,
        *(bits(one) for one in (state.main, state.weight, state.rest, state.ties)),
        *stored,
        grad if chances is None else chances.places,
        grad.numel(),
        1 if chances is None else chances.width,
        0 if chances is None else chances.start,
        0 if chances is None else chances.first_column,
        0 if chances is None else _signed(chances.seeds[0] | chances.seeds[1] << 32),
        *step.factors().values(),
        PACKED=packed,
        FIRST=formats[0],
        SECOND=formats[1],
        DRAWN=chances is not None,
        GROUPS=_GROUPS,
        GROUP=GROUP,
    )


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
