"""Dispatchers, which send tokens to the ranks of their experts and bring the results back.

`dispatch` returns the rows an expert rank works on and a frozen plan; `combine` takes the plan and returns the sum of
the results to each token. The dispatcher has no state in between. The backward of a dispatch is a combine, and the
other way round: copies are summed in fp32 and cast back once, in both directions.

The experts of a layer live on the EP x ETP ranks of one group (ETP fastest). Each of those ranks has tokens of its own
(under tensor parallelism the sequence is split), so a token's row is sent to all ETP ranks of its expert's EP rank,
each of which computes with its slice of the expert, and the partial results are summed on the token's rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.setting import DISPATCHERS
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.moe.options import MoEGroups, MoEOptions
from megatron_moe.moe.routing import RoutingDecision, capacity
from megatron_moe.parallel.collectives import (
    all_gather_rows,
    all_to_all_rows,
    reduce_scatter_rows,
    room_for_rows,
    weights_behind,
)
from megatron_moe.platform import hardware
from megatron_moe.platform.hardware import HostCopy
from megatron_moe.platform.protocols import AutogradContext

# Rows are moved between token order and expert order with gathers in both directions. A permutation is stored as two
# index tables: `source` has the row that each copy comes from, `slots` the positions of a row's copies. Copying is a
# gather by `source`, and its gradient a gather by `slots` with a sum over the copies; summing copies is the same pair
# the other way round. No backward pass scatters, so the result is deterministic on every device, without atomics.
# Routing weights move with the rows, in the same kernels.


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


def _spread(rows: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    copies = rows.new_empty((source.shape[0], *rows.shape[1:]))
    spread_rows(rows, None, source, source, slots, copies, None)
    return copies


def _add_up(copies: Tensor, slots: Tensor, partial: bool) -> Tensor:
    return add_up_rows(copies, None, slots, partial, copies.shape[-1])[0]


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, source: Tensor, slots: Tensor, partial: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.partial = partial
        return _spread(rows, source, slots)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return _add_up(grad, slots, ctx.partial), None, None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, source: Tensor, slots: Tensor, partial: bool) -> Tensor:
        ctx.save_for_backward(source, slots)
        return _add_up(rows, slots, partial)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, slots = ctx.saved_tensors
        return _spread(grad, source, slots), None, None, None


def copy_rows(rows: Tensor, source: Tensor, slots: Tensor, partial: bool = False) -> Tensor:
    """Return copies [R, ...] of rows [T, ...], where copy r is row `source[r]`.

    Args:
        rows: [T, ...].
        source: [R] int64.
        slots: [T, C] int64, the positions of row t's copies. Every copy is in exactly one slot.
        partial: whether some slots are R, for a copy that is not here.

    Backward: row t's gradient is the sum of its copies' gradients, added in fp32.
    """
    return _CopyRows.apply(rows, source, slots, partial)


def sum_copies(rows: Tensor, source: Tensor, slots: Tensor, partial: bool = False) -> Tensor:
    """Return the sum [T, ...] of each token's rows [R, ...], the inverse direction of `copy_rows` by the same tables.

    Backward: each row's gradient is a copy of its token's gradient.
    """
    return _SumCopies.apply(rows, source, slots, partial)


@dataclass(frozen=True)
class ExpertInput:
    """The input of the experts of this rank.

    rows: [R, H], grouped by local expert. probs: [R] fp32. offsets: [e] int32, the end of each expert's rows.
    host_offsets: returns the offsets in the host's memory, where what they are made of is there anyway, for a backend
        that reads them; None elsewhere.
    """

    rows: Tensor
    probs: Tensor
    offsets: Tensor
    host_offsets: Callable[[], Tensor] | None = None


class Dispatcher(ABC):
    """A method of sending tokens to the ranks of `num_experts` experts, and the results back.

    Args:
        drops: whether decisions contain choices that are not kept and so are not dispatched. The number of rows then
            depends on the data, and the local dispatcher too has to wait for it on the host.
    """

    def __init__(self, num_experts: int, groups: MoEGroups, drops: bool = False) -> None:
        self.num_experts = num_experts
        self.groups = groups
        self.drops = drops
        self.num_local_experts = num_experts // groups.ep_size

    def destinations(self, decision: RoutingDecision) -> Tensor:
        """Return the expert of each choice, [T, K] int64; `num_experts`, which sorts last, for one that is not kept."""
        if decision.kept is None:
            return decision.expert_ids
        return decision.expert_ids.masked_fill(~decision.kept, self.num_experts)

    def rows_here(self, ends: Tensor) -> int:
        """Return the number of rows for this rank's experts, which the host waits for. ends: [e]."""
        return int(ends[-1])

    @abstractmethod
    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, Any]:
        """Return the local experts' rows, from hidden [T, H] and the decision [T, K], and the plan for `combine`."""

    @abstractmethod
    def combine(self, rows: Tensor, plan: Any) -> Tensor:
        """Return the sum of the experts' results [R, H] for each token, [T, H] in the same dtype."""


