"""Additions that rounding swallowed are counted, exactly, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from megatron_moe.training.callbacks.reporting import LostUpdates


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


def test_watching_changes_no_bit_and_ends_with_the_block() -> None:
    added = torch.randn(100, generator=torch.Generator().manual_seed(1)).bfloat16()
    watched, alone = added * 64, added * 64
    with LostUpdates([watched]) as lost:
        watched += added
    alone += added
    watched += added
    assert torch.equal(watched, alone + added)
    assert lost.counted(gradients=True)[0] == 100
