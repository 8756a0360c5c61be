"""Reading tensors with the engine's dist_checkpointing; `writer` writes them.

What is read is checked first: torch's checkpoint format holds pickles, which the engine loads without restriction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

import torch
from torch.distributed.checkpoint import CheckpointException

from megatron_moe.checkpoint import manifest, step_reader
from megatron_moe.checkpoint.errors import all_gather_object
from megatron_moe.checkpoint.index import AllowedUnpickler, UntrustedError
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.engine import dist_checkpointing as engine
from megatron_moe.engine.dist_checkpointing import ShardedTensor, ShardedTensorFactory


class _ShardedModule(Protocol):
    def sharded_state_dict(self, *, metadata: dict[str, Any]) -> dict[str, Any]: ...


def model_tensors(model: torch.nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's sharded state dict of a model inside its wrappers, whose tensors are the live ones.

    Args:
        options: how the engine is to name and shard tensors (`state.metadata`).
    """
    return cast(_ShardedModule, model).sharded_state_dict(metadata=options)


def load_tensors(
    state: dict[str, Any],
    folder: Path,
    *,
    allow_unread: tuple[str, ...] = (),
    fp32_state: frozenset[str] = frozenset(),
) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
    """Read a step into the requested sharded state dict. Collective over all ranks.

    Every tensor asked for has to be in the step with the same dtype, and every tensor of the step has to be asked for
    by some rank, unless its key begins with one of `allow_unread`.

    Args:
        fp32_state: keys of tensors that are fp32 here whatever they were saved as: they are read and widened.

    Returns:
        The state with its tensors filled, and those of `fp32_state` (of any rank) that were saved in another dtype,
        with that dtype.

    Raises:
        ConfigError: keys or dtypes do not match; all of them are listed. The same on every rank.
    """
    saved = saved_dtypes(folder)
    wanted = {tensor.key: tensor.dtype for tensor in sharded_tensors(state)}
    requested = set(_agreed(set(wanted)))
    absent = sorted(requested - saved.keys())
    unread = sorted(key for key in saved.keys() - requested if not key.startswith(allow_unread))
    if absent or unread:
        lines = [f"not in the checkpoint: {key}" for key in absent]
        lines += [f"in the checkpoint, but not in the model: {key}" for key in unread]
        raise ConfigError(listing(f"{folder}: does not hold the tensors of this model:", lines))
    casts = _agreed(
        {
            f"{key}: saved as {saved[key]}, wanted as {dtype}"
            for key, dtype in wanted.items()
            if saved[key] != dtype and key not in fp32_state
        }
    )
    if casts:
        head = (
            f"{folder}: weights are never cast silently, and these have another dtype (--bf16, --fp16 and --keep-fp32 "
            "decide it):"
        )
        raise ConfigError(listing(head, casts))
    rounded = {key: saved[key] for key in _agreed(set(fp32_state)) if saved[key] != torch.float32}
    loaded: dict[str, Any] = {}
    unreadable: set[str] = set()
    try:
        with engine.restricted_pickles(_load_allowed):
            loaded = engine.load(state, str(folder), sharded_strategy=engine.TorchDistLoadShardedStrategy())
    except CheckpointException as failed:
        unreadable = {step_reader.words(error) for error, _ in failed.failures.values()}
    if everywhere := _agreed(unreadable):
        raise ConfigError(f"{folder}: refused: a tensor cannot be read: {'; '.join(everywhere[:3])}")
    return loaded, rounded


def saved_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor of a step by its key. Collective: a step that could run code is refused by all.

    Raises:
        ConfigError: see `check_trusted`.
    """
    check_trusted(folder)
    with engine.restricted_pickles(_load_allowed):
        saved = engine.TorchDistLoadShardedStrategy().load_tensors_metadata(str(folder))
    return {key: tensor.dtype for key, tensor in saved.items()}


def sharded_tensors(state: object) -> Iterator[ShardedTensor]:
    """Yield all sharded tensors of a nested state dict, those that a factory makes included."""
    for part in sharded_parts(state):
        if isinstance(part, ShardedTensorFactory):
            yield from sharded_tensors(part.build())
        else:
            yield part


def sharded_parts(state: object) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    """Yield all sharded tensors and factories of a nested state dict."""
    if isinstance(state, (ShardedTensor, ShardedTensorFactory)):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from sharded_parts(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from sharded_parts(value)


def read_in_fp32(entry: Any, keys: dict[str, str]) -> Any:
    """Return an entry of a sharded state dict, or a list of them, that is read into new fp32 memory of the host.

    Args:
        keys: key of a tensor in the entry -> the key to read it from.
    """
    if isinstance(entry, list):
        return [read_in_fp32(part, keys) for part in entry]
    changed: dict[str, Any] = {"key": keys[entry.key], "data": torch.empty(entry.data.shape, dtype=torch.float32)}
    if isinstance(entry, ShardedTensor):
        changed["dtype"] = torch.float32
    return replace(entry, **changed)


class Shard(NamedTuple):
    """A box of one of the model's tensors that this rank holds.

    start: of the box in the whole tensor, whose shape is `whole`. values: the live ones, with as many axes. is_main: of
    the ranks that hold these elements, this one counts.
    """

    key: str
    start: tuple[int, ...]
    whole: tuple[int, ...]
    values: torch.Tensor
    is_main: bool


def shards(state: object) -> list[Shard]:
    """Return this rank's shards of the tensors of a sharded state dict."""
    found = []
    for tensor in sharded_tensors(state):
        replica = tensor.replica_id if isinstance(tensor.replica_id, tuple) else (tensor.replica_id,)
        values = tensor.data.reshape((1,) * tensor.prepend_axis_num + tuple(tensor.data.shape))
        assert values.data_ptr() == tensor.data.data_ptr(), f"{tensor.key} is a copy"
        found.append(
            Shard(tensor.key, tuple(tensor.global_offset), tuple(tensor.global_shape), values, not any(replica))
        )
    return found


