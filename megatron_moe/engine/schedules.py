"""The engine's schedules of micro-batches, and the configuration and process groups that they read.

The schedules take what they call from the model's configuration, which all chunks and the modules within share. What is
set there stays set (`configure`), or is set for a block (`configured`). Process groups are in `parallel_state`, which
keeps them in globals.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_moe.engine.patching import replaced


def configure(model: Sequence[torch.nn.Module], **values: Any) -> None:
    """Set entries of the engine's configuration of each chunk, wrapped or not, from now on."""
    for chunk in model:
        config = get_model_config(chunk)
        for name, value in values.items():
            setattr(config, name, value)


def configured(model: Sequence[torch.nn.Module], **values: Any) -> AbstractContextManager[None]:
    """Return a block in which the engine's configuration of each chunk, wrapped or not, has these entries."""
    return replaced([get_model_config(chunk) for chunk in model], **values)


def configured_in_fp32(model: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Return a block in which modules, and the messages between pipeline stages, have fp32 for the model's dtype."""
    configs = {}
    for chunk in model:
        for part in chunk.modules():
            config = getattr(part, "config", None)
            if hasattr(config, "pipeline_dtype"):
                configs[id(config)] = config
    return replaced(configs.values(), params_dtype=torch.float32, pipeline_dtype=torch.float32)


def gradients_kept_on_their_ranks(wrappers: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a block in which the engine's DistributedDataParallel reduces nothing, also with overlapped reductions.

    A bucket group starts its reduction in the micro-batch that it takes for the last one; the schedules tell it which
    by `no_sync`, and without it every micro-batch is the last.
    """
    groups = [group for chunk in wrappers for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    return replaced(groups, is_last_microbatch=False)


_loss_scales: dict[torch.device, torch.Tensor] = {}


def without_loss_scale(device: torch.device | None = None) -> AbstractContextManager[None]:
    """Return a block that runs as if no step had set a scale of auxiliary losses yet; the scale is restored afterwards.

    It is a class attribute of the engine, in all releases, and outlives models and process groups.

    Args:
        device: where the scale of the block is kept, which is 1 until a schedule writes into it, and at one address in
            all blocks of a process: captured graphs read it there. None: there is no scale.
    """
    scale = None
    if device is not None:
        scale = _loss_scales.setdefault(device, torch.ones(1, device=device)).fill_(1)
    return replaced([MoEAuxLossAutoScaler], main_loss_backward_scale=scale)


def groups_of_one_rank(rank: int) -> AbstractContextManager[None]:
    """Return a block in which `initialize_model_parallel` creates only the groups that a rank is in.

    The engine, in all releases, creates every group of every rank: thousands in a large run, of which a rank is in a
    dozen. That is too slow where one process lays out a run without running it.
    """
    return replaced([parallel_state], generate_masked_orthogonal_rank_groups=functools.partial(_own_group, rank))


def _own_group(rank: int, world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """Return, of the engine's groups of the dimensions in `mask`, the one with `rank` in it.

    Ranks count up along the first dimension first; `parallel_size` has the size of each.
    """
    first, offsets, stride = rank, [0], 1
    for size, masked in zip(parallel_size, mask):
        if masked:
            first -= rank // stride % size * stride
            offsets = [offset + index * stride for index in range(size) for offset in offsets]
        stride *= size
    return [[first + offset for offset in offsets]]
