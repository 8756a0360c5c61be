"""Latent attention's queries and keys in Triton: both parts of a head are put together, the second one rotated."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.choice import launch, power_of_2


@triton.jit
def _join(
    rest, positional, cos, sin, joined, sharing, heads,
    rest_stride, rest_head_stride, positional_stride, positional_head_stride,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, REST_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    target = joined + (row * heads + head) * (WIDTH + 2 * PAIRS)
    column = tl.arange(0, REST_BLOCK)
    inside = column < WIDTH
    tl.store(
        target + column, tl.load(rest + row * rest_stride + head * rest_head_stride + column, mask=inside), mask=inside
    )
    pair = tl.arange(0, PAIR_BLOCK)
    known = pair < PAIRS
    source = positional + row * positional_stride + head * positional_head_stride + 2 * pair
    first = tl.load(source, mask=known, other=0.0).to(tl.float32)
    second = tl.load(source + 1, mask=known, other=0.0).to(tl.float32)
    place = (row // sharing) * PAIRS + pair
    c, s = tl.load(cos + place, mask=known, other=0.0), tl.load(sin + place, mask=known, other=0.0)
    kind = joined.dtype.element_ty
    tl.store(target + WIDTH + 2 * pair, (first * c - second * s).to(kind), mask=known)
    tl.store(target + WIDTH + 2 * pair + 1, (second * c + first * s).to(kind), mask=known)


@triton.jit
def _turn_back(
    grad, cos, sin, found, sharing, heads,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, PAIR_BLOCK)
    known = pair < PAIRS
    first = tl.zeros((PAIR_BLOCK,), dtype=tl.float32)
    second = tl.zeros((PAIR_BLOCK,), dtype=tl.float32)
    for one in range(head, heads if SHARED else head + 1):
        source = grad + (row * heads + one) * (WIDTH + 2 * PAIRS) + WIDTH + 2 * pair
        first += tl.load(source, mask=known, other=0.0).to(tl.float32)
        second += tl.load(source + 1, mask=known, other=0.0).to(tl.float32)
    kind = found.dtype.element_ty
    place = (row // sharing) * PAIRS + pair
    c, s = tl.load(cos + place, mask=known, other=0.0), tl.load(sin + place, mask=known, other=0.0)
    target = found + (row * (1 if SHARED else heads) + head) * 2 * PAIRS + 2 * pair
    tl.store(target, (first * c + second * s).to(kind), mask=known)
    tl.store(target + 1, (second * c - first * s).to(kind), mask=known)


def _row_stride(x: Tensor) -> int | None:
    """Return the stride of the rows [S x B] of x [S, B, heads, width]; None if they have no single one."""
    fits = x.stride(-1) == 1 and (x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return (x.stride(0) if x.shape[1] == 1 else x.stride(1)) if fits else None


def join_positions(rest: Tensor, positional: Tensor, cos: Tensor, sin: Tensor) -> Any:
    length, sequences, heads, width = rest.shape
    pairs = positional.shape[-1] // 2
    rest_stride, positional_stride = _row_stride(rest), _row_stride(positional)
    if rest_stride is None or positional_stride is None:
        return NotImplemented
    joined = rest.new_empty((length, sequences, heads, width + 2 * pairs))
    operands = (rest, positional, cos.contiguous(), sin.contiguous(), joined)
    head_stride = 0 if positional.shape[2] == 1 else positional.stride(2)
    strides = (rest_stride, rest.stride(2), positional_stride, head_stride)
    constants = {"WIDTH": width, "PAIRS": pairs, "REST_BLOCK": power_of_2(width)}
    constants["PAIR_BLOCK"] = power_of_2(pairs)
    grid = (length * sequences, heads)
    launch(_join, grid, *operands, sequences // cos.shape[1], heads, *strides, num_warps=1, **constants)
    return joined


def join_positions_backward(grad: Tensor, cos: Tensor, sin: Tensor, width: int, shared: bool) -> Tensor:
    length, sequences, heads, whole = grad.shape
    pairs = (whole - width) // 2
    found = grad.new_empty((length, sequences, 1 if shared else heads, 2 * pairs))
    constants = {"WIDTH": width, "PAIRS": pairs, "PAIR_BLOCK": power_of_2(pairs), "SHARED": shared}
    operands = (grad.contiguous(), cos.contiguous(), sin.contiguous(), found)
    grid = (length * sequences, found.shape[2])
    launch(_turn_back, grid, *operands, sequences // cos.shape[1], heads, num_warps=1, **constants)
    return found
