"""Gathering a distributed optimizer's shards for a save, into host memory of the rank that writes them.

The engine would copy every shard four times and gather all of them on every rank of a data-parallel group, of which one
writes them; in every kind of save the training waits for that. Here each shard goes to that rank alone, in pieces:
what a save takes on the device is bounded by `GATHERED_BYTES`, however large a bucket of the optimizer is, and is freed
at its end. Names and shapes in the state dict stay the engine's.
"""

from __future__ import annotations

import gc
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe import platform
from megatron_moe.engine.optimizer import gathered_by, parts
from megatron_moe.model.matrices import is_matrix

GATHERED_BYTES = 64 * 2**20
"""What one gather brings to the writer from all ranks together. Two are in turn, and so are the pieces sent."""

Buffers = dict[Any, torch.Tensor]
Copy = tuple[torch.Tensor, torch.Tensor]
"""A target and the tensor that is to be copied there."""


@dataclass
class Gathered:
    """The storages, by address, of the tensors that `into` put into a state dict.

    private: storages that the training does not use, so that they need not be copied before it goes on. absent:
    storages of ranks that do not write, which are not filled. rest: what is left to copy into the private ones.
    """

    private: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)
    rest: list[Copy] = field(default_factory=list)


@contextmanager
def into(optimizer: Any, buffers: Buffers, *, later: bool) -> Iterator[Gathered]:
    """Make distributed optimizers gather into `buffers` while a state dict is built in the block.

    Missing buffers are allocated, and hold the state until the next save. With `later`, copies that need no other rank
    are left to be made later (`Gathered.rest`), and the buffers are page-locked: they are worth it where they are kept.
    """
    gathered = Gathered()
    sharded = [part for part in parts(optimizer) if hasattr(part, "get_parameter_state_dp_zero")]
    # The engine collects garbage after each optimizer, which takes the longer the more objects there are. What somebody
    # has frozen before stays so: there is no freezing of some objects alone.
    freezing = bool(sharded) and not _frozen_by_the_program()
    if freezing:
        gc.freeze()
    try:
        with ExitStack() as stack:
            for number, part in enumerate(sharded):
                stack.enter_context(gathered_by(part, _gathering(part, number, buffers, gathered, later)))
            yield gathered
    finally:
        if freezing:
            gc.unfreeze()


_frozen_before: list[bool] = []


def _frozen_by_the_program() -> bool:
    """Return whether somebody else has frozen objects; where they did once it is taken to stay so.

    The collector goes through all of them to count them.
    """
    if not _frozen_before and gc.get_freeze_count():
        _frozen_before.append(True)
    return bool(_frozen_before)


def _gathering(
    part: Any, number: int, buffers: Buffers, gathered: Gathered, later: bool
) -> Callable[..., dict[Any, Any]]:
    """Return a replacement of the engine's `DistributedOptimizer.get_parameter_state_dp_zero` with the same result."""

    def gather(*_: object, empty_data: bool = False, **__: object) -> dict[Any, Any]:
        assert not empty_data, "this is for saving"
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, ranges in enumerate(part.gbuf_ranges):
            ((dtype, bucket_ranges),) = ranges.items()
            state[index] = {dtype: _whole_buffer(part, (number, index), bucket_ranges, buffers, gathered, later)}
        return state

    return gather


