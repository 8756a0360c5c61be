"""Gathering and reducing in a traced model: the memory that `fully_shard` takes, allocated when it takes it.

A tensor without storage cannot be sharded. So the planner traces the whole model and allocates, at the moments when a
unit of `FullyShardedDataParallel` is gathered, freed and reduced, tensors as large as what torch holds then:

- a gather: a flat output, from which the weights are copied; in the forward pass it stays until the next gather's copy;
- in the backward pass the unit that comes next is gathered behind the present one, not copied yet;
- a reduction: the unit's gradients, collected in fp32, which stays until the next reduction, and the shards' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.model.fully_sharded import Unit, shard_axis


@dataclass
class PlannedUnit:
    """A unit of a fully sharded model: its own weights, and what of it is allocated at the moment."""

    unit: Unit
    weights: list[torch.nn.Parameter]
    share: int
    """Elements of one rank's shards, padding included."""
    ranks: int
    output: Tensor | None = None
    gathered: Tensor | None = None
    shards: Tensor | None = None
    """The gradients of the shards."""
    uses: list[int] = field(default_factory=list)

    @property
    def whole(self) -> int:
        """Elements of the gathered weights, padding included."""
        return self.share * self.ranks


def planned_units(found: Iterator[Unit]) -> list[PlannedUnit]:
    """Return the units with the weights that are each one's own; the last one is the root."""
    planned: list[PlannedUnit] = []
    seen: set[int] = set()
    for unit in found:
        weights = list({id(one): one for one in unit.module.parameters() if id(one) not in seen}.values())
        seen.update(map(id, weights))
        ranks = unit.group.size()
        planned.append(PlannedUnit(unit, weights, sum(largest_share(one.shape, ranks) for one in weights), ranks))
    return planned


def largest_share(shape: torch.Size, ranks: int) -> int:
    """Return the elements of a weight's shard on the first rank; every rank has memory for as many."""
    length = shape[shard_axis(tuple(shape), ranks)]
    return math.prod(shape) // length * -(-length // ranks)


class Gathering:
    """Hooks that allocate what the units of one model take. Use it as a context around its passes.

    Args:
        units: from `planned_units`.
        keep_gathered: whether gathered weights stay until the backward pass (stage 2).
        copies: whether the backend copies what it reduces: gloo does.
    """

    def __init__(self, units: list[PlannedUnit], keep_gathered: bool, copies: bool) -> None:
        self._units, self._keep, self._copies = units, keep_gathered, copies
        self._handles: list[Any] = []
        self._order: list[PlannedUnit] = []
        self._last_output: Tensor | None = None
        self._sent: Tensor | None = None

    def __enter__(self) -> Gathering:
        for unit in self._units:
            module = unit.unit.module
            before = partial(self._before_forward, unit)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._after_forward, unit)))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._last_output = self._sent = None

    def forget_gradients(self) -> None:
        """Forget the gradients of the shards, as at the start of a step."""
        for unit in self._units:
            unit.shards = None

    def end_backward(self) -> None:
        """Do what torch does at the end of a backward pass: reduce what is not reduced yet, the root last of all."""
        for unit in self._units:
            self._after_backward(unit)
        self._order.clear()
        self._sent = None

    # What is allocated.

    def _start(self, unit: PlannedUnit) -> None:
        """Gather into a flat output, unless the unit is gathered already or its gather is on the way."""
        if unit.output is None and unit.gathered is None:
            unit.output = torch.empty(unit.whole, dtype=unit.unit.dtype, device=platform.device())

    def _finish(self, unit: PlannedUnit, in_forward: bool) -> None:
        """Copy the weights out of the flat output."""
        if unit.gathered is not None:
            return
        if in_forward:
            self._last_output = None
        unit.gathered = torch.empty(unit.whole, dtype=unit.unit.dtype, device=platform.device())
        if in_forward:
            self._last_output = unit.output
        unit.output = None

    def _before_forward(self, unit: PlannedUnit, _: Any, inputs: Any, named: Any) -> Any:
        self._start(unit)
        self._finish(unit, in_forward=not _in_backward())
        if not torch.is_grad_enabled():
            return inputs, named
        leaves = [leaf for leaf in _tensors((inputs, named)) if leaf.requires_grad]
        if not leaves:
            return inputs, named
        passed = dict(zip(map(id, leaves), _Passed.apply(partial(self._after_backward, unit), *leaves)))
        return _replaced((inputs, named), passed)

    def _after_forward(self, unit: PlannedUnit, _: Any, __: Any, output: Any) -> None:
        if not _in_backward():
            if not unit.unit.is_root and not self._keep:
                unit.gathered = None
            unit.uses.append(len(self._order))
            self._order.append(unit)
        if unit.unit.is_root:
            self._last_output = None
        for leaf in _tensors(output):
            if leaf.requires_grad:
                leaf.register_hook(partial(self._before_backward, unit))

    def _before_backward(self, unit: PlannedUnit, gradient: Tensor) -> Tensor:
        self._start(unit)
        self._finish(unit, in_forward=False)
        if unit.uses and (index := unit.uses.pop()):
            self._start(self._order[index - 1])
        return gradient

    def _after_backward(self, unit: PlannedUnit) -> None:
        unit.gathered = unit.output = None
        unit.uses.clear()
        if all(weight.grad is None for weight in unit.weights):
            return
        self._sent = None
        self._sent = torch.empty(unit.whole, dtype=torch.float32, device=platform.device())
        last = unit.weights[-1].grad  # torch's loop variable holds on to it
        for weight in unit.weights:
            weight.grad = None
        reduced = torch.empty(unit.share, dtype=torch.float32, device=platform.device())
        # gloo adds up in a copy of what is sent.
        copy = torch.empty_like(self._sent) if self._copies and unit.ranks > 1 else None
        del last, copy
        if unit.shards is None:
            unit.shards = reduced


class _Passed(torch.autograd.Function):
    """The identity, whose backward calls a function when the gradients of all its inputs are there."""

    @staticmethod
    def forward(ctx: Any, then: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.then()
        return None, *gradients


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
    elif is_dataclass(value):
        yield from _tensors(vars(value))


def _replaced(value: Any, instead: dict[int, Tensor]) -> Any:
    """Return equal containers and dataclasses with other tensors, by the ids of the old ones."""
    if isinstance(value, Tensor):
        return instead.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replaced(part, instead) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_replaced(part, instead) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **_replaced(vars(value), instead))
    return value


def _in_backward() -> bool:
    """Return whether autograd runs: a forward pass then is a recomputation."""
    return torch._C._current_graph_task_id() != -1
