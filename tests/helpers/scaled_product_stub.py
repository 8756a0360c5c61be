"""torch's scaled product (`torch.nn.functional.scaled_mm`) computed on a CPU, for tests of code that calls cuBLAS's.

Arguments are checked by torch itself, on its meta device, where it asks of them what it asks on CUDA. It shows shapes,
strides and which scale is whose. It does not show cuBLAS: its numbers, its order of addition, its speed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

_REAL = F.scaled_mm
TILE = 128


def install(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Put the stub in the place of torch's function; return a list that gets M, N, K of each call."""
    calls: list[tuple[int, ...]] = []

    def scaled_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, output_dtype: torch.dtype
    ) -> Tensor:
        meta = [_on_meta(one) for one in (a, b, scale_a, scale_b)]
        shape = _REAL(meta[0], meta[1], meta[2], recipe_a, meta[3], recipe_b, output_dtype=output_dtype).shape
        calls.append((a.shape[0], b.shape[1], a.shape[1]))
        assert torch.float8_e4m3fn in (a.dtype, b.dtype), "cuBLAS has no product of two matrices in e5m2"
        left = a.float() * scale_a.repeat_interleave(TILE, 1)
        if recipe_b == F.ScalingType.BlockWise128x128:
            assert scale_b.shape[0] % 4 == 0
            scale_b = scale_b.t()[:, : a.shape[1] // TILE].repeat_interleave(TILE, 0)
        right = b.t().float() * scale_b.repeat_interleave(TILE, 1)
        result = (left @ right.t()).to(output_dtype)
        assert result.shape == shape
        return result

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    return calls


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
