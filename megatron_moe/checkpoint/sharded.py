"""A rank's shards of the tensors in a checkpoint: of weights, of the optimizer's state, and of their average.

    NAME                               a weight in the run's dtype, or fp32 state of the model
    optimizer.state.param.NAME         the fp32 main weight of NAME; not in an fp32 run, where NAME itself is that
    optimizer.state.exp_avg.NAME       Adam's moments, fp32
    optimizer.state.exp_avg_sq.NAME    not of weights that Muon updates
    optimizer.state.ema.NAME           the average of the main weight, fp32

Names, shapes and dtypes are the same for every layout, optimizer and kind of data parallelism. A rank has boxes of
these tensors. Data-parallel ranks that hold the same elements share the work of writing and of reading them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_moe.checkpoint.optimizer import has_main_weights
from megatron_moe.checkpoint.step_reader import AVERAGE
from megatron_moe.engine.dist_checkpointing import ShardedTensor, ShardedTensorFactory
from megatron_moe.engine.fully_shard import gathered_dtype, own_range
from megatron_moe.engine.optimizer import OwnedPart, named_main_params, owned_part, parts
from megatron_moe.model.fully_sharded import local
from megatron_moe.platform.protocols import EngineOptimizer, ProcessGroups

_STATE = "optimizer.state."

Slices = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class Shard:
    """A box of one of a checkpoint's tensors that this rank holds.

    Attributes:
        key: the tensor's name.
        start: the box's first element in the whole tensor, whose shape is `whole`.
        values: the live elements, of the box's shape. Those of a fully sharded model's weight are fp32.
        dtype: the tensor's in a checkpoint of this run.
        is_main: False where ranks other than data-parallel ones have the same elements, and one of those counts.
        group: the data-parallel ranks that have the same elements; None: no other has them.
        is_padded: a checkpoint may have fewer rows, as the padding of a vocabulary depends on TP; the others are zeros.
    """

    key: str
    start: tuple[int, ...]
    whole: tuple[int, ...]
    values: Tensor
    dtype: torch.dtype
    is_main: bool = True
    group: ProcessGroup | None = None
    is_padded: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this rank counts of all that hold these elements."""
        return self.is_main and (self.group is None or self.group.rank() == 0)

    def part(self, box: Slices) -> Shard:
        """Return a box of the box."""
        start = tuple(first + along.start for first, along in zip(self.start, box))
        return replace(self, start=start, values=self.values[box])


# Ranks that hold the same elements.


