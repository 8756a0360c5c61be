"""Gradient buffers of the engine, and the units of a fully sharded model, on paper.

The second part allocates what `fully_shard` takes, when it takes it.

A tensor without storage cannot be sharded. So the planner traces the whole model and allocates, at the moments when a
unit of `FullyShardedDataParallel` is gathered, freed and reduced, tensors as large as what torch holds then:

- a gather: a flat output, from which the weights are copied; in the forward pass it stays until the next gather's copy;
- in the backward pass the unit that comes next is gathered behind the present one, not copied yet;
- a reduction: the unit's gradients, collected in fp32, which stays until the next reduction, and the shards' gradients;
- with a secondary partition: a machine's rank's part of the weights, from the forward to the backward pass;
- integers: what the real gathers and reductions allocate, which compute here but send nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.model.fully_sharded import Sharding, Unit, is_quantized, shard_axis
from megatron_moe.model.matrices import matrix_cost
from megatron_moe.parallel.groups import neighbours
from megatron_moe.parallel.quantized_collectives import QuantizedAllGather, QuantizedReduceScatter, Segments
from megatron_moe.platform.protocols import AutogradContext
from megatron_moe_tools.plan.meta_tracer import ranks_of

Rates = Mapping[float, int]
"""FLOPs of a step of Muon's iteration over the elements of a matrix -> how many elements have as many."""


@dataclass(frozen=True, kw_only=True)
class HeldTogether:
    """Weights whose gradients or shards are held together.

    parameter_bytes: of an element. ranks: those that share it, see `ranks_of`. expert: whether routed experts.
    rates: of the elements of a rank that Muon updates. largest_block: of the largest that it updates at once, on a
    tensor-parallel rank. largest_weight: elements that a rank has of the largest.
    """

    parameter_bytes: int
    ranks: tuple[int, ...]
    expert: bool
    rates: Rates
    largest_block: int = 0
    largest_weight: int = 0

    @property
    def matrices(self) -> int:
        """Elements of a rank that Muon updates."""
        return sum(self.rates.values())


@dataclass(frozen=True, kw_only=True)
class Buffer(HeldTogether):
    """A flat gradient buffer of the engine: elements with and without padding; it is reduced over `ranks`.

    fewest_matrices: elements that Muon updates on the rank that has fewest of them, where each updates a part.
    """

    numel: int
    used: int
    fewest_matrices: int
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True)
class GatheredUnit(HeldTogether):
    """Weights that a fully sharded model gathers together.

    segments: a rank's shards, padding included. neighbours: how many of the ranks are in a secondary partition, or else
    on a machine. is_island: whether `--keep-fp32` names it. is_root: whether it stays gathered until the end of the
    backward pass.
    """

    segments: Segments
    neighbours: int
    is_island: bool = False
    is_root: bool = False

    @property
    def share(self) -> int:
        """Elements of a rank's shards, padding included."""
        return sum(self.segments.lengths)


def _muon_facts(weights: Iterable[Tensor], numels: Iterable[int]) -> tuple[Rates, int]:
    """Return the rates of what Muon updates of marked weights, and the elements of its largest block."""
    rates: Counter[float] = Counter()
    largest = 0
    for weight, numel in zip(weights, numels):
        if (cost := matrix_cost(weight)) is not None:
            rates[cost.flops] += numel
            largest = max(largest, cost.block_numel)
    return rates, largest


