"""The kernels of FP8 in Triton's interpreter: tiles have the bits of torch's form, products the order's error alone.

Torch rounds to FP8 there: that the compiled kernels round to the nearest number is seen in `compiled_kernels.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.moe import grouped_gemm_fp8 as fp8
from tests.helpers import tiles_where_made
from tests.kernels.compiled_kernels import all_kernels

COUNTS = [130, 0, 3, 128]
OFFSETS = torch.tensor(COUNTS).cumsum(0).int()


@pytest.fixture(scope="module")
def fused() -> Any:
    return all_kernels()


def values(*shape: int) -> Tensor:
    """Numbers of all sizes, halfway between FP8 numbers too; tiles of zeros, with a NaN, with an infinity."""
    generator = torch.Generator().manual_seed(shape[-1])
    found = torch.randn(shape, generator=generator) * torch.exp(20 * torch.randn(shape, generator=generator).abs() - 40)
    found[..., 3, :] = 0.0
    found[..., 5, 130], found[..., 6, 2] = float("nan"), -float("inf")
    found[..., 7, :130] = torch.arange(-65, 65) * 2.0**-5  # the scale is 2^-8
    found[..., 7, 0] = 1.75
    return found.bfloat16()


def assert_same_bits(found: tuple[Tensor, Tensor], numbers: Tensor, scales: Tensor) -> None:
    assert found[0].dtype == numbers.dtype and found[0].shape == numbers.shape and found[1].shape == scales.shape
    for one, other in zip(found, (numbers, scales), strict=True):
        one, other = one.float(), other.float()
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(0.5).view(torch.int32), other.nan_to_num(0.5).view(torch.int32))


def test_blocks_of_weights_have_the_bits_of_torchs_form(fused: Any) -> None:
    stacks = values(3, 2, 136, 200)
    numbers, scales = fp8.cut_into_tiles.eager(stacks, 128, 128, fp8.E4M3)  # type: ignore[attr-defined]
    assert_same_bits(fused.cut_matrices(stacks), numbers, scales)
    assert_same_bits(fused.cut_into_tiles(stacks, 128, 128, fp8.E4M3), numbers, scales)
    turned = (one.flatten(1, 2).mT for one in (numbers, scales))
    assert_same_bits(fused.cut_matrices(stacks, turned=True), *turned)


@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
def test_tiles_have_the_bits_of_torchs_form(fused: Any, dtype: torch.dtype) -> None:
    cut = fp8.cut_into_tiles.eager  # type: ignore[attr-defined]
    rows = values(2, sum(COUNTS), 200).transpose(0, 1).contiguous()
    numbers, scales = cut(rows, 1, 128, dtype)
    assert numbers.isnan().any() and scales.isinf().any()
    assert_same_bits(fused.cut_rows(rows, dtype), numbers, scales.flatten(1).t())
    assert_same_bits(fused.cut_into_tiles(rows, 1, 128, dtype), numbers, scales)
    both, of_rows = fused.cut_columns(rows, OFFSETS, dtype, with_rows=True)
    assert_same_bits(of_rows, numbers, scales.flatten(1).t())
    rows = rows[:, 0].contiguous()
    alone, both = fused.cut_columns(rows.unsqueeze(1), OFFSETS, dtype)[0], (both[0][:200], both[1][:, :200])
    for columns, of_columns in (alone, both):
        assert columns.shape == (200, (sum(COUNTS) // 128 + len(COUNTS)) * 128)
        tile = 0  # each expert's rows begin at a tile, with zeros behind them
        for expert in rows.split(COUNTS):
            numbers, scales = cut(expert, 128, 1, dtype)
            end = tile + len(scales)
            assert_same_bits((columns[:, tile * 128 : end * 128].t(), of_columns[tile:end]), numbers, scales)
            tile = end


def test_what_is_cut_where_it_is_made_has_the_bits_of_what_is_written_first() -> None:
    pairs = tiles_where_made.pairs(values(133, 400), torch.tensor([130, 130, 133]).int(), fp8.E5M2)
    assert len(pairs[0]) == len(pairs[1]) == 7 and tiles_where_made.differ(*pairs) == []


def test_what_is_not_finite_spoils_its_own_rows_and_columns_alone(fused: Any) -> None:
    rows, stack, grad = (torch.randn(*shape) for shape in ((261, 200), (4, 1, 136, 200), (261, 136)))
    forms = (fp8._ByTriton(OFFSETS, 261, stack), fp8._Emulated(OFFSETS, 261, stack))
    rows[2, 130] = grad[260, 4] = float("nan")
    rows[140, 1] = stack[3, 0, 135, 0] = float("inf")
    for product in (
        lambda form: form.results(rows, stack),
        lambda form: form.grad_rows(grad, stack, fp8.E5M2),
        lambda form: form.grad_matrices(grad, rows, stack.shape, fp8.E5M2),
    ):
        found, wanted = map(product, forms)
        assert torch.equal(found.isnan(), wanted.isnan()) and 0 < int(wanted.isnan().sum()) < wanted.numel()
        assert float((found - wanted).nan_to_num().norm()) <= 1e-6 * float(wanted.nan_to_num().norm())
