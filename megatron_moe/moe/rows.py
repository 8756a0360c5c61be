"""Rows on their way between token order and expert order: how they are sorted, copied, packed and added up.

Rows are moved with gathers in both directions. A permutation is stored as two index tables: `source` has the row that
each copy comes from, `slots` the positions of a row's copies. Copying is a gather by `source`, and its gradient a
gather by `slots` with a sum over the copies; summing copies is the same pair the other way round. No backward pass
scatters, so the result is deterministic on every device, without atomics. Routing weights move with the rows, in the
same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.kernels.choice import has_kernel
from megatron_moe.parallel.collectives import exchange_rows, room_for_rows, weights_behind
from megatron_moe.platform import hardware
from megatron_moe.platform.protocols import AutogradContext


@has_kernel("spread_rows")
def spread_rows(
    rows: Tensor,
    weights: Tensor | None,
    order: Tensor,
    source: Tensor,
    slots: Tensor,
    copies: Tensor,
    copy_weights: Tensor | None,
) -> None:
    """Write copies of rows [T, ...], and of weights [N], into `copies` [R, ...] and `copy_weights` [R].

    All but the tables may be views of packed rows: see `room_for_rows`.

    Args:
        order, source: [R] int64, the weight and the row of each copy.
        slots: [T, C] int64, the positions of row t's copies, or R and more for one that is not here. Neighbours may
            share a weight: there are C / (N / T) copies of each.
    """
    torch.index_select(rows, 0, source, out=copies)
    if weights is not None and copy_weights is not None:
        torch.index_select(weights, 0, order, out=copy_weights)


@has_kernel("add_up_rows")
def add_up_rows(
    copies: Tensor, copy_weights: Tensor | None, slots: Tensor, partial: bool, hidden: int, sharing: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return sums of copies by row, [T, ...], added in fp32 or wider and rounded once, and of their weights, [N].

    Args:
        copies, copy_weights: [R, ...], [R]; packed rows (see `room_for_rows`) may be wider than what is added up.
        slots: [T, C]. partial: whether some are R, for a copy that is not here.
        hidden: the columns that are added up.
        sharing: neighbouring copies that share a weight.
    """
    rows = _sums(copies, slots, partial)
    if rows.dim() == 2 and rows.shape[1] > hidden:
        rows = rows[:, :hidden].contiguous()
    if copy_weights is None:
        return rows, None
    return rows, _sums(copy_weights.contiguous(), slots.view(-1, sharing), partial)


def _sums(copies: Tensor, slots: Tensor, partial: bool) -> Tensor:
    if partial:
        copies = torch.cat([copies, copies.new_zeros((1, *copies.shape[1:]))])
    if slots.shape[1] == 1:
        return copies.index_select(0, slots.squeeze(1))
    if copies.dim() == 2 and hardware.on_cpu(copies):
        # On a CPU the bag kernel reads each row once, adds in fp32 and builds no [T, C, H] tensor.
        return F.embedding_bag(slots, copies, mode="sum")
    found = copies.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    return found.sum(dim=1, dtype=torch.promote_types(copies.dtype, torch.float32)).to(copies.dtype)


class RowStep(Protocol):
    """A linear step on the way of rows.

    forward takes what the step before has returned, backward the gradients of what this one has.
    """

    def forward(self, *tensors: Any) -> tuple[Tensor, ...]: ...

    def backward(self, *grads: Any) -> tuple[Tensor, ...]: ...


Do = Callable[..., tuple[Tensor, ...]]
"""Takes a step and its tensors, and returns the step's results."""