def share(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the range of `numel` elements that is one rank's, of ranks with equal shares."""
    return numel * rank // ranks, numel * (rank + 1) // ranks


def elements(shards: Sequence[Shard], begin: int, end: int) -> Iterator[Shard]:
    """Yield elements [begin, end) of the shards, counted from the first one's on, as boxes."""
    first = 0
    for shard in shards:
        low, high = max(begin - first, 0), min(end - first, shard.values.numel())
        if low < high:
            yield from map(shard.part, boxes_of_range(tuple(shard.values.shape), low, high))
        first += shard.values.numel()


def written_here(shards: Iterable[Shard]) -> list[Shard]:
    """Return what this rank writes of its shards, as boxes: of what several ranks hold, an equal share of the bytes."""
    held: dict[tuple[ProcessGroup | None, torch.dtype], list[Shard]] = {}
    for shard in shards:
        if shard.is_main:
            held.setdefault((shard.group, shard.dtype), []).append(shard)
    found: list[Shard] = []
    for (group, _), of_group in held.items():
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        found += elements(of_group, *share(sum(shard.values.numel() for shard in of_group), ranks, rank))
    return found


# The boxes of the model's tensors that a weight fills.


class _ShardedModule(Protocol):
    def sharded_state_dict(self, *, metadata: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Box:
    """A box of one of the model's tensors that a part of a weight fills.

    tensor: the engine's description of it, its data without memory. where: the part of the whole weight.
    """

    tensor: ShardedTensor
    where: Slices


def _is_main(tensor: ShardedTensor) -> bool:
    """Return whether this rank counts of those with the same elements, data-parallel ones aside."""
    # The engine's numbers of a copy: over pipeline and tensor parallelism, and last over data parallelism.
    return not (isinstance(tensor.replica_id, tuple) and any(tensor.replica_id[:-1]))


def boxes_of_weights(
    model: torch.nn.Module, options: dict[str, Any]
) -> tuple[list[tuple[torch.nn.Parameter, Box]], list[ShardedTensor]]:
    """Return each weight with each box that it fills, whole, whatever a rank has of it; and the other tensors.

    Args:
        model: the model within the wrappers.
        options: how the engine is to name and shard tensors (`state.metadata`).
    """
    # A weight of the whole shape, without memory, takes each weight's place: what the engine makes of it are views of
    # it that say where each element of the weight belongs.
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    made: dict[int, torch.nn.Parameter] = {}
    weight_of: dict[int, torch.nn.Parameter] = {}
    for part in model.modules():
        for own, parameter in part._parameters.items():
            if parameter is None:
                continue
            replaced.append((part, own, parameter))
            if id(parameter) not in made:
                meta = torch.empty(parameter.shape, dtype=gathered_dtype(parameter), device="meta")
                made[id(parameter)] = stand_in = torch.nn.Parameter(meta, requires_grad=parameter.requires_grad)
                vars(stand_in).update(vars(parameter))
                weight_of[stand_in.untyped_storage()._cdata] = parameter
    boxes: list[tuple[torch.nn.Parameter, Box]] = []
    others: list[ShardedTensor] = []
    try:
        for part, own, parameter in replaced:
            part._parameters[own] = made[id(parameter)]
        for tensor in sharded_tensors(cast(_ShardedModule, model).sharded_state_dict(metadata=options)):
            weight = weight_of.get(tensor.data.untyped_storage()._cdata)
            if weight is None:
                others.append(tensor)
            elif tensor.data.numel():
                boxes.append((weight, Box(tensor, _place(tensor))))
    finally:
        for part, own, parameter in replaced:
            part._parameters[own] = parameter
    found = {id(weight) for weight, _ in boxes}
    missing = [name for name, weight in model.named_parameters() if id(weight) not in found and weight.numel()]
    assert not missing, f"not in the model's sharded state: {missing}"
    return boxes, others


def sharded_tensors(state: object) -> Iterator[ShardedTensor]:
    """Yield all sharded tensors of the engine's nested state dict, those that a factory makes included."""
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, ShardedTensorFactory):
        yield from sharded_tensors(state.build())
    elif isinstance(state, dict):
        for value in state.values():
            yield from sharded_tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from sharded_tensors(value)


def _place(tensor: ShardedTensor) -> Slices:
    """Return the box of a weight that a sharded tensor's data is a view of."""
    assert tensor.data is not None and tensor.prepend_axis_num == 0 and tensor.flattened_range is None, tensor.key
    weight = tensor.data if tensor.data._base is None else tensor.data._base
    strides, offset = weight.stride(), tensor.data.storage_offset()
    assert tensor.data.stride() == strides and weight.is_contiguous(), f"{tensor.key} is no box of its weight"
    first = [offset // stride % length for stride, length in zip(strides, weight.shape)]
    return tuple(slice(begin, begin + length) for begin, length in zip(first, tensor.data.shape))


# Shards of weights, and of what belongs to them.


@dataclass(frozen=True)
class _Held:
    """What this rank holds of a weight: a part of it, and tensors of this part, by the prefix of their keys."""

    weight: torch.nn.Parameter
    part: OwnedPart
    tensors: dict[str, Tensor]
    group: ProcessGroup | None


def model_shards(chunks: Sequence[torch.nn.Module], options: dict[str, Any], pg: ProcessGroups) -> list[Shard]:
    """Return the shards of the model's weights and of its other state.

    Args:
        chunks: the model's, within the wrappers.
        options: how the engine is to name and shard tensors (`state.metadata`).
    """
    held, found = [], []
    for chunk in chunks:
        for weight in chunk.parameters():
            part = OwnedPart(*own_range(weight)) if isinstance(weight, DTensor) else OwnedPart(0, 0, weight.shape[0])
            held.append(_Held(weight, part, {"": local(weight).detach()}, _group_of(weight, pg)))
        for tensor in boxes_of_weights(chunk, options)[1]:
            key, start, whole = tensor.key, tuple(tensor.global_offset), tuple(tensor.global_shape)
            found.append(Shard(key, start, whole, tensor.data, tensor.dtype, _is_main(tensor), _several(pg.dp_cp)))
    return [*_shards(held, chunks, options), *found]


def optimizer_shards(
    chunks: Sequence[torch.nn.Module], optimizer: EngineOptimizer, options: dict[str, Any], pg: ProcessGroups
) -> list[Shard]:
    """Return the shards of main weights and moments, which must not be packed (`optimizer.unpacked`).

    Args:
        chunks, options: see `model_shards`.
    """
    updated_by: dict[int, Any] = {}
    for part in parts(optimizer):
        if not part.is_stub_optimizer:
            updated_by.update(dict.fromkeys(map(id, part.get_parameters()), part))
    held = []
    for weight, main in named_main_params(chunks, optimizer):
        part = updated_by[id(main)]
        state, tensors = part.optimizer.state[main], {}
        if has_main_weights(part):
            tensors[f"{_STATE}param."] = main.detach()
        tensors[f"{_STATE}exp_avg."] = state["exp_avg"]
        if main not in getattr(part.optimizer, "matrices", ()):
            tensors[f"{_STATE}exp_avg_sq."] = state["exp_avg_sq"]
        held.append(_Held(weight, owned_part(optimizer, weight), tensors, _updating(weight, optimizer, pg)))
    return _shards(held, chunks, options)


class _Averaged(Protocol):
    parameter: torch.nn.Parameter
    part: OwnedPart
    values: Tensor


def average_shards(
    averaged: Sequence[_Averaged],
    chunks: Sequence[torch.nn.Module],
    optimizer: EngineOptimizer,
    options: dict[str, Any],
    pg: ProcessGroups,
) -> list[Shard]:
    """Return the shards of an average of weights.

    Args:
        averaged: those of a `WeightAverage`: parameter, the part of it that this rank updates, and that part's values.
        chunks, options: see `model_shards`.
    """
    held = [
        _Held(one.parameter, one.part, {AVERAGE: one.values}, _updating(one.parameter, optimizer, pg))
        for one in averaged
    ]
    return _shards(held, chunks, options)


def _updating(weight: torch.nn.Parameter, optimizer: EngineOptimizer, pg: ProcessGroups) -> ProcessGroup | None:
    """Return the ranks that update the same elements of a weight; None: a distributed optimizer gives each its own."""
    distributed = any(hasattr(part, "model_param_gbuf_map") for part in parts(optimizer))
    return None if distributed else _group_of(weight, pg)


def _group_of(weight: torch.nn.Parameter, pg: ProcessGroups) -> ProcessGroup | None:
    """Return the ranks that hold the same elements of a weight; None: this one alone, as in a fully sharded model."""
    if isinstance(weight, DTensor):
        return None
    return _several(pg.dp_cp if getattr(weight, "allreduce", True) else pg.expt_dp)


def _several(group: ProcessGroup) -> ProcessGroup | None:
    return group if group.size() > 1 else None


def _shards(held: Iterable[_Held], chunks: Sequence[torch.nn.Module], options: dict[str, Any]) -> list[Shard]:
    boxes: dict[int, list[Box]] = {}
    for chunk in chunks:
        for weight, box in boxes_of_weights(chunk, options)[0]:
            boxes.setdefault(id(weight), []).append(box)
    found = []
    for one in held:
        for prefix, tensor in one.tensors.items():
            dtype = torch.float32 if prefix else gathered_dtype(one.weight)
            for where, values in _boxes_of_part(one.weight.shape, one.part, tensor):
                for box in boxes.get(id(one.weight), ()):
                    inside = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box.where, where))
                    if any(along.start >= along.stop for along in inside):
                        continue
                    offset = box.tensor.global_offset
                    found.append(
                        Shard(
                            prefix + box.tensor.key,
                            tuple(first + a.start - b.start for first, a, b in zip(offset, inside, box.where)),
                            tuple(box.tensor.global_shape),
                            values[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inside, where))],
                            dtype,
                            _is_main(box.tensor),
                            one.group,
                            box.tensor.allow_shape_mismatch,
                        )
                    )
    return found