@dataclass(frozen=True)
class Box:
    """A part of one of the model's tensors that is a part of this rank's shard of a weight.

    whole: the engine's description of the tensor, of which `start` and `shape` are the box. where: the box's place in
    the shard.
    """

    whole: ShardedTensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    where: tuple[slice, ...]

    def tensor(self, shard: torch.Tensor, prefix: str = "") -> ShardedTensor:
        """Return the box as a sharded tensor with its elements of a tensor of the shard's shape."""
        values = shard[self.where]
        # Of the ranks with the same elements, which are not data-parallel ones, the engine's first one writes them.
        replica = (*self.whole.replica_id[:-1], 0) if isinstance(self.whole.replica_id, tuple) else 0
        return ShardedTensor(
            prefix + self.whole.key,
            values,
            values.dtype,
            self.shape,
            self.whole.global_shape,
            self.start,
            None,  # shards need not be equal
            replica,
            # The padding of a vocabulary depends on TP and its flags; rows that a step does not have are zeros.
            allow_shape_mismatch=self.whole.allow_shape_mismatch,
        )


def box_of(tensor: ShardedTensor, axis: int, begin: int, end: int) -> Box | None:
    """Return the box of a sharded tensor that is in the part [begin, end) of a weight along an axis; None if none is.

    Args:
        tensor: its data is a view of the whole weight, on any device.
    """
    assert tensor.data is not None and tensor.prepend_axis_num == 0 and tensor.flattened_range is None, tensor.key
    weight = tensor.data if tensor.data._base is None else tensor.data._base
    strides, offset = weight.stride(), tensor.data.storage_offset()
    first = [offset // stride % length for stride, length in zip(strides, weight.shape)]
    assert tensor.data.stride() == strides and weight.is_contiguous(), f"{tensor.key} is no box of its weight"
    shape, start = list(tensor.data.shape), list(tensor.global_offset)
    low, high = max(first[axis], begin), min(first[axis] + shape[axis], end)
    if low >= high or 0 in shape:
        return None
    start[axis] += low - first[axis]
    first[axis], shape[axis] = low - begin, high - low
    where = tuple(slice(place, place + length) for place, length in zip(first, shape))
    return Box(tensor, tuple(start), tuple(shape), where)


def values_of(tensor: ShardedTensor | torch.Tensor) -> torch.Tensor:
    """Return the tensor that a sharded tensor holds, or that was loaded in its place."""
    if isinstance(tensor, ShardedTensor):
        assert tensor.data is not None
        return tensor.data
    return tensor


def _load_allowed(file: IO[bytes]) -> Any:
    """Read a pickle with the allow-list: a file can be replaced between the check and the reading."""
    return AllowedUnpickler(file).load()


def _agreed(found: set[str]) -> list[str]:
    """Return the union over ranks, sorted, so that all of them raise or none."""
    return sorted(set().union(*all_gather_object(found)))


def check_trusted(folder: Path) -> None:
    """Refuse a step whose pickles could run code, before the engine opens them. Collective: all ranks raise or none.

    The engine reads `.metadata` and non-tensor values with plain pickle. Here they are read first, with an allow-list.

    Raises:
        ConfigError: naming the file and what it wanted to import.
    """
    refused: set[str] = set()
    try:
        step_reader.check(folder, manifest.read(folder).files)
    except (UntrustedError, manifest.ManifestError, OSError) as error:
        refused = {str(error)}
    if everywhere := _agreed(refused):
        raise ConfigError(f"{folder}: refused: {'; '.join(everywhere)}")
