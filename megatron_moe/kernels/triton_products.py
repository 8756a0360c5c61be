"""Products of the experts in Triton: weight gradients that are added to their fp32 sums.

A program owns a tile of one expert's sum. It reads where the expert's rows begin and end on the device, adds up their
products in fp32, and adds the result to the sum: each element is read and written once, by one program, so the result
does not depend on an order. Programs of an expert run one after another, in squares of tiles that share their operands
in the cache.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.launching import launch

# Tiles in half precision, where tensor cores multiply, and in fp32, where they would round the operands.
_HALF = {"HIGH": 128, "WIDE": 256, "ROWS": 64, "num_warps": 8, "num_stages": 3}
_WHOLE = {"HIGH": 64, "WIDE": 64, "ROWS": 16, "num_warps": 4, "num_stages": 2}


@triton.jit
def _add(
    total,
    left,
    right,
    offsets,
    height,
    width,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    SQUARE: tl.constexpr,
):
    expert = tl.program_id(1)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    if begin < end:
        down, across = tl.cdiv(height, HIGH), tl.cdiv(width, WIDE)
        band = tl.program_id(0) // (SQUARE * across)
        inside = tl.program_id(0) % (SQUARE * across)
        tall = min(SQUARE, down - band * SQUARE)
        high = (band * SQUARE + inside % tall) * HIGH + tl.arange(0, HIGH)
        wide = (inside // tall) * WIDE + tl.arange(0, WIDE)
        row = begin + tl.arange(0, ROWS)
        lefts = left + row.to(tl.int64)[:, None] * height + high[None, :]
        rights = right + row.to(tl.int64)[:, None] * width + wide[None, :]
        found = tl.zeros((HIGH, WIDE), dtype=tl.float32)
        for start in range(begin, end, ROWS):
            here = (start + tl.arange(0, ROWS) < end)[:, None]
            one = tl.load(lefts, mask=here & (high < height)[None, :], other=0.0)
            other = tl.load(rights, mask=here & (wide < width)[None, :], other=0.0)
            found = tl.dot(tl.trans(one), other, found, input_precision="ieee")
            lefts += ROWS * height
            rights += ROWS * width
        place = total + (expert.to(tl.int64) * height + high.to(tl.int64)[:, None]) * width + wide[None, :]
        own = (high < height)[:, None] & (wide < width)[None, :]
        tl.store(place, tl.load(place, mask=own, other=0.0) + found, mask=own)


def add_grouped_product(total: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> None:
    experts, height, width = total.shape
    tiles = _WHOLE if left.dtype == torch.float32 else _HALF
    grid = (triton.cdiv(height, tiles["HIGH"]) * triton.cdiv(width, tiles["WIDE"]), experts)
    launch(_add, grid, total, left.contiguous(), right.contiguous(), offsets, height, width, SQUARE=8, **tiles)