class PhasedDispatcher(Dispatcher):
    """A dispatcher in steps, so that a schedule can put the exchanges next to the work of another micro-batch.

    A dispatch is `prepare`, `send` and `arrange`, a combine is `collect`, `send_back` and `add_up`. Rows travel in
    `send` and `send_back`; the other steps work on this rank's rows. What has a gradient is passed from step to step as
    tensors, all else in the plan, which every step may replace.
    """

    @abstractmethod
    def prepare(self, hidden: Tensor, decision: RoutingDecision) -> tuple[tuple[Tensor, ...], Any]:
        """Return what `send` sends, from hidden [T, H] and the decision [T, K], and its plan."""

    @abstractmethod
    def send(self, leaving: tuple[Tensor, ...], plan: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Return what arrived at this rank, and the plan for `arrange`."""

    @abstractmethod
    def arrange(self, arrived: tuple[Tensor, ...], plan: Any) -> tuple[ExpertInput, Any]:
        """Return the local experts' rows, and the plan for the steps back."""

    @abstractmethod
    def collect(self, rows: Tensor, plan: Any) -> Tensor:
        """Return what `send_back` sends, from the experts' results [R, H]."""

    @abstractmethod
    def send_back(self, results: Tensor, plan: Any) -> Tensor:
        """Return the rows that came back to this rank."""

    @abstractmethod
    def add_up(self, returned_rows: Tensor, plan: Any) -> Tensor:
        """Return the sum of the results for each token, [T, H]."""

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, Any]:
        """See `Dispatcher.dispatch`."""
        return self.arrange(*self.send(*self.prepare(hidden, decision)))

    def combine(self, rows: Tensor, plan: Any) -> Tensor:
        """See `Dispatcher.combine`."""
        return self.add_up(self.send_back(self.collect(rows, plan), plan), plan)


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


def arrange_by_expert(
    hidden: Tensor, probs: Tensor, expert_ids: Tensor, num_experts: int, rows_here: Callable[[Tensor], int] | None
) -> tuple[ExpertInput, SortPlan]:
    """Return copies of hidden [T, H] grouped by expert, and the sort that made them, for `sum_copies`.

    Args:
        probs, expert_ids: [T, K], the weight and the expert of each choice.
        num_experts: experts whose choices are here.
        rows_here: how many choices these are, from the end of each expert's; None: all. Other choices have the id
            `num_experts`, which sorts last, and are cut off.
    """
    partial = rows_here is not None
    order, source, inverse, ends = sort_by_expert(expert_ids, num_experts, partial)
    if rows_here is not None:
        order, source, inverse = first_rows(order, source, inverse, rows_here(ends))
    plan = SortPlan(order, source, inverse.view(expert_ids.shape))
    rows, row_probs = _CopyWeighted.apply(hidden, probs, plan, partial, False)
    return ExpertInput(rows, row_probs, ends), plan


