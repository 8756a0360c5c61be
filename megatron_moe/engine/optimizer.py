"""megatron-core's optimizers: their types, and what is changed in one that the engine has built.

The engine builds one optimizer for the dense parameters and one for the experts and chains them. All that is said here
of "each release" holds for 0.16.1 and 0.19.2. A patch stays until its test in `tests/engine` says that the engine no
longer needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from megatron.core import optimizer as engine_optimizer
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_moe.engine.fully_shard import own_range
from megatron_moe.engine.patching import replaced
from megatron_moe.platform.protocols import EngineOptimizer, OptimizerPart


def parts(optimizer: EngineOptimizer) -> list[Any]:
    """Return the engine's optimizers in a chain, or the one optimizer there is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


# ---- While the engine builds them.


def adam_class(kind: Callable[..., torch.optim.Optimizer] | None) -> AbstractContextManager[None]:
    """Return a block in which the engine builds this Adam; None: the one that it has chosen.

    `get_megatron_optimizer` in each release takes no class: it looks `Adam` up in its module. Until it takes
    one.
    """
    return replaced([] if kind is None else [engine_optimizer], Adam=kind)


def cpu_shards_accepted(shards: Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
    """Return a block in which the half-precision optimizer takes fp32 shards in host memory for weights of a GPU.

    It sorts weights by `param.type()` when it is built, in each release, and refuses what is of no GPU; it never asks
    again. Until it takes fp32 shards of any device.
    """
    return replaced(shards, type=lambda: "torch.cuda.FloatTensor")


# ---- Once they are built.


def adapt_to_fully_sharded(part: OptimizerPart) -> None:
    """Let an optimizer update shards of a fully sharded model, of which each element is on one data-parallel rank.

    The norm is summed over all ranks. In fp16 the engine, in each release, would copy main params to the model's by a
    kernel of Transformer Engine or apex. There are no such copies here, and those kernels refuse empty lists; without
    this buffer torch copies nothing. Until those kernels take empty lists.
    """
    part.grad_stats_parallel_group = torch.distributed.group.WORLD
    part._dummy_overflow_buf = None


def settle_positions(part: OptimizerPart) -> None:
    """Correct the positions that a distributed optimizer has recorded for its parameters.

    In each release it puts the fp32 parameters of a group before those with an fp32 copy, and looks them up in the
    order of its buffers. In a model of two dtypes these differ, and a checkpoint would get one weight's state under
    another's name. Until defect N2 is repaired.
    """
    for index, groups in enumerate(
        zip(getattr(part, "model_fp32_groups", ()), getattr(part, "model_float16_groups", ()))
    ):
        for order, param in enumerate(param for group in groups for param in group):
            part.model_param_group_index_map[param] = (index, order)


def set_loss_scale(part: OptimizerPart, scale: object) -> None:
    """Give an optimizer another object for its loss scale: in each release every part of a chain makes its own.

    Until a chain has one scale.
    """
    part.grad_scaler = scale


def leave_copies_to(part: OptimizerPart, take_model_params: Callable[..., None]) -> None:
    """Have an optimizer copy no main params to the model's: the update itself writes both.

    Needed as long as the engine, in each release, keeps whole fp32 main params beside weights of bf16.
    `take_model_params` is called in place of the copy in the other direction.
    """
    part._copy_main_params_to_model_params = _no_copy
    part._copy_model_params_to_main_params = take_model_params


def _no_copy() -> None:
    """Copy nothing."""


def half_precision_pairs(part: OptimizerPart) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each half-precision weight that an optimizer updates, or this rank's shard of it, with its main param."""
    names = ("shard_float16_groups", "shard_fp32_from_float16_groups")
    if not hasattr(part, names[0]):
        names = ("float16_groups", "fp32_from_float16_groups")
    for weights, mains in zip(getattr(part, names[0], ()), getattr(part, names[1], ())):
        yield from zip(weights, mains)


def fp32_shards(part: OptimizerPart) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
    """Yield each shard of an fp32 weight, which does not know whose it is, with its weight."""
    for weights, shards in zip(getattr(part, "model_fp32_groups", ()), getattr(part, "shard_fp32_groups", ())):
        yield from zip(shards, weights)


class OwnedPart(NamedTuple):
    """A range of a weight along an axis, or of all its elements in their order where the axis is None."""

    axis: int | None
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a contiguous tensor of the weight's shape, in the same memory."""
        if self.axis is None:
            return tensor.view(-1)[self.begin : self.end]
        return tensor.narrow(self.axis, self.begin, self.end - self.begin)


def owned_part(optimizer: EngineOptimizer, parameter: torch.nn.Parameter) -> OwnedPart:
    """Return the part of a parameter whose reduced gradient this rank has, and which it updates.

    It is the whole parameter; with a distributed optimizer or in a fully sharded model it is the rank's shard, which
    may be empty.
    """
    if isinstance(parameter, DTensor):
        return OwnedPart(*own_range(parameter))
    sharded = [part for part in parts(optimizer) if hasattr(part, "model_param_gbuf_map")]
    for part in sharded:
        if parameter in part.model_param_gbuf_map:
            owned = part._get_model_param_range_map(parameter)["param"]
            return OwnedPart(None, owned.start, owned.end)
    return OwnedPart(None, 0, 0 if sharded else parameter.numel())


def named_main_params(
    model: Sequence[torch.nn.Module], optimizer: EngineOptimizer
) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield each main param that this rank updates with its model parameter; a packed one has no values."""
    owners: dict[int, torch.nn.Parameter] = {}
    for chunk in model:
        for parameter in chunk.parameters():
            # An fp32 parameter is its own main; under the distributed optimizer a rank has mains of its shard only.
            main = getattr(parameter, "main_param", None)
            owners[id(parameter if main is None else main)] = parameter
    for part in parts(optimizer):
        if part.is_stub_optimizer:
            continue
        for shard, parameter in fp32_shards(part):
            owners[id(shard)] = parameter
        for main in part.get_parameters():
            yield owners[id(main)], main
