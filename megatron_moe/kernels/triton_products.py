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

from megatron_moe.kernels.choice import blocks_of, launch

# Tiles in half precision, where tensor cores multiply, and in fp32, where they would round the operands.
_HALF = {"HIGH": 128, "WIDE": 128, "ROWS": 64, "num_warps": 8, "num_stages": 4}
_WHOLE = {"HIGH": 64, "WIDE": 64, "ROWS": 16, "num_warps": 8, "num_stages": 2}


@triton.jit
def _add(
    total, left, right, offsets,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SQUARE: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(1)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    if begin < end:
        down: tl.constexpr = (HEIGHT + HIGH - 1) // HIGH
        across: tl.constexpr = (WIDTH + WIDE - 1) // WIDE
        band = tl.program_id(0) // (SQUARE * across)
        inside = tl.program_id(0) % (SQUARE * across)
        tall = min(SQUARE, down - band * SQUARE)
        high = (band * SQUARE + inside % tall) * HIGH + tl.arange(0, HIGH)
        wide = (inside // tall) * WIDE + tl.arange(0, WIDE)
        # What is beyond an edge is read as the edge's beginning, and not written.
        lefts = tl.arange(0, ROWS)[:, None] * HEIGHT + (high % HEIGHT)[None, :]
        rights = tl.arange(0, ROWS)[:, None] * WIDTH + (wide % WIDTH)[None, :]
        found = tl.zeros((HIGH, WIDE), dtype=tl.float32)
        left += begin.to(tl.int64) * HEIGHT
        right += begin.to(tl.int64) * WIDTH
        for done in range(0, end - begin, ROWS):
            here = (tl.arange(0, ROWS) < end - begin - done)[:, None]
            one = tl.load(left + lefts, mask=here, other=0.0)
            other = tl.load(right + rights, mask=here, other=0.0)
            left += ROWS * HEIGHT
            right += ROWS * WIDTH
            if WIDEN:
                one, other = one.to(tl.float32), other.to(tl.float32)
            found = tl.dot(tl.trans(one), other, found, input_precision="ieee")
        place = total + expert.to(tl.int64) * HEIGHT * WIDTH + high[:, None] * WIDTH + wide[None, :]
        own = (high < HEIGHT)[:, None] & (wide < WIDTH)[None, :]
        tl.store(place, tl.load(place, mask=own, other=0.0) + found, mask=own)


def add_grouped_product(total: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> None:
    experts, height, width = total.shape
    tiles = _WHOLE if left.dtype == torch.float32 else _HALF
    grid = (blocks_of(height, tiles["HIGH"]) * blocks_of(width, tiles["WIDE"]), experts)
    # Triton's interpreter multiplies the bits of bf16 as whole numbers.
    widen = not isinstance(_add, triton.JITFunction)
    sizes = {"HEIGHT": height, "WIDTH": width, "SQUARE": 8, "WIDEN": widen}
    launch(_add, grid, total, left.contiguous(), right.contiguous(), offsets, **sizes, **tiles)
