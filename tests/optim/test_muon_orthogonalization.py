"""The Newton-Schulz iteration against singular values in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_moe.optim.muon import COEFFICIENTS, orthogonalized, steps_of
from tests.numbers import reference_muon

SHAPES = [(1, 1), (1, 9), (16, 16), (48, 16), (16, 80), (96, 100)]
KINDS = {"quintic": reference_muon.QUINTIC, "simple": reference_muon.SIMPLE}
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
# Over the expected error: one draw's; and in fp32 sums are rounded, too, not only products.
MOST = {torch.float32: 10.0, torch.bfloat16: 3.0}


def drawn(rows: int, columns: int, condition: float = 1.0) -> torch.Tensor:
    """A matrix with singular values from 1 down to 1 / condition, times a random size."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.logspace(0, -math.log10(condition), min(rows, columns), dtype=torch.float64)
    return (left @ torch.diag(values) @ right * 0.37).float()


@pytest.mark.parametrize("dtype", list(UNITS), ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_is_that_of_singular_values(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    for condition in (1.0, 30.0, 1e4):
        matrix = drawn(*shape, condition)
        found = orthogonalized(matrix.unsqueeze(0), steps_of(kind, 5), dtype)[0]
        wanted = reference_muon.orthogonalized(matrix, KINDS[kind])
        assert found.dtype == dtype and found.shape == matrix.shape
        expected = reference_muon.expected_error(matrix, KINDS[kind], UNITS[dtype])
        error = float((found.double() - wanted).norm())
        assert error < MOST[dtype] * expected
        assert error > 0.2 * expected or min(shape) == 1, "the expectation says nothing"


def test_a_batch_is_as_each_of_its_matrices() -> None:
    batch = torch.stack([drawn(16, 24, 10.0), drawn(16, 24, 100.0) * 1e-3, torch.zeros(16, 24)])
    together = orthogonalized(batch, steps_of("quintic", 5), torch.float32)
    for matrix, found in zip(batch, together):
        alone = orthogonalized(matrix.unsqueeze(0), steps_of("quintic", 5), torch.float32)[0]
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    assert not together[2].any()


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1.0, 1e36])
def test_the_size_of_a_matrix_is_of_no_account(size: float) -> None:
    matrix = drawn(24, 16, 10.0).unsqueeze(0)
    wanted = orthogonalized(matrix, steps_of("quintic", 5), torch.float32)
    torch.testing.assert_close(orthogonalized(matrix * size, steps_of("quintic", 5), torch.float32), wanted)


# Least singular value over the Frobenius norm -> where the results are, as in docs/optimizers.md.
RANGES = {
    "quintic": [(1e-3, 0.47, 1.15), (3e-3, 0.97, 1.15), (1e-2, 0.97, 1.04)],
    "simple": [(1e-3, 0.47, 1.21), (3e-3, 0.68, 1.21), (1e-2, 0.68, 1.14)],
}


@pytest.mark.parametrize("kind", list(RANGES))
def test_singular_values_come_as_near_to_1_as_docs_say(kind: str) -> None:
    for least, low, high in RANGES[kind]:
        found = torch.logspace(math.log10(least), 0, 100_000, dtype=torch.float64)
        for a, b, c in steps_of(kind, 5):
            found = found * (a + found.square() * (b + c * found.square()))
        assert low < found.min() < low + 0.01 and high - 0.01 < found.max() < high


def test_the_last_coefficients_go_on() -> None:
    assert steps_of("quintic", 7)[5:] == (COEFFICIENTS["quintic"][-1],) * 2
    assert steps_of("quintic", 2) == COEFFICIENTS["quintic"][:2]
