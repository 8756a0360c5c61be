"""torch's `fully_shard`, as far as its interface does not reach: internals of torch 2.11 to 2.13."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_moe.engine.patching import replaced


def partition_mesh(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """Return a block in which `fully_shard` takes this mesh for its secondary partition.

    torch, in all releases, would make the partition's groups itself, from the ranks of one group, while the world has
    several such groups side by side, whose ranks would not agree on what is made. Until `fully_shard` takes a
    mesh for it.
    """
    return replaced([_fsdp_init], DeviceMesh=lambda *_: mesh)


@dataclass(frozen=True)
class FlatShard:
    """A weight's part of the flat buffer that a unit sends.

    length: its elements, with padding. module: whose weight it is. shape: of the whole weight.
    """

    length: int
    module: torch.nn.Module
    shape: torch.Size


def flat_shards(module: FSDPModule) -> list[FlatShard]:
    """Return the parts of a unit's flat shards in the order in which torch sends them."""
    state: Any = module._get_fsdp_state()
    # A list from torch 2.13 on, of one where the weights share a mesh, as a unit's do.
    (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [
        FlatShard(one.padded_sharded_param_size.numel(), one._module_info.module, one._orig_size)
        for one in group.fsdp_params
    ]


@dataclass(frozen=True)
class ShardedWeight:
    """What is known of a weight whose parameter is a DTensor.

    own_range: the axis along which it is cut, and the first and the last + 1 index of this rank's shard. It is not
    asked of the DTensor: torch's caches may give it the mesh of groups that a program has left. gathered_dtype: the
    dtype in which the model computes with it.
    """

    own_range: tuple[int, int, int]
    gathered_dtype: torch.dtype


_SHARDED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def register_sharded(parameter: torch.nn.Parameter, weight: ShardedWeight) -> None:
    """Remember what is known of a weight, as long as its parameter lives."""
    _SHARDED[parameter] = weight


def own_range(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Return the axis along which a weight is cut, and the first and the last + 1 index that this rank has of it."""
    return _SHARDED[parameter].own_range


def gathered_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype in which the model computes with a weight: of one that is not sharded, its own."""
    sharded = _SHARDED.get(parameter)
    return parameter.dtype if sharded is None else sharded.gathered_dtype
