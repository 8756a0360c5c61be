"""Checks of a run's state: weights, moments, expert_bias and gradients are finite and have the right dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe import platform
from megatron_moe.checkpoint.state import TrainState
from megatron_moe.config.schema import Run
from megatron_moe.model.float16_module import model_dtypes, without_wrappers
from megatron_moe.model.fully_sharded import local
from megatron_moe.moe.router import routers
from megatron_moe.optim.optimizer import named_optimizer_state
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.platform.protocols import EngineOptimizer
from megatron_moe.precision.contract import PrecisionGuard, TensorDtype
from megatron_moe.precision.packed_state import NOT_FINITE, stored_dtype

_LAYER = re.compile(r"decoder\.layers\.\d+$")
_RANKS_SHOWN = 4


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element of the tensor is finite, or what it stores is: see `NOT_FINITE`."""
    if tensor.dtype == torch.int8:
        return not bool((tensor == NOT_FINITE).any())
    if tensor.dtype.itemsize == 1 or not tensor.is_floating_point():
        return True
    return bool(tensor.detach().isfinite().all())


def non_finite_text(tensor: Tensor) -> str:
    """Return which elements of a tensor are not finite, such as `NaN in 3 of 4096 elements`."""
    nan, positive, negative = (
        int(found.sum()) for found in (tensor.isnan(), tensor == torch.inf, tensor == -torch.inf)
    )
    if tensor.dtype == torch.int8:
        return f"{int((tensor == NOT_FINITE).sum())} of {tensor.numel()} groups that are not finite"
    counts = {"NaN": nan, "+Inf": positive, "-Inf": negative}
    kinds = [kind for kind, count in counts.items() if count]
    return f"{' and '.join(kinds)} in {sum(counts.values())} of {tensor.numel()} elements"


def global_names(chunk: torch.nn.Module) -> dict[str, str]:
    """Map the names of a chunk's modules and parameters to names with layers numbered from 0 over the whole model."""
    numbers = {
        name: re.sub(r"\d+$", str(module.layer_number - 1), without_wrappers(name))  # type: ignore[operator]
        for name, module in chunk.named_modules()
        if _LAYER.search(name) and isinstance(getattr(module, "layer_number", None), int)
    }

    def renamed(name: str) -> str:
        for layer, shown in numbers.items():
            if name == layer or name.startswith(layer + "."):
                return shown + name[len(layer) :]
        return without_wrappers(name)

    names = [name for name, _ in (*chunk.named_modules(), *chunk.named_parameters())]
    return {name: renamed(name) for name in names}


def non_finite_state(trained: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield what is not finite of this rank's weights, averages, moments and expert_bias, with its name."""
    owners: dict[int, str] = {}
    for chunk in trained.model:
        shown = global_names(chunk)
        modules = {id(module): shown[name] for name, module in chunk.named_modules()}
        for router in routers([chunk]):
            if router.expert_bias is not None and not is_finite(router.expert_bias):
                yield f"expert_bias of {modules[id(router)]}", router.expert_bias
        for name, parameter in chunk.named_parameters():
            owners[id(parameter)] = shown[name]
            if not is_finite(local(parameter)):
                yield f"the weight {shown[name]}", local(parameter)
    for parameter, kind, tensor in named_optimizer_state(trained.model, trained.optimizer):
        is_the_weight = kind == "main param" and tensor.dtype == parameter.dtype
        if not is_the_weight and not is_finite(tensor):
            yield f"the {kind} of {owners[id(parameter)]}", tensor
    for average in () if trained.average is None else trained.average.weights:
        if not is_finite(average.values):
            yield f"the average of {owners[id(average.parameter)]}", average.values


def non_finite_gradients(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's gradient buffers that are not finite, with their names."""
    for chunk in model:
        shown = global_names(chunk)
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not is_finite(gradient):
                yield f"the gradient of {shown[name]}", gradient


def damage_on_ranks(trained: TrainState, place: RankFacts) -> str | None:
    """Return, on every rank, which state of which ranks is not finite; None if all is. Collective over all ranks."""
    own = [f"{what} holds {non_finite_text(tensor)}" for what, tensor in non_finite_state(trained)]
    found = torch.tensor(len(own), device=platform.device())
    dist.all_reduce(found)
    if not int(found):
        return None
    gathered: list[Any] = [None] * place.world_size
    dist.all_gather_object(gathered, (str(place), own))
    return damage_text(gathered)


def damage_text(state_of_ranks: Sequence[tuple[str, list[str]]]) -> str:
    """Return the first of all damaged tensors, how many more there are, and the ranks, as one sentence."""
    damaged = [(rank, names) for rank, names in state_of_ranks if names]
    more = sum(len(names) for _, names in damaged) - 1
    others = f" (and {more} more)" if more else ""
    return f"{damaged[0][1][0]}{others}, on {ranks_text([rank for rank, _ in damaged])}"


def ranks_text(ranks: Sequence[str]) -> str:
    """Return the first ranks by name, and the number of the others."""
    more = f" and {len(ranks) - _RANKS_SHOWN} more ranks" if len(ranks) > _RANKS_SHOWN else ""
    return ", ".join(ranks[:_RANKS_SHOWN]) + more


def check_precision(guard: PrecisionGuard, boundary: str, run: Run, trained: TrainState) -> int:
    """Check every dtype of this rank's model and optimizer; a few milliseconds, no arithmetic on any tensor.

    Args:
        guard: remembers the boundaries at which all was right.
        boundary: the point of the run at which the check is made, for messages.

    Returns:
        How many tensors were checked.

    Raises:
        PrecisionError: see `PrecisionGuard.check`. On this rank only: the launcher ends the others.
    """

    def all_tensors() -> Iterator[TensorDtype]:
        yield from model_dtypes(run, trained.model)
        yield from optimizer_dtypes(run, trained.model, trained.optimizer)

    return guard.check(boundary, all_tensors())


def optimizer_dtypes(run: Run, model: Sequence[torch.nn.Module], optimizer: EngineOptimizer) -> Iterator[TensorDtype]:
    """Yield the weights that the optimizer updates and their moments, named for the model's parameters."""
    options = run.optimizer
    wanted = {
        "exp_avg": stored_dtype(options.exp_avg_dtype, second=False),
        "exp_avg_sq": stored_dtype(options.exp_avg_sq_dtype, second=True),
        "exp_avg_exponents": torch.int8,
        "exp_avg_sq_exponents": torch.int8,
        "low_bits": torch.int16,
        "carry_bits": torch.uint8,
    }
    names = {id(p): without_wrappers(name) for chunk in model for name, p in chunk.named_parameters()}
    for parameter, kind, tensor in named_optimizer_state(model, optimizer):
        contract = wanted.get(kind, torch.float32)
        if kind == "main param" and run.derived.packs_main_weights and parameter.dtype == torch.bfloat16:
            contract = wanted["low_bits"]  # it has no main param by itself
        yield TensorDtype(names[id(parameter)], kind, tensor.dtype, contract)
