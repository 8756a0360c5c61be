"""The tensors of a fully sharded model in a checkpoint: each rank's shards, as boxes of the model's tensors.

They have the names, shapes and dtypes that any other kind of data parallelism writes (`optimizer.py`), and every rank
writes and reads what it has: nothing is gathered. In a bf16 or fp16 run a shard is the main weight, and the model's
weight is a copy of it in the model's dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_moe.checkpoint import dist
from megatron_moe.checkpoint.dist import Box
from megatron_moe.checkpoint.optimizer import SavedOptimizer, State, has_main_weights, parts_with_state, saved_step
from megatron_moe.checkpoint.step_reader import AVERAGE
from megatron_moe.engine.fully_shard import gathered_dtype, own_range
from megatron_moe.engine.optimizer import parts
from megatron_moe.model.fully_sharded import local, shard_of
from megatron_moe.platform.protocols import EngineOptimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")

Slices = tuple[slice, ...]
Boxes = dict[str, list[Box]]
"""Parameter name -> the boxes of the model's tensors that this rank's shard of it fills; none for an empty shard."""


def model_state(model: torch.nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Return a chunk's sharded state dict, with a list of tensors for each weight. Loading fills them.

    In bf16 and fp16 the weights in it are copies in the model's dtype, which `put_weights` puts into the shards.

    Args:
        model: the model within the wrappers.
        options: how the engine is to name and shard tensors.
    """
    state, boxes = _state_and_boxes(model, options)
    for name, parameter in model.named_parameters():
        shard = local(parameter).detach().to(gathered_dtype(parameter))
        state[name] = [box.tensor(shard) for box in boxes[name]]
    return state