@torch.no_grad()
def _whole_buffer(
    part: Any, name: tuple[int, int], bucket_ranges: Any, buffers: Buffers, gathered: Gathered, later: bool
) -> dict[str, Any]:
    """Gather main weights and moments of one gradient buffer without its buckets' padding: fp32, [numel_unpadded]."""
    buffer, group = part.buffers[name[1]], part.data_parallel_group
    keys = ("param", *getattr(part, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))
    whole: dict[str, Any] = {"numel_unpadded": buffer.numel_unpadded}
    if all(is_matrix(weight) for weight in buffer.param_index_map):
        # Weights that Muon updates have no second moment, and none is saved.
        keys = tuple(key for key in keys if key != "exp_avg_sq")
        whole["exp_avg_sq"] = torch.zeros(()).expand(buffer.numel_unpadded)
        gathered.private.add(whole["exp_avg_sq"].data_ptr())
    for key in keys:
        if group.rank() == 0:
            whole[key] = _reused(buffers, (*name, key), buffer.numel_unpadded, pinned=later)
            gathered.private.add(whole[key].data_ptr())
        else:
            whole[key] = torch.empty(buffer.numel_unpadded)  # its pages are never touched
            gathered.absent.add(whole[key].data_ptr())
    offset = 0
    for bucket, ranges in zip(buffer.buckets, bucket_ranges):
        shard = _Shard(part, ranges["param_map"], bucket.grad_data.numel() // group.size())
        there = {key: whole[key][offset : offset + bucket.numel_unpadded] for key in keys}
        if group.size() > 1:
            _gather_bucket(shard, there, group)
        elif later and not hasattr(part.optimizer, "values_of"):
            gathered.rest += shard.copies(there)
        else:
            for target, source in shard.copies(there):
                target.copy_(source)
        offset += bucket.numel_unpadded
    return whole


class _Shard:
    """A rank's shard of one bucket: the parameters, or parts of them, whose state it holds, by their places."""

    def __init__(self, part: Any, param_map: Any, numel: int) -> None:
        self._part, self.numel = part, numel
        places = [(where["gbuf_local"].start, where["gbuf_local"].end, weight) for weight, where in param_map.items()]
        self._places = sorted(places, key=lambda place: place[0])
        self._ends = [end for _, end, _ in self._places]

    def _state(self, weight: Any, key: str, begin: int, end: int) -> torch.Tensor:
        adam = self._part.optimizer
        if hasattr(adam, "values_of"):  # packed: optim/adam.py
            group, order = self._part.model_param_group_index_map[weight]
            return adam.values_of(adam.param_groups[group]["params"][order], key, begin, end)
        return self._part._get_main_param_and_optimizer_states(weight)[key].view(-1)[begin:end]

    def copies(self, targets: dict[str, torch.Tensor]) -> Iterator[Copy]:
        """Yield the copies that put the whole shard into targets of its size, by the names of the state.

        What is unpacked for it is there until it is copied.
        """
        for start, end, weight in self._places:
            for key, target in targets.items():
                yield target[start:end], self._state(weight, key, 0, end - start)

    def read(self, key: str, begin: int, piece: torch.Tensor) -> None:
        """Copy one kind of state into `piece` from element `begin` on. Padding between parameters is left as it is."""
        end = begin + piece.numel()
        for start, stop, weight in self._places[bisect_right(self._ends, begin) :]:
            if start >= end:
                break
            first, last = max(start, begin), min(stop, end)
            piece[first - begin : last - begin].copy_(self._state(weight, key, first - start, last - start))


def _gather_bucket(shard: _Shard, there: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Gather all ranks' shards of a bucket in `there` on the group's first rank. Collective.

    While one piece is copied to the host the next one is gathered. No event is needed for the two places that they
    take in turn: NCCL begins a gather after what was queued before it, the copy of the last piece from the same place
    among it, and what is queued after `wait` begins when the gather is done.
    """
    size, first, length = group.size(), dist.get_global_rank(group, 0), piece_numel(shard.numel, group.size())
    sent = torch.empty(2, length, device=platform.device())
    received = torch.empty(2, size * length, device=platform.device()) if group.rank() == 0 else None
    copy_before: Callable[[], None] | None = None
    for number, (key, begin) in enumerate(itertools.product(there, range(0, shard.numel, length))):
        numel = min(length, shard.numel - begin)
        piece, parts = sent[number % 2, :numel], None
        shard.read(key, begin, piece)
        if received is not None:
            parts = list(received[number % 2, : size * numel].chunk(size))
        work = dist.gather(piece, parts, dst=first, group=group, async_op=True)
        if copy_before is not None:
            copy_before()
        copy_before = _copying(work, parts or [], there[key], begin, shard.numel)
    if copy_before is not None:
        copy_before()
    platform.synchronize()


def _copying(
    work: Any, parts: list[torch.Tensor], target: torch.Tensor, begin: int, of_rank: int
) -> Callable[[], None]:
    """Return what waits for a gather and copies the pieces of all ranks to their places, but no padding at the end."""

    def copy_gathered() -> None:
        work.wait()
        for rank, part in enumerate(parts):
            place = target[rank * of_rank + begin :][: part.numel()]
            place.copy_(part[: place.numel()], non_blocking=True)

    return copy_gathered


def piece_numel(of_rank: int, size: int) -> int:
    """Return how many elements of each rank's shard of `of_rank` elements one gather over `size` ranks brings."""
    return max(min(GATHERED_BYTES // (4 * size), of_rank), 1)


def _reused(buffers: Buffers, name: object, numel: int, *, pinned: bool) -> torch.Tensor:
    """Return [numel] fp32 of the buffer of this name, which is made anew where it is too small."""
    found = buffers.get(name)
    if found is None or found.numel() < numel:
        buffers[name] = found = platform.host_memory((numel,), torch.float32, pinned=pinned)
    return found[:numel]
