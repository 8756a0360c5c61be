"""The Newton-Schulz iteration against singular values in fp64, and what packed state becomes, and where it is."""

import math
from typing import Any

import pytest
import torch

from megatron_moe.optim.muon import COEFFICIENTS, PackedMuon, orthogonalized, steps_of
from megatron_moe.precision.packed_state import StochasticRounding
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


# Least singular value over the Frobenius norm -> where the results are, as in docs/guides/optimizers.md.
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


STEPS = {"bf16": 2.0**-7, "int8": 2.0**-6, "fp8": 2.0**-3}
"""Dtype of a momentum -> the largest step between two of its values, over the larger; of codes over the group's."""


def muon(numel: int = 1000, *, packed: bool = True, **options: Any) -> tuple[PackedMuon, torch.Tensor, torch.Tensor]:
    """An optimizer of one matrix and one vector that it leaves to AdamW, bf16 weights with main weights."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator).bfloat16() for shape in ((numel // 10, 10), (numel,))]
    mains = [weight.float() for weight in weights]
    made = PackedMuon(mains, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **options)
    made.matrices.add(mains[0])
    made.allocate()
    for main, weight in zip(mains, weights):
        if packed:
            made.pack_main_param(main, weight)
        made.place(main, StochasticRounding(torch.arange(main.numel() // 10), 10, 0, (0, 0)))
    return made, mains[0], mains[1]


def gradient(main: torch.Tensor, number: int) -> torch.Tensor:
    return torch.randn(main.shape, generator=torch.Generator().manual_seed(number)) * 1e-2


def step(optimizer: PackedMuon, mains: tuple[torch.Tensor, ...], number: int) -> None:
    for main in mains:
        main.grad = gradient(main, number)
    optimizer.add_gradients(0.9, nesterov=False)
    optimizer.step()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", *STEPS])
def test_a_momentum_is_the_mean_of_gradients_rounded_once_a_step(dtype: str, nesterov: bool) -> None:
    made, main, _ = muon(moment_dtypes=(dtype, "fp32"))
    for number in range(4):
        before = made.values_of(main, "exp_avg").clone().double()
        main.grad = gradient(main, number)
        made.add_gradients(0.9, nesterov=nesterov)
        wanted = 0.9 * before + 0.1 * gradient(main, number).double().view(-1)
        value = 0.1 * gradient(main, number).double().view(-1) + 0.9 * wanted if nesterov else wanted
        torch.testing.assert_close(main.grad.double().view(-1), value, rtol=1e-5, atol=1e-9)  # is not rounded
        after = made.values_of(main, "exp_avg").double()
        size = wanted.abs() if dtype in ("fp32", "bf16") else wanted.abs().max()
        assert ((after - wanted).abs() <= STEPS.get(dtype, 1e-6) * size + 1e-9).all()
        assert (after.float() != wanted.float()).float().mean() > 0.9 or dtype == "fp32"


def test_a_matrix_is_decayed_and_moved_by_what_is_in_its_gradients_place() -> None:
    made, main, vector = muon(moment_dtypes=("bf16", "bf16"))
    before = made.main_param(main).clone()
    for one in (main, vector):
        one.grad = gradient(one, 0)
    made.step()
    assert torch.equal(made.main_param(main), (before * (1 - 1e-2 * 0.1)).add(gradient(main, 0), alpha=-1e-2))
    assert torch.equal(made.values_of(main, "exp_avg"), torch.zeros(main.numel()))
    assert (made.values_of(vector, "exp_avg") != 0).all()


def test_a_matrix_has_no_second_moment_but_for_a_load() -> None:
    made, main, vector = muon(moment_dtypes=("int8", "fp8"))
    step(made, (main, vector), 0)
    assert set(made.state[main]) == {"exp_avg", "exp_avg_exponents", "low_bits", "carry_bits"}
    assert "exp_avg_sq" in made.state[vector]
    assert not made.values_of(main, "exp_avg_sq").any()
    kept = {name: tensor.clone() for name, tensor in made.state[main].items()}
    for keep, nbytes in ((False, 4), (True, 4 * main.numel())):
        with made.unpacked(keep=keep):
            zeros = made.state[main]["exp_avg_sq"]
            assert zeros.shape == main.shape and not zeros.any() and zeros.untyped_storage().nbytes() == nbytes
            if keep:
                zeros.fill_(1.0)  # loading writes into it
        assert made.state[main].keys() == kept.keys()
        assert all(torch.equal(made.state[main][name], kept[name]) for name in kept)


@pytest.mark.parametrize("packed", [True, False])
def test_state_on_the_host_changes_no_bit(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setattr(PackedMuon, "piece_numel", 256)
    options: dict[str, Any] = {"moment_dtypes": ("int8", "bf16"), "packed": packed}
    (near, *mains), (away, *others) = muon(**options), muon(on_host=True, **options)
    for number in range(3):
        step(near, tuple(mains), number)
        step(away, tuple(others), number)
    for one, other in zip(mains, others):
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(near.values_of(one, kind).view(-1), away.values_of(other, kind).view(-1))


def test_what_follows_an_update_is_given_the_fp32_weight() -> None:
    made, main, vector = muon(moment_dtypes=("bf16", "bf16"))
    plain, same, other = muon(moment_dtypes=("bf16", "bf16"))
    for one in (main, vector):
        made.after_update[one] = lambda weight: weight.mul_(1 / 3)
    step(made, (main, vector), 0)
    step(plain, (same, other), 0)
    for one, two in ((main, same), (vector, other)):
        assert torch.equal(made.main_param(one), plain.main_param(two) * (1 / 3))
