"""megatron-core's optimizers: their types, and what is changed in one that the engine has built.

The engine builds one optimizer for the dense parameters and one for the experts and chains them. All that is said here
of "each release" holds for 0.16.1 and 0.19.2. A patch stays until its test in `tests/engine` says that the engine no
longer needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import optimizer as engine_optimizer
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

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


def owned_elements(optimizer: EngineOptimizer, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return the first and the last + 1 element of a parameter that this rank updates; all without sharding."""
    sharded = [part for part in parts(optimizer) if hasattr(part, "model_param_gbuf_map")]
    for part in sharded:
        if parameter in part.model_param_gbuf_map:
            owned = part._get_model_param_range_map(parameter)["param"]
            return owned.start, owned.end
    return 0, 0 if sharded else parameter.numel()


# ---- While a checkpoint is written or read.


@contextmanager
def compact_buckets(optimizer: EngineOptimizer) -> Iterator[None]:
    """Make the engine slice its gathered buffers at the real positions of the parameters in the block.

    A distributed optimizer, in each release, joins its gradient buckets without their padding and then looks each
    parameter up by its position with the padding. With more than one padded bucket every parameter behind the first
    would be saved shifted. Until NVIDIA/Megatron-LM PR #5077 is in a release.
    """
    with ExitStack() as stack:
        for part in parts(optimizer):
            for buffer in getattr(part, "buffers", None) or []:
                removed, before = [], 0  # padding before each bucket
                for bucket in buffer.buckets:
                    removed.append(before)
                    before += bucket.grad_data.numel() - bucket.numel_unpadded
                positions = {}
                for param, (start, end, number) in buffer.param_index_map.items():
                    positions[param] = (start - removed[number], end - removed[number], number)
                stack.enter_context(replaced([buffer], param_index_map=positions))
        yield


@contextmanager
def every_main_param(optimizer: EngineOptimizer) -> Iterator[None]:
    """Make the engine count fp32 parameters among those that have an fp32 main param in the block: themselves.

    The optimizer that is not distributed, in each release, numbers the parameters of a checkpoint without the fp32
    ones, while its moments are numbered with them: in a model of two dtypes one weight's moments would be saved under
    another's name. The distributed one saves a main param for every parameter anyway, so both formats hold the same.
    Until the engine numbers both alike.
    """
    with ExitStack() as stack:
        for part in parts(optimizer):
            # Only this kind of optimizer has the attribute, and without fp32 parameters there is nothing to correct.
            if not any(getattr(part, "fp32_from_fp32_groups", ())):
                continue
            of_main = {id(main): model for model, main in half_precision_pairs(part)}
            mains = [list(group["params"]) for group in part.optimizer.param_groups]
            models = [[of_main.get(id(main), main) for main in group] for group in mains]
            stack.enter_context(replaced([part], float16_groups=models, fp32_from_float16_groups=mains))
        yield


def gathered_by(part: OptimizerPart, gather: Callable[..., dict[Any, Any]]) -> AbstractContextManager[None]:
    """Return a block in which a distributed optimizer gathers its state by this function.

    Its own, in each release, gathers whole buffers on the device and makes new host memory at every save. Until it
    gathers in pieces, into memory that is kept.
    """
    return replaced([part], get_parameter_state_dp_zero=gather)
