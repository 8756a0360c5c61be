"""The precision contract checked on everything that a run holds: model, gradients, optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron_moe.checkpoint.state import Trained
from megatron_moe.config.schema import Run
from megatron_moe.model.held import held_by_model, without_wrappers
from megatron_moe.precision.guard import Held, PrecisionGuard
from megatron_moe.training.optimizer import named_moments_and_masters


def check_precision(guard: PrecisionGuard, boundary: str, run: Run, trained: Trained) -> int:
    """Check every dtype of this rank's model and optimizer; a few milliseconds, no arithmetic on any tensor.

    Args:
        guard: remembers the boundaries at which all was right.
        boundary: where the run stands, for messages.

    Returns:
        How many tensors were checked.

    Raises:
        PrecisionError: see `PrecisionGuard.check`. On this rank only: the launcher ends the others.
    """

    def all_tensors() -> Iterator[Held]:
        yield from held_by_model(run, trained.model)
        yield from held_by_optimizer(trained.model, trained.optimizer)

    return guard.check(boundary, all_tensors())


def held_by_optimizer(model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[Held]:
    """The weights that the optimizer updates and their moments, all fp32, named for the model's parameters."""
    names = {id(p): without_wrappers(name) for chunk in model for name, p in chunk.named_parameters()}
    for parameter, kind, tensor in named_moments_and_masters(model, optimizer):
        yield Held(names[id(parameter)], kind, tensor.dtype, torch.float32)
