"""ZeRO++ (arXiv 2306.10209) on `fully_shard`: a secondary partition, and weights and gradients sent as integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from megatron_moe import platform
from megatron_moe.engine.fully_shard import flat_shards, partition_mesh
from megatron_moe.moe.router import TopKRouter
from megatron_moe.parallel.groups import neighbours, partition, ranks_of_machine
from megatron_moe.parallel.quantized_collectives import QuantizedAllGather, QuantizedReduceScatter, Segments


class _Sending(Protocol):
    """The part of `fully_sharded.Sharding` that says how weights and gradients are sent."""

    @property
    def quantized_weights(self) -> bool: ...

    @property
    def machine(self) -> int | None: ...

    @property
    def gradient_bits(self) -> int | None: ...


@contextmanager
def secondary_mesh(group: ProcessGroup, machine: int | None) -> Iterator[bool | int]:
    """Yield what `fully_shard` takes as `reshard_after_forward` in the block: the size of the secondary partition.

    It is the ranks of the group among `machine` neighbours of the world. Where that is one, as of experts that a
    machine has once, weights stay gathered: False.

    The partition's groups are made here, see `partition_mesh`.
    """
    ranks = dist.get_process_group_ranks(group)
    size = group.size() if machine is None else neighbours(ranks, machine)
    if size in (1, group.size()):
        yield size == group.size()
        return
    inside, across = partition(group, size)
    places = torch.tensor(ranks).view(-1, size)
    names = ("parts", "ranks of a part")
    mesh = DeviceMesh.from_group([across, inside], platform.device().type, mesh=places, mesh_dim_names=names)
    with partition_mesh(mesh):
        yield size


def quantize_collectives(module: FSDPModule, group: ProcessGroup, sending: _Sending) -> None:
    """Let a unit's gathers and reductions send integers where the flags ask for it and the group has several ranks."""
    if group.size() == 1:
        return
    segments = cache(partial(_segments, module))
    if sending.quantized_weights:
        module.set_custom_all_gather(QuantizedAllGather(segments, group.size()))
    if sending.gradient_bits is not None:
        size = neighbours(dist.get_process_group_ranks(group), sending.machine or ranks_of_machine())
        # With one rank a machine nothing is added up inside it.
        parts = partition(group, size) if 1 < size < group.size() else (None, None)
        module.set_custom_reduce_scatter(QuantizedReduceScatter(segments, sending.gradient_bits, *parts))


def _segments(module: FSDPModule) -> Segments:
    """Return the parts of a unit's flat shards in the order in which torch sends them."""
    shards = flat_shards(module)
    lengths = [shard.length for shard in shards]
    return Segments(tuple(lengths), tuple(is_quantized(shard.module, shard.shape) for shard in shards))


def is_quantized(module: torch.nn.Module, shape: torch.Size) -> bool:
    """Return whether a module's weight is: not vectors (norms, biases, gates of one row), nor router weights."""
    return shape[:-1].numel() > 1 and not isinstance(module, TopKRouter)