def buffers_of(chunks: Sequence[Any]) -> Iterator[Buffer]:
    """Yield the gradient buffers of wrapped chunks."""
    for chunk, expert in itertools.product(chunks, (False, True)):
        for one in chunk.expert_parallel_buffers if expert else chunk.buffers:
            ranks = ranks_of(one.data_parallel_group)
            matrices = [0] * len(ranks)  # elements that Muon updates on each, where each bucket is cut among the ranks
            for parameter, (start, end, number) in one.param_index_map.items():
                if matrix_cost(parameter) is None:
                    continue
                bucket = one.buckets[number]
                share = bucket.grad_data.numel() // len(ranks)
                start, end = start - bucket.offset, end - bucket.offset
                for rank in range(start // share, -(-end // share)):
                    matrices[rank] += min(end, (rank + 1) * share) - max(start, rank * share)
            rates, largest = _muon_facts(one.param_index_map, map(Tensor.numel, one.param_index_map))
            yield Buffer(
                numel=one.numel,
                used=one.numel_unpadded,
                rates=rates,
                fewest_matrices=min(matrices),
                largest_block=largest,
                largest_weight=max(map(Tensor.numel, one.param_index_map)),
                parameter_bytes=one.param_dtype.itemsize,
                gradient_bytes=one.grad_dtype.itemsize,
                ranks=ranks,
                expert=expert,
            )


@dataclass
class PlannedUnit:
    """A unit of a fully sharded model: its own weights, and what of it is allocated at the moment."""

    unit: Unit
    facts: GatheredUnit
    weights: list[torch.nn.Parameter]
    output: Tensor | None = None
    gathered: Tensor | None = None
    secondary: Tensor | None = None
    shards: Tensor | None = None
    """The gradients of the shards."""
    uses: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Ranks that share it."""
        return len(self.facts.ranks)

    @property
    def whole(self) -> int:
        """Elements of the gathered weights, padding included."""
        return self.facts.share * self.ranks


def planned_units(found: Iterator[Unit], machine: int) -> list[PlannedUnit]:
    """Return the units with the weights that are each one's own; the last one is the root.

    Args:
        machine: ranks of the world in a secondary partition, or else on a machine.
    """
    planned: list[PlannedUnit] = []
    seen: set[int] = set()
    for unit in found:
        weights: list[torch.nn.Parameter] = []
        shares: list[int] = []
        quantized: list[bool] = []
        ranks = ranks_of(unit.group)
        for part in unit.module.modules():
            for weight in part.parameters(recurse=False):
                if id(weight) in seen:
                    continue
                seen.add(id(weight))
                weights.append(weight)
                # Every rank has memory for as many elements as the first one's shard has.
                length = weight.shape[shard_axis(tuple(weight.shape), len(ranks))]
                shares.append(weight.numel() // length * -(-length // len(ranks)))
                quantized.append(is_quantized(part, weight.shape) and not unit.is_island)
        rates, largest = _muon_facts(weights, shares)
        facts = GatheredUnit(
            segments=Segments(tuple(shares), tuple(quantized)),
            parameter_bytes=unit.dtype.itemsize,
            ranks=ranks,
            neighbours=neighbours(ranks, machine),
            expert=any(not getattr(weight, "allreduce", True) for weight in weights),
            is_island=unit.is_island,
            is_root=unit.is_root,
            rates=rates,
            largest_block=largest,
            largest_weight=max(shares, default=0),
        )
        planned.append(PlannedUnit(unit, facts, weights))
    return planned


class Gathering:
    """Hooks that allocate what the units of one model take. Use it as a context around its passes.

    Args:
        units: from `planned_units`.
        sharding: how weights and gradients are spread and sent.
        copies: whether the backend copies what it reduces: gloo does.
    """

    def __init__(self, units: list[PlannedUnit], sharding: Sharding, copies: bool) -> None:
        self._units, self._sharding, self._copies = units, sharding, copies
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
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

    def end_backward(self) -> None:
        """Do what torch does at the end of a backward pass: reduce what is not reduced yet, the root last of all."""
        for unit in self._units:
            self._after_backward(unit)
        self._order.clear()
        self._sent = None

    # What is allocated.

    def _start(self, unit: PlannedUnit) -> None:
        """Gather into a flat output, unless the unit is gathered already or its gather is on the way."""
        if unit.output is not None or unit.gathered is not None:
            return
        unit.output = torch.empty(unit.whole, dtype=unit.unit.dtype, device=platform.device())
        if self._sharding.quantized_weights and unit.secondary is None and unit.ranks > 1 and not unit.facts.is_island:
            _Gather(lambda: unit.facts.segments, unit.ranks)(
                unit.output, unit.output[: unit.facts.share], _ranks(unit.ranks)
            )

    def _finish(self, unit: PlannedUnit, in_forward: bool) -> None:
        """Copy the weights out of the flat output."""
        if unit.gathered is not None:
            return
        if in_forward:
            self._last_output = None
        unit.gathered = torch.empty(unit.whole, dtype=unit.unit.dtype, device=platform.device())
        if in_forward:
            self._last_output = unit.output
        unit.output = unit.secondary = None

    def _before_forward(self, unit: PlannedUnit, _: torch.nn.Module, inputs: tuple, named: dict) -> tuple[tuple, dict]:
        self._start(unit)
        self._finish(unit, in_forward=not _in_backward())
        leaves: list[Tensor] = []

        def seen(leaf: Tensor) -> Tensor:
            leaves.append(leaf)
            return leaf

        _with_grad((inputs, named), seen)
        if leaves and torch.is_grad_enabled():
            passed = dict(zip(leaves, _Passed.apply(partial(self._after_backward, unit), *leaves)))
            return _with_grad((inputs, named), passed.__getitem__)
        return inputs, named

    def _after_forward(self, unit: PlannedUnit, _: torch.nn.Module, inputs: tuple, output: object) -> None:
        if not _in_backward():
            if not unit.facts.is_root and not self._sharding.keep_gathered:
                self._free(unit)
            unit.uses.append(len(self._order))
            self._order.append(unit)
        if unit.facts.is_root:
            self._last_output = None

        def watched(leaf: Tensor) -> Tensor:
            leaf.register_hook(partial(self._before_backward, unit))
            return leaf

        _with_grad(output, watched)

    def _free(self, unit: PlannedUnit) -> None:
        """Free the gathered weights after a forward pass, but for what a secondary partition keeps of them."""
        partition = self._sharding.machine is not None and unit.facts.neighbours < unit.ranks
        if partition and unit.facts.neighbours == 1:
            return
        if partition:
            unit.secondary = torch.empty(
                unit.whole // unit.facts.neighbours, dtype=unit.unit.dtype, device=platform.device()
            )
        unit.gathered = None

    def _before_backward(self, unit: PlannedUnit, gradient: Tensor) -> Tensor:
        self._start(unit)
        self._finish(unit, in_forward=False)
        if unit.uses and (index := unit.uses.pop()):
            self._start(self._order[index - 1])
        return gradient

    def _after_backward(self, unit: PlannedUnit) -> None:
        unit.gathered = unit.output = unit.secondary = None
        unit.uses.clear()
        if all(weight.grad is None for weight in unit.weights):
            return
        self._sent = None
        self._sent = torch.empty(unit.whole, dtype=torch.float32, device=platform.device())
        last = unit.weights[-1].grad  # torch's loop variable holds on to it
        for weight in unit.weights:
            weight.grad = None
        reduced = torch.empty(unit.facts.share, dtype=torch.float32, device=platform.device())
        bits = self._sharding.gradient_bits
        if unit.ranks > 1 and bits is not None and not unit.facts.is_island:
            parts = (_ranks(unit.facts.neighbours), _ranks(unit.ranks // unit.facts.neighbours))
            inside, across = parts if 1 < unit.facts.neighbours < unit.ranks else (None, None)
            reduction = _Reduction(lambda: unit.facts.segments, bits, inside, across)
            reduction(reduced, self._sent, _ranks(unit.ranks), torch.distributed.ReduceOp.SUM)
        elif unit.ranks > 1 and self._copies:
            torch.empty_like(self._sent)  # gloo adds up in a copy of what is sent
        del last
        if unit.shards is None and not self._sharding.offload:
            unit.shards = reduced


def _ranks(count: int) -> Any:
    """Return what stands for a process group of so many ranks."""
    return SimpleNamespace(size=lambda: count)


class _Gather(QuantizedAllGather):
    def send(self, received: Tensor, packed: Tensor, group: object) -> None:
        """Send nothing."""


class _Reduction(QuantizedReduceScatter):
    def send(self, received: Tensor, packed: Tensor, group: object) -> None:
        """Send nothing."""


class _Passed(torch.autograd.Function):
    """The identity, whose backward calls a function when the gradients of all its inputs are there."""

    @staticmethod
    def forward(ctx: AutogradContext, then: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.then()
        return None, *gradients


def _with_grad(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return equal containers and dataclasses in which each tensor that needs a gradient is changed."""
    if isinstance(value, Tensor):
        return change(value) if value.requires_grad else value
    if isinstance(value, dict):
        return {key: _with_grad(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_with_grad(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **_with_grad(vars(value), change))
    return value


def _in_backward() -> bool:
    """Return whether autograd runs: a forward pass then is a recomputation."""
    return torch._C._current_graph_task_id() != -1
