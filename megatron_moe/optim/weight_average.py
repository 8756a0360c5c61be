"""The exponential moving average of the main weights, with `--ema-decay`.

It follows each committed step in fp32: average + (1 - decay) x (weight - average). It begins with the weights
that a run starts from, and a checkpoint has it as `optimizer.state.ema` of each weight (`checkpoint/sharded.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from megatron_moe.engine.optimizer import OwnedPart, named_main_params, owned_part
from megatron_moe.optim.adam import PrecisionAwareAdam
from megatron_moe.optim.optimizer import optimizer_state, packing_adam
from megatron_moe.platform import host_memory
from megatron_moe.platform.protocols import EngineOptimizer

_PIECE = 2**24
"""Elements that are averaged at once where weights are packed or the average is in host memory."""


@dataclass(frozen=True)
class AveragedWeight:
    """The average of what this rank updates of a weight.

    part: the part of the parameter. main: its main param. packed_by: what has it packed; None: it has its values.
    values: fp32, of the main's shape.
    """

    parameter: torch.nn.Parameter
    part: OwnedPart
    main: Tensor
    packed_by: PrecisionAwareAdam | None
    values: Tensor


class WeightAverage:
    """The averages of all main weights that this rank updates, on the device or in host memory, as their moments."""

    def __init__(self, decay: float, model: Sequence[torch.nn.Module], optimizer: EngineOptimizer) -> None:
        self.decay = decay
        state = optimizer_state(optimizer)
        self.weights: list[AveragedWeight] = []
        for parameter, main in named_main_params(model, optimizer):
            if state[main]["exp_avg"].device == main.device:
                values = torch.empty(main.shape, dtype=torch.float32, device=main.device)
            else:
                values = host_memory(tuple(main.shape), torch.float32, pinned=True)
            adam = packing_adam(optimizer, main)
            self.weights.append(AveragedWeight(parameter, owned_part(optimizer, parameter), main, adam, values))
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Make the average the present weights."""
        for target, near in chain.from_iterable(map(_pieces, self.weights)):
            target.copy_(near)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights of a committed step.

        Not as decay x average + (1 - decay) x weight: fp32 has no number for most decays near 1, the two factors would
        not add up to 1, and an average over many steps would be off by parts in ten thousand at 0.9999.
        """
        for target, near in chain.from_iterable(map(_pieces, self.weights)):
            target.lerp_(near, 1.0 - self.decay)


def _pieces(weight: AveragedWeight) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of the average with the weight's fp32 values, where the average is."""
    values, adam = weight.values.view(-1), weight.packed_by
    if adam is None and weight.main.device == values.device:
        yield values, weight.main.detach().view(-1)
        return
    for begin in range(0, values.numel(), _PIECE):
        end = min(begin + _PIECE, values.numel())
        if adam is None:
            near = weight.main.detach().view(-1)[begin:end]
        else:
            near = adam.values_of(weight.main, "param", begin, end)
        yield values[begin:end], near.to(values.device)
