"""megatron-core's `parallel_state`, which keeps the process groups in globals for its schedules and optimizers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_moe.engine.patching import replaced


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