def _boxes_of_part(shape: Sequence[int], part: OwnedPart, values: Tensor) -> Iterator[tuple[Slices, Tensor]]:
    """Yield the boxes of a weight that a part of it consists of, each with a view of the part's values.

    A distributed optimizer's part is a range of a weight's elements in their order, which is a few boxes: the end of a
    row, whole rows, and the beginning of another one.
    """
    if part.axis is not None:
        whole = [slice(0, length) for length in shape]
        whole[part.axis] = slice(part.begin, part.end)
        yield tuple(whole), values
        return
    done, flat = 0, values.view(-1)
    for box in boxes_of_range(tuple(shape), part.begin, part.end):
        extent = [along.stop - along.start for along in box]
        yield box, flat[done : done + math.prod(extent)].view(extent)
        done += math.prod(extent)


def boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Slices]:
    """Yield the boxes that make up elements [begin, end) of a contiguous tensor, in their order."""
    if begin >= end:
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if begin < first * row:  # the end of a row, or a part of one
        for rest in boxes_of_range(shape[1:], begin % row, min(end - (first - 1) * row, row)):
            yield (slice(first - 1, first), *rest)
    if first < last:
        yield (slice(first, last), *(slice(0, length) for length in shape[1:]))
    if first <= last and last * row < end:
        for rest in boxes_of_range(shape[1:], 0, end - last * row):
            yield (slice(last, last + 1), *rest)


