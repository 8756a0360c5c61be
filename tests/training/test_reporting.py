"""Additions that rounding swallowed are counted exactly, and the rounding of stored moments is measured in fp64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_moe.optim.muon import PackedMuon
from megatron_moe.precision.packed_state import StochasticRounding
from megatron_moe.training.callbacks.reporting import SAMPLE, LostUpdates, MomentRounding
from tests.helpers.errors import relative


def half(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_planted_swallowed_additions_are_counted_exactly() -> None:
    total = half(256, 256, 256, 256)
    with LostUpdates([total]) as lost:
        total.add_(half(0, 1, 0.5, 2))  # 257 is no bf16 and goes to 256; 258 is one; adding 0 is no addition
        total[2:] += half(4, 1)  # 260 and, from 258, 259, a tie that goes to 260
    assert total.tolist() == [256, 256, 260, 260]
    assert lost.counted(gradients=True) == (5, 2)
    assert lost.counted(gradients=False) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_additions_elsewhere_are_told_apart(dtype: torch.dtype) -> None:
    buffer, other = torch.zeros(4, dtype=dtype), torch.ones(2, 3, dtype=dtype)
    with LostUpdates([buffer]) as lost:
        buffer[1:3].add_(1)
        other += torch.tensor([1e-4, 0.0, 1.0], dtype=dtype)  # broadcast over two rows
        torch._foreach_add_([other, other], [torch.zeros_like(other), other])
    assert lost.counted(gradients=True) == (2, 0)
    assert lost.counted(gradients=False) == (4 + 6, 2)


def test_fp32_scalars_and_infinities_are_no_lost_updates() -> None:
    wide, scalar, infinite = torch.ones(3), half(256)[0].clone(), half(float("inf"), float("nan"))
    with LostUpdates() as lost:
        wide.add_(1e-12)
        scalar.add_(1)
        infinite.add_(1)
    assert lost.counted(gradients=False) == (2, 0)


def test_a_gradient_added_up_by_autograd_is_seen() -> None:
    weight = half(1, 1).requires_grad_()
    weight.grad = half(256, 256)
    with LostUpdates([weight.grad]) as lost:
        (weight * half(0.5, 4)).sum().backward()
    assert weight.grad.tolist() == [256, 260]
    assert lost.counted(gradients=True) == (2, 1)


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
    adam.matrices.add(weight)
    old, grad = adam.values_of(weight, "exp_avg").double(), weight.grad.double()
    rounding = MomentRounding()
    adam.momentum = 0.5
    with rounding.watching(optimizer_of(adam)):
        adam.add_gradients(0.5, nesterov=True)
    expected = relative(adam.values_of(weight, "exp_avg"), (old + grad) / 2)
    (lost, of), *others = rounding.sums.tolist()
    assert (lost / of) ** 0.5 == pytest.approx(expected, rel=1e-3) and expected > 1e-4
    assert others == [[0.0, 0.0], [0.0, 0.0]]