class _Step(torch.autograd.Function):
    """A step as a node of the graph. What it needs in backward are its own tables."""

    @staticmethod
    def forward(ctx: AutogradContext, step: RowStep, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        return step.forward(*tensors)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.step.backward(*grads)


class CopyRows(_Step):
    """A step that copies."""


class _SumCopies(_Step):
    """A step that adds up."""


in_graph: Do = _Step.apply


class Way(torch.autograd.Function):
    """Several steps as one node: those that `work` does with the `Do` it is given. tensors: of the first step."""

    @staticmethod
    def forward(ctx: AutogradContext, work: Callable[[Do], tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.steps = steps = []

        def do(step: RowStep, *tensors: Tensor) -> tuple[Tensor, ...]:
            steps.append(step)
            return step.forward(*tensors)

        return work(do)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for step in reversed(ctx.steps):
            grads = step.backward(*grads)
        return None, *grads


@dataclass
class Copies:
    source: Tensor
    slots: Tensor
    partial: bool

    def forward(self, rows: Tensor) -> tuple[Tensor]:
        copies = rows.new_empty((self.source.shape[0], *rows.shape[1:]))
        spread_rows(rows, None, self.source, self.source, self.slots, copies, None)
        return (copies,)

    def backward(self, rows: Tensor) -> tuple[Tensor]:
        return (add_up_rows(rows, None, self.slots, self.partial, rows.shape[-1])[0],)


class Sums(Copies):
    forward, backward = Copies.backward, Copies.forward


def copy_rows(rows: Tensor, source: Tensor, slots: Tensor, partial: bool = False) -> Tensor:
    """Return copies [R, ...] of rows [T, ...], where copy r is row `source[r]`.

    Args:
        rows: [T, ...].
        source: [R] int64.
        slots: [T, C] int64, the positions of row t's copies. Every copy is in exactly one slot.
        partial: whether some slots are R, for a copy that is not here.

    Backward: row t's gradient is the sum of its copies' gradients, added in fp32.
    """
    return CopyRows.apply(Copies(source, slots, partial), rows)[0]


def sum_copies(rows: Tensor, source: Tensor, slots: Tensor, partial: bool = False) -> Tensor:
    """Return the sum [T, ...] of each token's rows [R, ...], the inverse direction of `copy_rows` by the same tables.

    Backward: each row's gradient is a copy of its token's gradient.
    """
    return _SumCopies.apply(Sums(source, slots, partial), rows)[0]


@dataclass(frozen=True)
class SortPlan:
    """A sort of choices by expert.

    order, source [R]: the choice and the token of each row. slots [T, C]: the rows of each token.
    """

    order: Tensor
    source: Tensor
    slots: Tensor


@has_kernel("sort_by_expert")
def sort_by_expert(
    expert_ids: Tensor, num_experts: int, partial: bool = False, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the order of the choices by expert, stable in the token, and what belongs to it.

    Args:
        expert_ids: [T, K] int64, from 0 to `num_experts` - 1, with `partial` up to `num_experts`, which sorts last.
        counts: memory [E] int64 for the choices of each expert; None: they are not counted.

    Returns:
        order, source: [T x K] int64, the choice and the token of each row.
        inverse: [T x K], the row of each choice.
        ends: [E] int32, each expert's end in the order.
    """
    ids = expert_ids.flatten()
    sorted_ids, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(sorted_ids, experts, right=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    if counts is not None:
        torch.diff(ends, prepend=ends.new_zeros(1), out=counts)
    return order, order // expert_ids.shape[1], inverse, ends.to(torch.int32)


@has_kernel("sort_arrived")
def sort_arrived(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order by expert of rows that arrived by rank and expert, its inverse, and each expert's end, int32.

    Args:
        counts: [ranks, e] int64, the rows of each rank for each expert.
        num_rows: their sum.
    """
    cells = counts.flatten()
    by_expert = counts.t().flatten()
    arrived_at = cells.cumsum(0) - cells
    sorted_at = (by_expert.cumsum(0) - by_expert).view(counts.shape[1], -1).t().flatten()
    row = torch.arange(num_rows, device=counts.device)
    inverse = row + (sorted_at - arrived_at).repeat_interleave(cells, output_size=num_rows)
    order = torch.empty_like(inverse)
    order[inverse] = row
    return order, inverse, counts.sum(dim=0).cumsum(dim=0).to(torch.int32)


def first_rows(order: Tensor, source: Tensor, inverse: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first rows of a sort; in its inverse `num_rows` stands for rows that were cut off."""
    return order[:num_rows], source[:num_rows], inverse.clamp(max=num_rows)


Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""What `spread_rows` reads: rows, weights, order, source and slots."""


@dataclass
class WeightedCopies:
    """Copies of rows [T, H], each with its weight of those [T, K]."""

    sort: SortPlan
    partial: bool
    hidden: int
    shape: torch.Size

    def forward(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        num_rows = self.sort.order.shape[0]
        copies, copy_weights = rows.new_empty((num_rows, self.hidden)), weights.new_empty(num_rows)
        self.copy(rows, weights, copies, copy_weights)
        return copies, copy_weights

    def copy(self, rows: Tensor, weights: Tensor, copies: Tensor, copy_weights: Tensor) -> None:
        spread_rows(*self.operands(rows, weights), copies, copy_weights)

    def operands(self, rows: Tensor, weights: Tensor) -> Operands:
        """Return what `spread_rows` reads."""
        return rows, weights.flatten(), self.sort.order, self.sort.source, self.sort.slots

    def backward(self, grad: Tensor, weights_grad: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.sort.slots
        sharing = slots.numel() // max(self.shape.numel(), 1)
        of_rows, of_weights = add_up_rows(grad, weights_grad, slots, self.partial, self.hidden, sharing)
        assert of_weights is not None
        return of_rows, of_weights.view(self.shape)


@dataclass
class Packed(WeightedCopies):
    """The same, packed for one exchange: see `room_for_rows`.

    The gradient is packed in the same way, by `Unpacked`, and means nothing in between: it may be sent, and not added
    to or rounded.
    """

    dtype: torch.dtype

    def forward(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        whole = room_for_rows(self.sort.order.shape[0], self.hidden, rows, weights)
        self.copy(rows, weights, whole[:, : self.hidden], weights_behind(whole, self.dtype))
        return (whole,)

    def backward(self, whole: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().backward(whole, weights_behind(whole, self.dtype))


@dataclass
class Exchanged:
    send_splits: list[int]
    recv_splits: list[int]
    group: ProcessGroup

    def forward(self, rows: Tensor) -> tuple[Tensor]:
        return (exchange_rows(rows, self.send_splits, self.recv_splits, self.group),)

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (exchange_rows(grad, self.recv_splits, self.send_splits, self.group),)


@dataclass
class Unpacked:
    """Rows [R, H] and weights [R] of packed ones, in another order."""

    order: Tensor
    inverse: Tensor
    hidden: int
    dtype: torch.dtype
    partial = False

    def forward(self, arrived: Tensor) -> tuple[Tensor, ...]:
        num_rows, weights = self.order.shape[0], weights_behind(arrived, self.dtype)
        rows, row_weights = arrived.new_empty((num_rows, self.hidden)), weights.new_empty(num_rows)
        spread_rows(*self.operands(arrived, weights), rows, row_weights)
        return rows, row_weights

    def operands(self, arrived: Tensor, weights: Tensor) -> Operands:
        """Return what `spread_rows` reads."""
        return arrived.narrow(1, 0, self.hidden), weights, self.order, self.order, self.inverse.unsqueeze(1)

    def backward(self, grad: Tensor, weights_grad: Tensor) -> tuple[Tensor]:
        inverse, weights_grad = self.inverse, weights_grad.to(self.dtype)
        whole = room_for_rows(inverse.shape[0], self.hidden, grad, weights_grad)
        into = (whole[:, : self.hidden], weights_behind(whole, self.dtype))
        spread_rows(grad, weights_grad, inverse, inverse, self.order.unsqueeze(1), *into)
        return (whole,)


def unpack_weighted(
    arrived: Tensor, order: Tensor, inverse: Tensor, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return rows [R, H] and weights [R] of rows that were packed with their weights, in another order.

    Args:
        arrived: [R, W].
        order, inverse: [R], from this order to the other one, and back.
        hidden, dtype: the width of rows, the weights' dtype.
    """
    rows, row_weights = in_graph(Unpacked(order, inverse, hidden, dtype), arrived)
    return rows, row_weights