# Numbers of rows.


def places(model: torch.nn.Module, options: dict[str, Any]) -> Iterator[tuple[torch.nn.Parameter, Tensor, int]]:
    """Yield each weight with a number for each of its rows, and the model's column of their first element.

    The numbers are int64, of the weight's shape without the last axis. A row has its own in the whole model, the same
    on every layout: its position in the tensor of a checkpoint, counted from a hash of the tensor's name.
    """
    weights = {id(weight): weight for weight in model.parameters()}
    rows = {key: torch.zeros(weight.shape[:-1], dtype=torch.int64) for key, weight in weights.items()}
    columns: dict[int, int] = {}
    for weight, box in boxes_of_weights(model, options)[0]:
        tensor = box.tensor
        hashed = int.from_bytes(hashlib.sha256(tensor.key.encode()).digest()[:8], "little", signed=True)
        number, stride, axes = torch.full((), hashed, dtype=torch.int64), 1, len(box.where) - 1
        for axis in reversed(range(axes)):
            first, length = tensor.global_offset[axis], box.where[axis].stop - box.where[axis].start
            along = torch.arange(first, first + length)
            number = number + along.view(-1, *(1,) * (axes - 1 - axis)) * stride
            stride *= tensor.global_shape[axis]
        rows[id(weight)][box.where[:-1]] = number
        columns[id(weight)] = tensor.global_offset[-1]
    yield from ((weight, rows[key], columns.get(key, 0)) for key, weight in weights.items())
