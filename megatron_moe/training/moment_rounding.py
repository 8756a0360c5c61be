"""How far stored moments are from those that were computed, on a sample of the elements in one step of the optimizer.

A moment that is stored in fewer bytes than fp32 is rounded at random, so that it is right on average. What one step
adds to it, and to the update that these moments would make, is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.precision.packed_state import GROUP, AdamStep
from megatron_moe.training.optimizer import parts
from megatron_moe.training.precision_aware_adam import MOMENTS, PrecisionAwareAdam

SAMPLE = 8 * GROUP
"""Elements of each weight, from the middle of what a rank updates of it."""


class _Sample(NamedTuple):
    """Elements `begin` to `end` of a weight, and the moments that a step makes of them, fp32 [end - begin] each."""

    adam: PrecisionAwareAdam
    param: Tensor
    begin: int
    end: int
    moments: tuple[Tensor, ...]
    step: AdamStep


class MomentRounding:
    """Measures the moments of one step.

    sums: fp64 [3, 2] on the device, of this rank: of the first moment, of the second one's root, by which an update is
    divided, and of AdamW's update, the squares of what rounding changed and those of the values. Zeros of moments that
    are not rounded.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(3, 2, dtype=torch.float64, device=platform.device())

    @contextmanager
    @torch.no_grad()
    def watching(self, optimizer: Any) -> Iterator[None]:
        """Compare what the block's step stores with what it computes of the gradients, which are clipped already."""
        samples = list(_samples(optimizer))
        yield
        for sample in samples:
            self._add(sample)

    def _add(self, sample: _Sample) -> None:
        adam, param, begin, end, computed, step = sample
        stored = tuple(adam.values_of(param, name, begin, end) for name in adam.moments_of(param))
        for number, (one, other) in enumerate(zip(stored, computed)):
            if adam.state[param][MOMENTS[number]].dtype != torch.float32:
                self._count(number, *(moment.sqrt() if number else moment for moment in (one, other)))
        if len(computed) == len(MOMENTS):
            self._count(2, _update(stored, step), _update(computed, step))

    def _count(self, row: int, stored: Tensor, computed: Tensor) -> None:
        exact = computed.double()
        self.sums[row] += torch.stack([(stored.double() - exact).square().sum(), exact.square().sum()])


def _samples(optimizer: Any) -> Iterator[_Sample]:
    """Yield the samples of this rank's weights whose moments are rounded."""
    momentum = getattr(getattr(optimizer, "orthogonalizer", None), "momentum", 0.0)
    for part in parts(optimizer):
        adam = part.optimizer
        if part.is_stub_optimizer or not (isinstance(adam, PrecisionAwareAdam) and adam.draws):
            continue
        for group in adam.param_groups:
            step = AdamStep(group["lr"], group["betas"], group["eps"], group["weight_decay"], group["step"] + 1)
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    yield _sample(adam, param, step, momentum)


def _sample(adam: PrecisionAwareAdam, param: Any, step: AdamStep, momentum: float) -> _Sample:
    begin = max(param.numel() - SAMPLE, 0) // 2 // GROUP * GROUP
    end = min(begin + SAMPLE, param.numel())
    grad = param.grad.reshape(-1)[begin:end]
    old = [adam.values_of(param, name, begin, end) for name in adam.moments_of(param)]
    first_beta = step.betas[0] if len(old) == len(MOMENTS) else momentum  # a matrix of Muon has no second moment
    computed = [old[0].lerp(grad, 1 - first_beta)]
    computed += [second.lerp(grad.square(), 1 - step.betas[1]) for second in old[1:]]
    return _Sample(adam, param, begin, end, tuple(computed), step)


def _update(moments: tuple[Tensor, ...], step: AdamStep) -> Tensor:
    """Return the update that moments make, but for the learning rate, which all elements share."""
    first, second = moments
    return first / (second.sqrt() / step.factors()["root_correction"] + step.eps)
