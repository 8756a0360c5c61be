"""The average of the weights in a checkpoint: `optimizer.state.ema.NAME`, fp32, in boxes of the model's tensor NAME.

Each rank writes and reads the part of a weight that it updates, on any layout and with any kind of data parallelism;
nothing is gathered. A distributed optimizer's part is a range of a weight's elements in their order, which is a few
boxes: the end of a row, whole rows, and the beginning of another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_moe.checkpoint.dist import Box
from megatron_moe.checkpoint.optimizer import parts_of
from megatron_moe.checkpoint.sharded import boxes_of_whole_weights
from megatron_moe.checkpoint.step_reader import AVERAGE

Slices = tuple[slice, ...]


def sharded_state(
    average: Any, chunks: Sequence[torch.nn.Module], optimizer: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the sharded state of a `WeightAverage`: views of its tensors, which loading fills.

    Args:
        chunks: the model's, within the wrappers.
        options: how the engine is to name and shard tensors.
    """
    owned = {id(weight.parameter): weight for weight in average.weights}
    distributed = any(hasattr(part, "model_param_gbuf_map") for part in parts_of(optimizer))
    state: dict[str, Any] = {}
    for chunk in chunks:
        for parameter, box in boxes_of_whole_weights(chunk, options):
            weight = owned.get(id(parameter))  # none where it is frozen, or all of it is on other ranks
            for where, values in () if weight is None else _boxes(parameter.shape, weight.part, weight.values):
                inside = _intersection(box, where)
                if inside is not None:
                    spread = distributed or isinstance(parameter, DTensor)
                    state[str(len(state))] = _tensor(box, where, inside, values, spread)
    return state


def _boxes(shape: Sequence[int], part: Any, values: Tensor) -> Iterator[tuple[Slices, Tensor]]:
    """Yield the boxes of a weight that its owned part consists of, each with a view of the part's values."""
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
    if first > last:  # within one row
        yield from _in_row(shape, last, begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _in_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        yield (slice(first, last), *(slice(0, length) for length in shape[1:]))
    if last * row < end:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Slices]:
    yield from ((slice(row, row + 1), *rest) for rest in boxes_of_range(shape[1:], begin, end))


def _intersection(box: Box, where: Slices) -> Slices | None:
    """Return the elements of the weight that are both in the tensor's box and in `where`; None if none is."""
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box.where, where))
    return both if all(along.start < along.stop for along in both) else None


def _tensor(box: Box, where: Slices, inside: Slices, values: Tensor, spread: bool) -> Any:
    """Return the values of a part of a box as a sharded tensor.

    Args:
        where: the place of `values` in the weight. inside: the part's place there.
        spread: whether data-parallel ranks have different elements, so that each writes its own.
    """
    start = tuple(s + a.start - b.start for s, a, b in zip(box.start, inside, box.where))
    own = tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inside, where))
    shape = tuple(along.stop - along.start for along in own)
    tensor = replace(box, start=start, shape=shape, where=own).tensor(values, AVERAGE)
    return tensor if spread else replace(tensor, replica_id=box.whole.replica_id)
