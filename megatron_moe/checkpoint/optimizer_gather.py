"""A distributed optimizer's shards, gathered for a step into memory that is used again.

The engine copies every shard four times and gathers all of them on every rank of a data-parallel group, of which one
writes them; in every kind of save the training waits for that. Here each shard is copied once, to where it is written
from, and goes to that rank alone. What the engine makes of it, names and shapes, stays the engine's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe import platform

Buffers = dict[Any, torch.Tensor]
Copy = tuple[torch.Tensor, torch.Tensor]
"""A target and the tensor that is to be copied there."""


@dataclass
class Gathered:
    """Storages, by address, of the tensors that a state dict got from here.

    private: no part of the training has them: they need not be copied before it goes on. absent: of ranks that do not
    write: nothing is in them. rest: what is left to copy into them.
    """

    private: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)
    rest: list[Copy] = field(default_factory=list)


@contextmanager
def into(optimizer: Any, buffers: Buffers, *, later: bool) -> Iterator[Gathered]:
    """While a state dict is built, distributed optimizers gather into `buffers`, which are made where they are missing.

    They hold the state until the next time. With `later`, what needs no other rank is left to be copied.
    """
    gathered = Gathered()
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    parts = [part for part in chain if hasattr(part, "get_parameter_state_dp_zero")]
    # The engine collects garbage behind each optimizer, which takes the longer the more objects there are.
    gc.freeze()
    try:
        for number, part in enumerate(parts):
            part.get_parameter_state_dp_zero = _gathering(part, number, buffers, gathered, later)
        yield gathered
    finally:
        gc.unfreeze()
        for part in parts:
            del part.get_parameter_state_dp_zero


def _gathering(
    part: Any, number: int, buffers: Buffers, gathered: Gathered, later: bool
) -> Callable[..., dict[Any, Any]]:
    """What takes the place of the engine's `DistributedOptimizer.get_parameter_state_dp_zero`: the same result."""

    def gather(*_: Any, empty_data: bool = False, **__: Any) -> dict[Any, Any]:
        assert not empty_data, "this is for saving"
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, ranges in enumerate(part.gbuf_ranges):
            ((dtype, bucket_ranges),) = ranges.items()
            state[index] = {dtype: _whole_buffer(part, (number, index), bucket_ranges, buffers, gathered, later)}
        return state

    return gather


@torch.no_grad()
def _whole_buffer(
    part: Any, name: Any, bucket_ranges: Any, buffers: Buffers, gathered: Gathered, later: bool
) -> dict[str, Any]:
    """Main weights and moments of one gradient buffer without the padding of its buckets: fp32, [numel_unpadded]."""
    buffer, group = part.buffers[name[1]], part.data_parallel_group
    keys = ("param", *getattr(part, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))
    size, rank, host = group.size(), group.rank(), torch.device("cpu")
    first = dist.get_global_rank(group, 0)
    whole: dict[str, Any] = {"numel_unpadded": buffer.numel_unpadded}
    for key in keys:
        if rank == 0:
            whole[key] = _reused(buffers, (*name, key), buffer.numel_unpadded, host)
            gathered.private.add(whole[key].data_ptr())
        else:
            whole[key] = torch.empty(buffer.numel_unpadded)  # its pages are never touched
            gathered.absent.add(whole[key].data_ptr())
    offset = 0
    for bucket, ranges in zip(buffer.buckets, bucket_ranges):
        used, of_rank = bucket.numel_unpadded, bucket.grad_data.numel() // size
        there = {key: whole[key][offset : offset + used] for key in keys}
        here = there
        if size > 1:
            here = {key: _reused(buffers, ("shard", key), of_rank, platform.device()) for key in keys}
        for weight, where in ranges["param_map"].items():
            tensors = part._get_main_param_and_optimizer_states(weight)
            for key in keys:
                copy = (here[key][where["gbuf_local"].start : where["gbuf_local"].end], tensors[key].view(-1))
                if later and size == 1:
                    gathered.rest.append(copy)
                else:
                    copy[0].copy_(copy[1])
        for key in keys if size > 1 else ():
            parts = None
            if rank == 0:
                together = _reused(buffers, "together", of_rank * size, platform.device())
                parts = list(together.chunk(size))
            dist.gather(here[key], parts, dst=first, group=group)
            if rank == 0:
                there[key].copy_(together[:used])
        offset += used
    return whole


def _reused(buffers: Buffers, name: Any, numel: int, device: torch.device) -> torch.Tensor:
    """fp32 memory of this name: [numel] of it, larger where it was larger before."""
    found = buffers.get(name)
    if found is None or found.numel() < numel:
        pinned = platform.has_cuda() and device.type == "cpu"
        buffers[name] = found = torch.empty(numel, dtype=torch.float32, device=device, pin_memory=pinned)
    return found[:numel]
