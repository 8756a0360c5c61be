"""torch's scaled product (`torch.nn.functional.scaled_mm`) computed on a CPU, for tests of code that calls cuBLAS's.

Arguments are checked by torch itself, on its meta device, where it asks of them what it asks on CUDA, and for what
cuBLAS asks besides. It shows shapes, strides and which scale is whose. It does not show cuBLAS: its numbers, its order
of addition, its speed.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

_REAL = F.scaled_mm
TILE = 128
CALLS: list[tuple[int, int, int]] = []
"""M, N and K of each call since `install`."""


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, output_dtype: torch.dtype
) -> Tensor:
    """Return the product [M, N] of a [M, K], in tiles of 1 x 128, and b [K, N], in tiles of 128 x 1 or 128 x 128."""
    meta = [_on_meta(one) for one in (a, b, scale_a, scale_b)]
    shape = _REAL(meta[0], meta[1], meta[2], recipe_a, meta[3], recipe_b, output_dtype=output_dtype).shape
    assert not any(size % 16 for size in (*a.shape, *b.shape)), "cuBLAS takes multiples of 16"
    assert a.dtype == b.dtype == torch.float8_e4m3fn, "torch's function refuses e5m2 with these tiles, on a card alone"
    CALLS.append((a.shape[0], b.shape[1], a.shape[1]))
    left = a.float() * scale_a.repeat_interleave(TILE, 1)
    if recipe_b == F.ScalingType.BlockWise128x128:
        scale_b = scale_b.t()[:, : a.shape[1] // TILE].repeat_interleave(TILE, 0)
    right = b.t().float() * scale_b.repeat_interleave(TILE, 1)
    result = (left @ right.t()).to(output_dtype)
    assert result.shape == shape
    return result


def scaled_mm_beneath(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return the same product by the operation that takes e5m2 too, with a [M, K] and b [K, N] in tiles of a row."""
    assert {a.dtype, b.dtype} == {torch.float8_e4m3fn, torch.float8_e5m2}, "cuBLAS has no product of two in e5m2"
    assert scale_a.shape == (a.shape[0], a.shape[1] // TILE) and scale_a.stride(0) == 1
    assert scale_b.shape == (b.shape[0] // TILE, b.shape[1]) and scale_b.stride(1) == 1
    CALLS.append((a.shape[0], b.shape[1], a.shape[1]))
    left = a.float() * scale_a.repeat_interleave(TILE, 1)
    right = b.float() * scale_b.repeat_interleave(TILE, 0)
    return (left @ right).to(out_dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Put the stub in the place of torch's function; return `CALLS`, empty."""
    CALLS.clear()
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm_beneath)
    return CALLS


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