@torch.no_grad()
def put_weights(model: torch.nn.Module, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Put the weights of a state dict of `model_state` into the shards, which are fp32."""
    _, boxes = _state_and_boxes(model, options)
    for name, parameter in model.named_parameters():
        # Loading leaves out empty lists, which are those of empty shards.
        for box, values in zip(boxes[name], state.get(name, ()), strict=True):
            local(parameter)[box.where].copy_(dist.values_of(values))


def optimizer_state(
    model: torch.nn.Module, optimizer: EngineOptimizer, options: dict[str, Any], *, loading: bool
) -> Any:
    """Return the sharded state of the engine's optimizers in the form that all kinds of them share.

    Args:
        model: the model within the wrappers.
        loading: main weights are then memory to load into, which `put_optimizer_state` copies from: the model's weights
            are loaded too, and are the coarser ones.
    """
    states = []
    for part in parts(optimizer):
        groups = [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}, "param_state": {}}
        if getattr(part, "grad_scaler", None) is not None:
            state["grad_scaler"] = part.grad_scaler.state_dict()
        for name, master, boxes in _of_part(model, part, options):
            tensors: dict[str, Tensor] = {}
            for key in _moments_of(part, master):
                if not hasattr(part.optimizer, "values_of"):
                    tensors[key] = part.optimizer.state[master][key]
                elif loading:  # packed moments: host memory in fp32 to load into
                    tensors[key] = torch.empty(master.shape)
                else:
                    tensors[key] = part.optimizer.values_of(master, key).view(master.shape).cpu()
            if has_main_weights(part):
                tensors["param"] = torch.empty_like(master) if loading else master.detach()
            state["param_state"][name] = {
                key: [box.tensor(values, f"optimizer.state.{key}.") for box in boxes] for key, values in tensors.items()
            }
        states.append(state)
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _moments_of(part: SavedOptimizer, master: Tensor) -> tuple[str, ...]:
    """Return the moments that a weight has: a momentum alone where Muon updates it."""
    return _MOMENTS[:1] if master in getattr(part.optimizer, "matrices", ()) else _MOMENTS


@torch.no_grad()
def put_optimizer_state(
    model: torch.nn.Module, optimizer: EngineOptimizer, state: State, options: dict[str, Any]
) -> None:
    """Take over what was loaded: main weights, step counts and the loss scale, and moments where they are packed.

    Parameter groups, learning rates, betas and epsilon are settings, not state: those of the present run stay.
    """
    step = saved_step(optimizer, state)
    for part, own in parts_with_state(optimizer, state):
        for group in part.param_groups:
            group["step"] = step
        if getattr(part, "grad_scaler", None) is not None and "grad_scaler" in own:
            part.grad_scaler.load_state_dict(own["grad_scaler"])
        kinds = ["param"] if has_main_weights(part) else []
        packed = hasattr(part.optimizer, "values_of")
        with part.optimizer.unpacked(keep=True) if packed else nullcontext():
            for name, master, boxes in _of_part(model, part, options):
                state = {"param": master, **part.optimizer.state[master]}
                for kind in (*kinds, *(_moments_of(part, master) if packed else ())):
                    for box, values in zip(boxes, own["param_state"][name][kind], strict=True):
                        state[kind][box.where].copy_(dist.values_of(values))


def _of_part(
    model: torch.nn.Module, part: SavedOptimizer, options: dict[str, Any]
) -> Iterator[tuple[str, Tensor, list[Box]]]:
    """Yield name, shard and boxes of each weight that this optimizer updates."""
    masters = {id(master) for master in part.get_parameters()}
    _, boxes = _state_and_boxes(model, options)
    for name, parameter in model.named_parameters():
        if id(shard_of(parameter)) in masters:
            yield name, shard_of(parameter), boxes[name]


def _state_and_boxes(
    model: torch.nn.Module, options: dict[str, Any], *, whole: bool = False
) -> tuple[dict[str, Any], Boxes]:
    """Return the engine's sharded state dict of whole weights, without memory, and each shard's boxes.

    Args:
        whole: return the boxes of whole weights, whatever a rank has of them.
    """
    # A weight of the whole shape, without memory, takes each shard's place: what the engine makes of it are views of it
    # that say where each element of the weight belongs.
    names = dict(model.named_parameters())
    name_of = {id(parameter): name for name, parameter in names.items()}
    boxes: Boxes = {name: [] for name in names}
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    made: dict[int, torch.nn.Parameter] = {}
    stand_ins: dict[int, str] = {}
    for part in model.modules():
        for own, parameter in part._parameters.items():
            if parameter is None:
                continue
            replaced.append((part, own, parameter))
            if id(parameter) not in made:
                meta = torch.empty(parameter.shape, dtype=gathered_dtype(parameter), device="meta")
                made[id(parameter)] = stand_in = torch.nn.Parameter(meta, requires_grad=parameter.requires_grad)
                vars(stand_in).update(vars(parameter))
                stand_ins[stand_in.untyped_storage()._cdata] = name_of[id(parameter)]
    try:
        for part, own, parameter in replaced:
            part._parameters[own] = made[id(parameter)]
        state = dist.model_tensors(model, options)
        for tensor in list(dist.sharded_tensors(state)):
            name = stand_ins.get(tensor.data.untyped_storage()._cdata)
            if name is None:
                continue
            axis, begin, end = (0, 0, names[name].shape[0]) if whole else own_range(names[name])
            if (box := dist.box_of(tensor, axis, begin, end)) is not None:
                boxes[name].append(box)
    finally:
        for part, own, parameter in replaced:
            part._parameters[own] = parameter
    return {key: value for key, value in state.items() if key not in names}, boxes


def places(model: torch.nn.Module, options: dict[str, Any]) -> Iterator[tuple[torch.nn.Parameter, Tensor, int]]:
    """Yield each weight with a number for each of its rows, and the model's column of their first element.

    The numbers are int64, of the weight's shape without the last axis. A row has its own in the whole model, the same
    on every layout: its position in the tensor of a checkpoint, counted from a hash of the tensor's name.
    """
    weights = {id(weight): weight for weight in model.parameters()}
    rows = {key: torch.zeros(weight.shape[:-1], dtype=torch.int64) for key, weight in weights.items()}
    columns: dict[int, int] = {}
    for weight, box in boxes_of_whole_weights(model, options):
        hashed = int.from_bytes(hashlib.sha256(box.whole.key.encode()).digest()[:8], "little", signed=True)
        number, stride, axes = torch.full((), hashed, dtype=torch.int64), 1, len(box.shape) - 1
        for axis in reversed(range(axes)):
            along = torch.arange(box.start[axis], box.start[axis] + box.shape[axis])
            number = number + along.view(-1, *(1,) * (axes - 1 - axis)) * stride
            stride *= box.whole.global_shape[axis]
        rows[id(weight)][box.where[:-1]] = number
        columns[id(weight)] = box.start[-1]
    yield from ((weight, rows[key], columns.get(key, 0)) for key, weight in weights.items())


def boxes_of_whole_weights(model: torch.nn.Module, options: dict[str, Any]) -> list[tuple[torch.nn.Parameter, Box]]:
    """Return each weight with each box of the model's tensors that it fills, whole, whatever a rank has of it."""
    _, boxes = _state_and_boxes(model, options, whole=True)
    names = dict(model.named_parameters())
    missing = [name for name, weight in names.items() if not boxes[name] and weight.numel()]
    assert not missing, f"not in the model's sharded state: {missing}"
    return [(names[name], box) for name in names for box in boxes[name]]


# The average of the weights: `optimizer.state.ema.NAME`, fp32, in boxes of the model's tensor NAME. Each rank writes
# and reads the part of a weight that it updates, on any layout and with any kind of data parallelism.


class _OwnedPart(Protocol):
    axis: int | None
    begin: int
    end: int


def average_state(
    weights: Sequence[Any], chunks: Sequence[torch.nn.Module], optimizer: EngineOptimizer, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the sharded state of an average of weights: views of its tensors, which loading fills.

    Args:
        weights: those of a `WeightAverage`: parameter, the part of it that this rank owns, and that part's values.
        chunks: the model's, within the wrappers.
    """
    owned = {id(weight.parameter): weight for weight in weights}
    distributed = any(hasattr(part, "model_param_gbuf_map") for part in parts(optimizer))
    state: dict[str, Any] = {}
    for chunk in chunks:
        for parameter, box in boxes_of_whole_weights(chunk, options):
            weight = owned.get(id(parameter))  # none where it is frozen, or all of it is on other ranks
            for where, values in () if weight is None else _boxes(parameter.shape, weight.part, weight.values):
                inside = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box.where, where))
                shape = tuple(along.stop - along.start for along in inside)
                if min(shape, default=1) <= 0:
                    continue
                start = tuple(s + a.start - b.start for s, a, b in zip(box.start, inside, box.where))
                own = tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inside, where))
                tensor = replace(box, start=start, shape=shape, where=own).tensor(values, AVERAGE)
                if not (distributed or isinstance(parameter, DTensor)):  # data-parallel ranks have the same elements
                    tensor = replace(tensor, replica_id=box.whole.replica_id)
                state[str(len(state))] = tensor
    return state


def _boxes(shape: Sequence[int], part: _OwnedPart, values: Tensor) -> Iterator[tuple[Slices, Tensor]]:
    """Yield the boxes of a weight that its owned part consists of, each with a view of the part's values.

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
