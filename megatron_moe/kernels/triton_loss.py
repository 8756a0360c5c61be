"""The fused loss's softmax in Triton: a tile of logits is read once for its statistics, and once for its gradient."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.choice import blocks_of, launch


@triton.jit
def _statistics(tile, columns, maximum, exp_sum, label_logit, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    top = tl.load(maximum + token)
    total = tl.load(exp_sum + token)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logits = tl.load(tile + token * width + column, mask=column < width, other=float("-inf"))
        higher = tl.maximum(top, tl.max(logits, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher), axis=0)
        top = higher
    tl.store(maximum + token, top)
    tl.store(exp_sum + token, total)
    label = tl.load(columns + token)
    here = (label >= 0) & (label < width)
    logit = tl.load(tile + token * width + label, mask=here, other=0.0)
    tl.store(label_logit + token, tl.load(label_logit + token) + logit)


@triton.jit
def _gradient(tile, columns, maximum, exp_sum, grad, found, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    slope = tl.load(grad + token)
    logits = tl.load(tile + token * width + column, mask=inside, other=0.0)
    value = tl.exp(logits - tl.load(maximum + token)) * (slope / tl.load(exp_sum + token))
    value = value - tl.where(column == tl.load(columns + token), slope, 0.0)
    tl.store(found + token * width + column, value.to(found.dtype.element_ty), mask=inside)


def add_statistics(tile: Tensor, columns: Tensor, maximum: Tensor, exp_sum: Tensor, label_logit: Tensor) -> Any:
    if not tile.is_contiguous():
        return NotImplemented
    operands = (tile, columns, maximum, exp_sum, label_logit)
    launch(_statistics, (tile.shape[0],), *operands, tile.shape[1], BLOCK=2048, num_warps=8)
    return None


def gradient_of_tile(
    tile: Tensor, columns: Tensor, maximum: Tensor, exp_sum: Tensor, grad: Tensor, dtype: torch.dtype
) -> Any:
    if not tile.is_contiguous():
        return NotImplemented
    found = tile.new_empty(tile.shape, dtype=dtype)
    grid = (tile.shape[0], blocks_of(tile.shape[1], 2048))
    launch(_gradient, grid, tile, columns, maximum, exp_sum, grad.contiguous(), found, tile.shape[1], BLOCK=2048)
    return found
