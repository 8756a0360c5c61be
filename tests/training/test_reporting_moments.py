"""The measured rounding of stored moments against the same numbers in fp64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_moe.optim.muon import PackedMuon
from megatron_moe.precision.packed_state import StochasticRounding
from megatron_moe.training.callbacks.reporting import SAMPLE, MomentRounding
from tests.helpers.errors import relative

BETAS, EPS = (0.9, 0.95), 1e-8


def stepped(dtypes: tuple[str, str], numel: int = 999) -> tuple[Any, torch.Tensor]:
    """An optimizer after two steps with a gradient for the third, and its one weight."""
    weight = torch.zeros(numel)
    adam = PackedMuon([weight], lr=1e-2, betas=BETAS, eps=EPS, moment_dtypes=dtypes)
    adam.place(weight, StochasticRounding(torch.tensor([17]), numel, 0, (0, 0)))
    adam.allocate()
    for seed in range(3):
        weight.grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-2
        if seed < 2:
            adam.step()
    return adam, weight


def optimizer_of(adam: Any, **more: Any) -> Any:
    return SimpleNamespace(optimizer=adam, is_stub_optimizer=False, **more)


def update(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.double() / (second.double().sqrt() / (1 - BETAS[1] ** 3) ** 0.5 + EPS)


FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("fp8", "int8"), ("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")]


@pytest.mark.parametrize("dtypes", FORMATS, ids="-".join)
def test_it_is_that_of_fp64(dtypes: tuple[str, str]) -> None:
    adam, weight = stepped(dtypes)
    grad = weight.grad.double()
    first = adam.values_of(weight, "exp_avg").double() * BETAS[0] + grad * (1 - BETAS[0])
    second = adam.values_of(weight, "exp_avg_sq").double() * BETAS[1] + grad.square() * (1 - BETAS[1])
    rounding = MomentRounding()
    with rounding.watching(optimizer_of(adam)):
        adam.step()
    stored = [adam.values_of(weight, name) for name in ("exp_avg", "exp_avg_sq")]
    pairs = [(stored[0], first), (stored[1].double().sqrt(), second.sqrt()), (update(*stored), update(first, second))]
    found = [(lost / of) ** 0.5 if of else None for lost, of in rounding.sums.tolist()]
    rounded = [dtype != "fp32" for dtype in dtypes]
    for share, pair, is_measured in zip(found, pairs, [*rounded, any(rounded)], strict=True):
        expected = relative(*pair) if is_measured else None
        assert share == (None if expected is None else pytest.approx(expected, rel=1e-3))
        assert expected is None or expected > 1e-4


def test_only_the_middle_of_a_large_weight_is_looked_at() -> None:
    numel = 4 * SAMPLE + 77
    for place, changed in ((numel // 2, True), (0, False), (numel - 1, False)):
        adam, weight = stepped(("bf16", "bf16"), numel)
        rounding = MomentRounding()
        with rounding.watching(optimizer_of(adam)):
            adam.step()
            adam.state[weight]["exp_avg"][place] = 100.0
        assert (float(rounding.sums[0, 0]) > 1000.0) == changed


def test_a_momentum_of_muon_is_compared_with_its_own_mean() -> None:
    adam, weight = stepped(("bf16", "bf16"))
    adam.leave_to_muon(weight)
    old, grad = adam.values_of(weight, "exp_avg").double(), weight.grad.double()
    rounding = MomentRounding()
    adam.momentum = 0.5
    with rounding.watching(optimizer_of(adam)):
        adam.add_gradients(0.5, nesterov=True)
    expected = relative(adam.values_of(weight, "exp_avg"), (old + grad) / 2)
    (lost, of), *others = rounding.sums.tolist()
    assert (lost / of) ** 0.5 == pytest.approx(expected, rel=1e-3) and expected > 1e-4
    assert others == [[0.0, 0.0], [0.0, 0.0]]
