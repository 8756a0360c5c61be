"""Tiles in FP8 that kernels cut where numbers are made, next to those that are cut from numbers that were written."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.moe.grouped_gemm_fp8 import E4M3, TILE

Cuts = list[tuple[Tensor, Tensor]]


def pairs(rows: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Cuts, Cuts]:
    """Return numbers and scales of copies and of the activation, found and wanted.

    Args:
        rows: [R, 2F], those of the experts, gate and up projection. offsets: [e] int32, the end of each expert's.
        dtype: of gradients' tiles.
    """
    from megatron_moe.kernels import triton_activation, triton_fp8

    height, width = rows.shape[0], rows.shape[1] // 2
    source = torch.randperm(height, generator=torch.Generator().manual_seed(6)).to(rows.device)
    weights = torch.linspace(-1, 2, height, device=rows.device)
    weights[9], weights[12] = float("inf"), float("nan")
    apart, copies, grad = F.pad(rows, (0, 16))[:, : 2 * width], rows[source].unsqueeze(1), rows[:, :width].contiguous()
    result = triton_activation.weighted_swiglu_forward(rows, weights).unsqueeze(1)
    slope, of_weights = triton_activation.weighted_swiglu_backward(grad, rows, weights)
    cut_slope, cut_result, found_of_weights = triton_activation.cut_activation(grad, rows, weights, offsets, dtype)
    assert torch.allclose(found_of_weights, of_weights, rtol=1e-5, equal_nan=True)
    cut_copies, copied = triton_fp8.cut_copies(apart, weights, source.argsort().unsqueeze(1), height)
    assert torch.equal(copied.nan_to_num(), weights[source].nan_to_num())
    cut_columns = triton_fp8.cut_columns
    found = [*cut_columns(apart.unsqueeze(1), offsets, dtype, True, source), *cut_slope, cut_result]
    wanted = cut_columns(copies, offsets, dtype, True) + cut_columns(slope.unflatten(1, (2, -1)), offsets, dtype, True)
    wanted += cut_columns(result, offsets, E4M3)
    tiles = int(((offsets.diff(prepend=offsets[:1] * 0) + TILE - 1) // TILE).sum())
    for number in (0, 2, 4):  # tiles without rows are not written
        for some in (found, wanted):
            some[number] = some[number][0][:, : tiles * TILE], some[number][1][:tiles]
    wanted += [triton_fp8.cut_rows(one, E4M3) for one in (copies, result)]
    return [*found, cut_copies, triton_activation.cut_activated(rows, weights)], wanted


def differ(found: Cuts, wanted: Cuts) -> list[int]:
    """Return which of the tiles have other bits."""
    bits = [[[part.view(torch.uint8).tolist() for part in cut] for cut in cuts] for cuts in (found, wanted)]
    return [number for number, (one, other) in enumerate(zip(*bits, strict=True)) if one != other]
