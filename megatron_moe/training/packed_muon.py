"""Muon whose state is stored in fewer bytes, or in host memory, as that of `PrecisionAwareAdam` is.

A momentum is unpacked, updated and rounded like a first moment, with the same random numbers on every layout; what is
orthogonalized is not rounded. A packed main weight has the bits of one in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_moe.precision.contract import mixes_dtypes
from megatron_moe.precision.packed_state import (
    AdamState,
    AdamStep,
    Chances,
    pack_main,
    unpacked_main,
    unpacked_moment,
)
from megatron_moe.training.muon import Muon
from megatron_moe.training.precision_aware_adam import MOMENTS, PrecisionAwareAdam, adam_update, pieces


class PackedMuon(Muon, PrecisionAwareAdam):
    """An AdamW of the precision-aware form that leaves some weights to Muon.

    state: see `PrecisionAwareAdam`; a matrix has no second moment.
    """

    allocate = PrecisionAwareAdam.allocate
    unpacked = PrecisionAwareAdam.unpacked

    def moments_of(self, param: Tensor) -> tuple[str, ...]:
        """Return the moments that a weight has: of a matrix the momentum alone."""
        return MOMENTS[:1] if param in self.matrices else MOMENTS

    @torch.no_grad()
    def add_gradients(self, beta: float, *, nesterov: bool) -> None:
        """Add the gradients of matrices to their momenta, and put what is orthogonalized in the gradients' places."""
        for group in self.param_groups:
            for param in self._matrices_in(group):
                grad, chances = param.grad.view(-1), self._chances(param, group)
                momentum = self._stored(param)._replace(weight=None, rest=None, ties=None)
                for begin, end, near in self._near(momentum, param):
                    _add_packed(grad[begin:end], near, beta, nesterov, None if chances is None else chances.at(begin))

    def _update_matrices(self, updated: list[Any], keep: float, rate: float) -> None:
        for param in updated:
            update = param.grad.view(-1)
            for begin, end, near in self._near(self._main_alone(param), param):
                _update_packed(update[begin:end], near, keep, rate)

    def _finish(self, param: Tensor) -> None:
        if param not in self._weights:
            return super()._finish(param)
        main = self.main_weight(param)
        self.after_update[param](main)
        for begin, end, near in self._near(self._main_alone(param), param):
            _pack_mains(main.view(-1)[begin:end], near)

    def _main_alone(self, param: Tensor) -> AdamState:
        """Return what is stored of a main weight, without its moments."""
        none = self._no_moment(param)
        return self._stored(param)._replace(moments=(none, none), exponents=(None, None))


@mixes_dtypes("a momentum that is stored in fewer bytes is unpacked to fp32, updated, and packed")
def _add_packed(grad: Tensor, state: AdamState, beta: float, nesterov: bool, chances: Chances | None) -> None:
    """Add a gradient, fp32 [n], to a first moment, and put what is orthogonalized of them in its place.

    What is stored is updated by AdamW's kernel, which computes the same mean, as that of weights that do not move.
    """
    step = AdamStep(lr=0.0, betas=(beta, 0.0), eps=1.0, weight_decay=0.0, number=1)
    weights = second = grad[:0]
    for begin, end in pieces(grad.numel(), grad):
        piece, part = grad[begin:end], state.part(begin, end)
        stored, exponents = part.moments[0], part.exponents[0]
        momentum = unpacked_moment(stored, exponents).lerp_(piece, 1 - beta)
        if stored.dtype != torch.float32:
            if not begin:
                weights, second = torch.zeros_like(piece), torch.zeros_like(piece)
            moments = stored, second[: end - begin]
            still = AdamState(weights[: end - begin], None, None, None, moments, (exponents, None))
            adam_update([piece], [still], step, None if chances is None else [chances.at(begin)])
        if nesterov:
            piece.lerp_(momentum, beta)
        else:
            piece.copy_(momentum)


@mixes_dtypes("main weights that are stored in fewer bytes are unpacked to fp32, updated, and packed")
def _update_packed(update: Tensor, state: AdamState, keep: float, rate: float) -> None:
    """Multiply main weights by `keep`, and subtract `rate` times an update, fp32 [n]."""
    for begin, end in pieces(update.numel(), update):
        part = state.part(begin, end)
        main = unpacked_main(part) if part.main is None else part.main
        main.mul_(keep).add_(update[begin:end], alpha=-rate)
        if part.main is None:
            pack_main(main, part)


@mixes_dtypes("main weights in fp32 are packed")
def _pack_mains(main: Tensor, state: AdamState) -> None:
    for begin, end in pieces(main.numel(), main):
        pack_main(main[begin:end], state.part(begin, end))