def first_rows(order: Tensor, source: Tensor, inverse: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first rows of a sort; in its inverse `num_rows` stands for rows that were cut off."""
    return order[:num_rows], source[:num_rows], inverse.clamp(max=num_rows)


class LocalDispatcher(Dispatcher):
    """A dispatcher for a rank that has all experts, which sorts and does not communicate."""

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, SortPlan]:
        rows_here = self.rows_here if self.drops else None
        return arrange_by_expert(hidden, decision.probs, self.destinations(decision), self.num_experts, rows_here)

    def combine(self, rows: Tensor, plan: SortPlan) -> Tensor:
        return sum_copies(rows, plan.source, plan.slots, partial=self.drops)


class AllGatherDispatcher(Dispatcher):
    """A dispatcher that gathers all tokens of the group on every rank and sums the results by a reduce-scatter in fp32.

    Each rank works on the tokens that chose its experts. This is cheaper than the all-to-all for few ranks or large K;
    T has to be the same on all ranks.
    """

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, SortPlan]:
        group, experts = self.groups.expert, self.num_local_experts
        tokens, probs = all_gather_rows(hidden, group), all_gather_rows(decision.probs, group)
        local_ids = all_gather_rows(self.destinations(decision), group) - self.groups.ep_rank * experts
        local_ids = local_ids.masked_fill((local_ids < 0) | (local_ids >= experts), experts)
        return arrange_by_expert(tokens, probs, local_ids, experts, self.rows_here)

    def combine(self, rows: Tensor, plan: SortPlan) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        sums = sum_copies(wide, plan.source, plan.slots, partial=True)
        return reduce_scatter_rows(sums, self.groups.expert).to(rows.dtype)


# ---- One all-to-all sends each row to its expert's ranks, with its weight, and another brings it back.


@dataclass(frozen=True)
class SendPlan:
    """What an exchange of rows needs, and what of it the host does not know yet.

    sent: the sort on the token's side, with one slot per chosen expert and ETP rank. counts_on_host [2, ranks, e]: on
    their way there, the rows to each rank and from each rank, for each of its experts. counts [ranks, e]: the latter.
    hidden, dtype: the width of rows, the weights' dtype.
    """

    sent: SortPlan
    counts_on_host: HostCopy
    counts: Tensor
    hidden: int
    dtype: torch.dtype

    def ends_on_host(self) -> Tensor:
        """Return the end of each local expert's rows, [e]; see `ExpertInput.host_offsets`."""
        return self.counts_on_host.result()[1].sum(dim=0).cumsum(dim=0)


@dataclass(frozen=True)
class RecvPlan:
    """A `SendPlan` whose rows have arrived. send_splits, recv_splits: rows to and from each rank."""

    send_plan: SendPlan
    send_splits: list[int]
    recv_splits: list[int]


@dataclass(frozen=True)
class ExchangePlan:
    """The plan of an all-to-all between two sorts.

    sent, send_splits, recv_splits: see `SendPlan` and `RecvPlan`. order, inverse [R]: from arrival order (by source
    rank) to expert order, and back.
    """

    sent: SortPlan
    send_splits: list[int]
    recv_splits: list[int]
    order: Tensor
    inverse: Tensor


class _CopyWeighted(torch.autograd.Function):
    """Copies of rows [T, H] with their weights [T, K], packed for one exchange or as two tensors."""

    @staticmethod
    def forward(
        ctx: AutogradContext, rows: Tensor, weights: Tensor, sort: SortPlan, partial: bool, packed: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.save_for_backward(sort.slots)
        ctx.hidden, ctx.shape, ctx.dtype, ctx.partial = rows.shape[1], weights.shape, weights.dtype, partial
        num_rows, hidden = sort.order.shape[0], rows.shape[1]
        if packed:
            whole = room_for_rows(num_rows, hidden, rows, weights)
            copies, copy_weights = whole[:, :hidden], weights_behind(whole, weights.dtype)
        else:
            copies, copy_weights = rows.new_empty((num_rows, hidden)), weights.new_empty(num_rows)
        spread_rows(rows, weights.flatten(), sort.order, sort.source, sort.slots, copies, copy_weights)
        return whole if packed else (copies, copy_weights)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        (slots,) = ctx.saved_tensors
        copies, weights = grads[0], weights_behind(grads[0], ctx.dtype) if len(grads) == 1 else grads[1]
        sharing = slots.numel() // max(ctx.shape.numel(), 1)
        of_rows, of_weights = add_up_rows(copies, weights, slots, ctx.partial, ctx.hidden, sharing)
        return of_rows, None if of_weights is None else of_weights.view(ctx.shape), None, None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, arrived: Tensor, order: Tensor, inverse: Tensor, hidden: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(order, inverse)
        ctx.dtype = dtype
        weights = weights_behind(arrived, dtype)
        rows, row_weights = arrived.new_empty((order.shape[0], hidden)), weights.new_empty(order.shape[0])
        spread_rows(arrived[:, :hidden], weights, order, order, inverse.unsqueeze(1), rows, row_weights)
        return rows, row_weights

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor, weights_grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        order, inverse = ctx.saved_tensors
        weights_grad, hidden = weights_grad.to(ctx.dtype), grad.shape[1]
        whole = room_for_rows(inverse.shape[0], hidden, grad, weights_grad)
        into = (whole[:, :hidden], weights_behind(whole, ctx.dtype))
        spread_rows(grad, weights_grad, inverse, inverse, order.unsqueeze(1), *into)
        return whole, None, None, None, None


def pack_weighted(rows: Tensor, weights: Tensor, sort: SortPlan, partial: bool) -> Tensor:
    """Return copies [R, W] of rows [T, H], each with its weight behind it, for one exchange: see `room_for_rows`.

    Args:
        rows, weights: [T, H] and [T, K].
        sort: of the weights, and of the rows with them, into the R copies.
        partial: as in `copy_rows`.

    Backward: the gradient is packed in the same way, by that of `unpack_weighted`, and means nothing in between: it may
    be sent, and not added to or rounded. A row's copies are summed in fp32.
    """
    return _CopyWeighted.apply(rows, weights, sort, partial, True)


def unpack_weighted(
    arrived: Tensor, order: Tensor, inverse: Tensor, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return rows [R, H] and weights [R] of what `pack_weighted` packed, in another order.

    Args:
        arrived: [R, W].
        order, inverse: [R], from this order to the other one, and back.
        hidden, dtype: the width of rows, the weights' dtype.
    """
    return _Unpack.apply(arrived, order, inverse, hidden, dtype)


class AllToAllDispatcher(PhasedDispatcher):
    """A dispatcher that sends each row to the ranks of its expert and its result back, by one all-to-all each way."""

    def prepare(self, hidden: Tensor, decision: RoutingDecision) -> tuple[tuple[Tensor, ...], SendPlan]:
        num_tokens, topk = decision.expert_ids.shape
        etp, group = self.groups.etp_size, self.groups.expert
        both = torch.empty((2, group.size(), self.num_local_experts), dtype=torch.int64, device=hidden.device)
        sent_counts, received_counts = both.unbind()
        counts = sent_counts.view(-1) if etp == 1 else sent_counts.new_empty(self.num_experts)
        sort = sort_by_expert(self.destinations(decision), self.num_experts, self.drops, counts)
        order, source, inverse, _ = sort
        if etp > 1:  # every ETP rank of an expert gets its rows
            by_rank = counts.view(self.groups.ep_size, self.num_local_experts)
            sent_counts.copy_(by_rank.repeat_interleave(etp, dim=0))
        dist.all_to_all_single(received_counts, sent_counts, group=group)
        copied = HostCopy(both)
        # Which rows leave may depend on the splits: on the number kept, or on where a rank's rows are copied. Else the
        # device gathers them while the host waits, in `send`.
        rows_to_ep = self.splits(copied)[0][::etp] if self.drops or etp > 1 else []
        if self.drops:
            order, source, inverse = first_rows(order, source, inverse, sum(rows_to_ep))
        if etp > 1:
            order, inverse = _with_copies(order, inverse, rows_to_ep, etp)
            source = order // topk
        sent = SortPlan(order, source, inverse.view(num_tokens, topk * etp))
        packed = pack_weighted(hidden, decision.probs, sent, self.drops)
        return (packed,), SendPlan(sent, copied, received_counts, hidden.shape[1], decision.probs.dtype)

    def send(self, leaving: tuple[Tensor, ...], plan: SendPlan) -> tuple[tuple[Tensor, ...], RecvPlan]:
        send_splits, recv_splits = self.splits(plan.counts_on_host)
        arrived = all_to_all_rows(leaving[0], send_splits, recv_splits, self.groups.expert)
        return (arrived,), RecvPlan(plan, send_splits, recv_splits)

    def arrange(self, arrived: tuple[Tensor, ...], plan: RecvPlan) -> tuple[ExpertInput, ExchangePlan]:
        send_plan = plan.send_plan
        order, inverse, ends = sort_arrived(send_plan.counts, sum(plan.recv_splits))
        rows, row_weights = unpack_weighted(arrived[0], order, inverse, send_plan.hidden, send_plan.dtype)
        back = ExchangePlan(send_plan.sent, plan.send_splits, plan.recv_splits, order, inverse)
        return ExpertInput(rows, row_weights, ends, send_plan.ends_on_host), back

    def splits(self, copied: HostCopy) -> tuple[list[int], list[int]]:
        """Return the rows to and from each rank of the group; the host waits for their copy."""
        to, of = copied.result().sum(dim=2).tolist()
        return to, of

    def collect(self, rows: Tensor, plan: ExchangePlan) -> Tensor:
        return copy_rows(rows, plan.inverse, plan.order.unsqueeze(1))

    def send_back(self, results: Tensor, plan: ExchangePlan) -> Tensor:
        return all_to_all_rows(results, plan.recv_splits, plan.send_splits, self.groups.expert)

    def add_up(self, returned_rows: Tensor, plan: ExchangePlan) -> Tensor:
        return sum_copies(returned_rows, plan.sent.source, plan.sent.slots, partial=self.drops)


def _with_copies(order: Tensor, inverse: Tensor, rows_to_ep: list[int], etp: int) -> tuple[Tensor, Tensor]:
    """Return the sorted choices with one copy per ETP rank, in the order they are sent, and the copies' positions.

    Args:
        order, inverse: [N] and [T x K], of the sort by expert; N in the inverse for a choice that is not sent.
        rows_to_ep: rows for each EP rank; they are contiguous in the sort.
        etp: the number of copies of each choice.

    Returns:
        choice [N x ETP] that each sent row carries, and slots [T x K, ETP] of each choice.
    """
    position = torch.arange(order.shape[0], device=order.device)
    blocks = position.split(rows_to_ep)
    sent_position = torch.cat([block for block in blocks for _ in range(etp)])
    # A block that starts at row s of the sort starts at row s x ETP of the sent rows; its copies follow one another.
    starts = torch.cat([torch.full_like(block, int(s)) for s, block in zip(accumulate(rows_to_ep, initial=0), blocks)])
    lengths = torch.cat([torch.full_like(block, block.shape[0]) for block in blocks])
    copies = torch.arange(etp, device=order.device)
    sent_slot = (starts * etp + (position - starts)).unsqueeze(1) + lengths.unsqueeze(1) * copies
    behind = sent_slot.new_full((1, etp), order.shape[0] * etp)
    return order[sent_position], torch.cat([sent_slot, behind])[inverse]


# ---- Padding of rows to the experts' capacity.


@dataclass(frozen=True)
class PaddedPlan:
    """The plan of a padded dispatch.

    inner: the wrapped dispatcher's plan. slots [R]: the padded row of each of its R rows. sources [e x P, 1]: the row
    that each padded row comes from; R for padding.
    """

    inner: Any
    slots: Tensor
    sources: Tensor


class PaddedDispatcher(Dispatcher):
    """A dispatcher that pads every expert's rows to a fixed number, so that all steps have the same shapes.

    The number is an expert's capacity for each micro-batch that the expert-parallel ranks have together. The padding is
    rows of zeros with weight 0: they come out of an expert as zeros, are not combined, and add zeros to its gradients.

    Args:
        inner: the dispatcher that sends the tokens, without choices beyond the capacity.
    """

    def __init__(self, inner: Dispatcher, groups: MoEGroups, factor: float) -> None:
        super().__init__(inner.num_experts, groups, drops=True)
        self.inner, self.factor = inner, factor
        self.num_micro_batches = micro_batches_among(groups.expert.size(), groups.tp_cp.size())

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, PaddedPlan]:
        expert_input, plan = self.inner.dispatch(hidden, decision)
        ends, num_rows = expert_input.offsets.long(), expert_input.rows.shape[0]
        # The rows of every local expert, from the number of tokens of this rank.
        num_tokens, topk = decision.expert_ids.shape
        size = capacity(num_tokens * self.groups.tp_cp.size(), topk, self.num_experts, self.factor)
        size = min(size * self.num_micro_batches, num_tokens * self.groups.expert.size())
        row = torch.arange(num_rows, device=hidden.device)
        expert = torch.searchsorted(ends, row, right=True)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        slots = expert * size + row - starts[expert]
        sources = row.new_full((self.num_local_experts * size,), num_rows)
        sources[slots] = row
        padded = PaddedPlan(plan, slots, sources.unsqueeze(1))
        full = torch.arange(1, self.num_local_experts + 1, device=hidden.device, dtype=torch.int32) * size
        # A padded row is the sum of one row, or of none.
        rows = sum_copies(expert_input.rows, padded.slots, padded.sources, partial=True)
        probs = sum_copies(expert_input.probs, padded.slots, padded.sources, partial=True)
        return ExpertInput(rows, probs, full), padded

    def combine(self, rows: Tensor, plan: PaddedPlan) -> Tensor:
        return self.inner.combine(copy_rows(rows, plan.slots, plan.sources, partial=True), plan.inner)


def micro_batches_among(expert_ranks: int, sharing_ranks: int) -> int:
    """Return the largest number of micro-batches that the ranks of one expert-parallel group can have parts of.

    Both groups are blocks of neighbouring ranks: one within the other, or cut at both ends.
    """
    if expert_ranks % sharing_ranks == 0:
        return expert_ranks // sharing_ranks
    return 1 if sharing_ranks % expert_ranks == 0 else expert_ranks // sharing_ranks + 2


DISPATCHERS.register("allgather", AllGatherDispatcher)
DISPATCHERS.register("alltoall", AllToAllDispatcher)


def build_dispatcher(
    kind: str, num_experts: int, groups: MoEGroups, drops: bool = False, **settings: Any
) -> Dispatcher:
    """Return the dispatcher for `--moe-token-dispatcher-type`; without expert parallelism it is the local one.

    Args:
        kind: an entry of `DISPATCHERS`.
        drops: whether experts have a capacity.
        settings: what this kind's entry takes besides.

    Raises:
        ValueError: for a kind that is not registered, or experts that do not divide among the ranks.
    """
    if num_experts % groups.ep_size:
        raise ValueError(
            f"--num-experts {num_experts} is not a multiple of --expert-model-parallel-size {groups.ep_size}"
        )
    build = DISPATCHERS[kind]
    if groups.expert.size() == 1:
        return LocalDispatcher(num_experts, groups, drops)
    return build(num_experts, groups, drops, **settings)


def build_layer_dispatcher(options: MoEOptions, groups: MoEGroups) -> Dispatcher:
    """Return the dispatcher of a layer with these options."""
    factor, settings = options.capacity_factor, options.dispatcher_settings
    inner = build_dispatcher(options.dispatcher, options.num_experts, groups, factor is not None, **settings)
    return inner if factor is None or not options.pad_to_capacity else PaddedDispatcher(inner, groups, factor)
