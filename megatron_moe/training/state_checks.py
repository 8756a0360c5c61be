"""Checks of a run's state: weights, moments, expert_bias and gradients are finite and have the right dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe import platform
from megatron_moe.checkpoint.errors import all_gather_object
from megatron_moe.checkpoint.state import TrainState
from megatron_moe.config.schema import Run
from megatron_moe.io.texts import listed
from megatron_moe.model.float16_module import model_dtypes, without_wrappers
from megatron_moe.model.fully_sharded import local
from megatron_moe.moe.router import TopKRouter
from megatron_moe.optim.optimizer import named_optimizer_state
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.platform.protocols import EngineOptimizer
from megatron_moe.precision.contract import PrecisionGuard, TensorDtype
from megatron_moe.precision.packed_state import NOT_FINITE, stored_dtype

_LAYER = re.compile(r"decoder\.layers\.\d+$")
RANKS_SHOWN = 4


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element of the tensor is finite, or what it stores is: see `NOT_FINITE`."""
    if tensor.dtype == torch.int8:
        return not bool((tensor == NOT_FINITE).any())
    if tensor.dtype.itemsize == 1 or not tensor.is_floating_point():
        return True
    return bool(tensor.detach().isfinite().all())


def non_finite_text(tensor: Tensor) -> str:
    """Return which elements of a tensor are not finite, such as `NaN in 3 of 4096 elements`."""
    if tensor.dtype == torch.int8:
        return f"{int((tensor == NOT_FINITE).sum())} of {tensor.numel()} groups that are not finite"
    kinds, total = [], 0
    for kind, found in (("NaN", tensor.isnan()), ("+Inf", tensor == torch.inf), ("-Inf", tensor == -torch.inf)):
        count = int(found.sum())
        total += count
        if count:
            kinds.append(kind)
    return f"{' and '.join(kinds)} in {total} of {tensor.numel()} elements"


def global_names(chunk: torch.nn.Module) -> dict[str, str]:
    """Map the names of a chunk's modules and parameters to names with layers numbered from 0 over the whole model."""
    layers: dict[str, str] = {}
    for name, module in chunk.named_modules():
        number = getattr(module, "layer_number", None)
        if _LAYER.search(name) and isinstance(number, int):
            layers[name] = re.sub(r"\d+$", str(number - 1), without_wrappers(name))
    found: dict[str, str] = {}
    for name, _ in (*chunk.named_modules(), *chunk.named_parameters()):
        found[name] = without_wrappers(name)
        for layer, shown in layers.items():
            if name == layer or name.startswith(layer + "."):
                found[name] = shown + name[len(layer) :]
                break
    return found


def named_expert_biases(chunk: torch.nn.Module, shown: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the expert_bias of a chunk's routers with the router's global name. shown: of `global_names`."""
    for name, module in chunk.named_modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            yield shown[name], module.expert_bias


def non_finite_state(trained: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield what is not finite of this rank's weights, averages, moments and expert_bias, with its name."""
    owners: dict[int, str] = {}
    for chunk in trained.model:
        shown = global_names(chunk)
        for name, bias in named_expert_biases(chunk, shown):
            if not is_finite(bias):
                yield f"expert_bias of {name}", bias
        for name, parameter in chunk.named_parameters():
            owners[id(parameter)] = shown[name]
            if not is_finite(local(parameter)):
                yield f"the weight {shown[name]}", local(parameter)
    for parameter, kind, tensor in named_optimizer_state(trained.model, trained.optimizer):
        is_the_weight = kind == "main param" and tensor.dtype == parameter.dtype
        if not is_the_weight and not is_finite(tensor):
            yield f"the {kind} of {owners[id(parameter)]}", tensor
    if trained.average is not None:
        for average in trained.average.weights:
            if not is_finite(average.values):
                yield f"the average of {owners[id(average.parameter)]}", average.values


def damage_on_ranks(trained: TrainState, place: RankFacts) -> str | None:
    """Return, on every rank, which state of which ranks is not finite; None if all is. Collective over all ranks."""
    own = [f"{what} holds {non_finite_text(tensor)}" for what, tensor in non_finite_state(trained)]
    found = torch.tensor(len(own), device=platform.device())
    dist.all_reduce(found)
    if not int(found):
        return None
    return damage_text(all_gather_object((str(place), own)))


def damage_text(state_of_ranks: Sequence[tuple[str, list[str]]]) -> str:
    """Return the first of all damaged tensors, how many more there are, and the ranks, as one sentence."""
    ranks, found = zip(*((rank, names) for rank, names in state_of_ranks if names))
    more = sum(map(len, found)) - 1
    what = found[0][0]
    if more:
        what += f" (and {more} more)"
    return f"{what}, on {listed(ranks, RANKS_SHOWN, 'more ranks')}"


def check_precision(guard: PrecisionGuard, boundary: str, run: Run, trained: TrainState) -> int:
    """Check every dtype of this rank's model and optimizer; a few milliseconds, no arithmetic on any tensor.

    guard: remembers the `boundary`, a point of the run, where all is right. Returns how many tensors were checked.

    Raises:
        PrecisionError: see `PrecisionGuard.check`. On this rank only: the launcher ends the others.
    """
    of_optimizer = optimizer_dtypes(run, trained.model, trained.optimizer)
    return guard.check(boundary, chain(model_dtypes(run, trained.model), of_optimizer))


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
