"""The dispatcher that sends each row to its expert's ranks by one all-to-all, with its weight, and back by another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.moe.dispatch import (
    ExpertInput,
    PhasedDispatcher,
    SortPlan,
    copy_rows,
    first_rows,
    sort_kept,
    sum_copies,
    sum_rows,
)
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe.parallel.collectives import all_to_all_rows, packed_rows, trailing_weights
from megatron_moe.platform.hardware import HostCopy
from megatron_moe.platform.protocols import AutogradContext


@dataclass(frozen=True)
class SendPlan:
    """What an exchange of rows needs, and what of it the host does not know yet.

    sent: the sort on the token's side, with one slot per chosen expert and ETP rank. splits: on their way to the host.
    counts [ranks, e]: rows from each rank for each local expert. hidden, dtype: the width of rows, the weights' dtype.
    """

    sent: SortPlan
    splits: HostCopy
    counts: Tensor
    hidden: int
    dtype: torch.dtype


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


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, rows: Tensor, weights: Tensor, sent: SortPlan, weighed: SortPlan, partial: bool
    ) -> Tensor:
        ctx.save_for_backward(sent.slots, weighed.slots)
        ctx.hidden, ctx.dtype, ctx.partial = rows.shape[1], weights.dtype, partial
        return packed_rows(rows, weights, sent.source, weighed.source)

    @staticmethod
    def backward(ctx: AutogradContext, returned_rows: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        row_slots, weight_slots = ctx.saved_tensors
        of_weights = sum_rows(trailing_weights(returned_rows, ctx.hidden, ctx.dtype), weight_slots, ctx.partial)
        # Sums of whole rows, of which the last elements mean nothing: `sum_rows` would copy a part of rows.
        of_rows = sum_rows(returned_rows, row_slots, ctx.partial)[:, : ctx.hidden].contiguous()
        return of_rows, of_weights, None, None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, arrived: Tensor, order: Tensor, inverse: Tensor, hidden: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(inverse)
        ctx.dtype = dtype
        weights = trailing_weights(arrived, hidden, dtype)
        return arrived[:, :hidden].index_select(0, order), weights.index_select(0, order)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor, weights_grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return packed_rows(grad, weights_grad.to(ctx.dtype), inverse, inverse), None, None, None, None


def pack_weighted(rows: Tensor, weights: Tensor, sent: SortPlan, weighed: SortPlan, partial: bool) -> Tensor:
    """Return copies [R, H + W] of rows [T, H], each with the bytes of its weight, for one exchange: see `packed_rows`.

    Args:
        rows, weights: [T, H] and [T x K].
        sent, weighed: the sorts of rows, and of weights, into the R copies.
        partial: as in `copy_rows`.

    Backward: the gradient is packed in the same way, by that of `unpack_weighted`, and means nothing in between: it may
    be sent, and not added to or rounded. A row's copies are summed in fp32.
    """
    return _Pack.apply(rows, weights, sent, weighed, partial)


def unpack_weighted(
    arrived: Tensor, order: Tensor, inverse: Tensor, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return rows [R, H] and weights [R] of what `pack_weighted` packed, in another order.

    Args:
        arrived: [R, H + W].
        order, inverse: [R], from this order to the other one, and back.
        hidden, dtype: the width of rows, the weights' dtype.
    """
    return _Unpack.apply(arrived, order, inverse, hidden, dtype)


class AllToAllDispatcher(PhasedDispatcher):
    """A dispatcher that sends each row to the ranks of its expert and its result back, by one all-to-all each way."""

    def prepare(self, hidden: Tensor, decision: RoutingDecision) -> tuple[tuple[Tensor, ...], SendPlan]:
        num_tokens, topk = decision.expert_ids.shape
        etp, group = self.groups.etp_size, self.groups.expert
        order, inverse, ends = sort_kept(self.destinations(decision), self.num_experts, self.drops)
        counts = ends.diff(prepend=ends.new_zeros(1)).view(self.groups.ep_size, self.num_local_experts)
        sent_counts = counts.repeat_interleave(etp, dim=0)  # [ranks, e]: every ETP rank of an expert gets its rows
        received_counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(received_counts, sent_counts, group=group)
        ends_here = received_counts.sum(dim=0).cumsum(dim=0)
        copied = HostCopy(torch.cat([counts.sum(dim=1), received_counts.sum(dim=1), ends_here]))
        # Which rows leave may depend on the splits: on the number kept, or on where a rank's rows are copied. Else the
        # device gathers them while the host waits, in `send`.
        rows_to_ep = self.splits(copied)[0] if self.drops or etp > 1 else []
        if self.drops:
            order, inverse = first_rows(order, inverse, sum(rows_to_ep))
        pairs, slots = _with_copies(order, inverse, rows_to_ep, etp)
        sent = SortPlan(source=pairs // topk, slots=slots.view(num_tokens, topk * etp))
        probs = decision.probs.flatten()
        packed = pack_weighted(hidden, probs, sent, SortPlan(source=pairs, slots=slots), self.drops)
        return (packed,), SendPlan(sent, copied, received_counts, hidden.shape[1], probs.dtype)

    def send(self, leaving: tuple[Tensor, ...], plan: SendPlan) -> tuple[tuple[Tensor, ...], RecvPlan]:
        rows_to_ep, recv_splits = self.splits(plan.splits)
        send_splits = [n for n in rows_to_ep for _ in range(self.groups.etp_size)]
        arrived = all_to_all_rows(leaving[0], send_splits, recv_splits, self.groups.expert)
        return (arrived,), RecvPlan(plan, send_splits, recv_splits)

    def arrange(self, arrived: tuple[Tensor, ...], plan: RecvPlan) -> tuple[ExpertInput, ExchangePlan]:
        send_plan, num_rows = plan.send_plan, sum(plan.recv_splits)
        counts = send_plan.counts.flatten()
        local_experts = torch.arange(self.num_local_experts, device=counts.device).repeat(self.groups.expert.size())
        arrived_ids = local_experts.repeat_interleave(counts, output_size=num_rows)
        order, inverse, ends = sort_kept(arrived_ids, self.num_local_experts, drops=False)
        rows, row_weights = unpack_weighted(arrived[0], order, inverse, send_plan.hidden, send_plan.dtype)
        host_offsets = send_plan.splits.result()[-self.num_local_experts :]
        back = ExchangePlan(send_plan.sent, plan.send_splits, plan.recv_splits, order, inverse)
        return ExpertInput(rows, row_weights, ends.to(torch.int32), host_offsets), back

    def splits(self, copied: HostCopy) -> tuple[list[int], list[int]]:
        """Return the rows for each EP rank and from each rank of the group; the host waits for their copy."""
        rows = copied.result()[: -self.num_local_experts].tolist()
        return rows[: self.groups.ep_size], rows[self.groups.ep_size :]

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
    if etp == 1:
        return order, inverse.unsqueeze(1)
    position = torch.arange(order.shape[0], device=order.device)
    blocks = position.split(rows_to_ep)
    sent_position = torch.cat([block for block in blocks for _ in range(etp)])
    # A block that starts at row s of the sort starts at row s x ETP of the sent rows; its copies follow one another.
    starts = torch.cat([torch.full_like(block, int(s)) for s, block in zip(_starts(rows_to_ep), blocks)])
    lengths = torch.cat([torch.full_like(block, block.shape[0]) for block in blocks])
    copies = torch.arange(etp, device=order.device)
    sent_slot = (starts * etp + (position - starts)).unsqueeze(1) + lengths.unsqueeze(1) * copies
    behind = sent_slot.new_full((1, etp), order.shape[0] * etp)
    return order[sent_position], torch.cat([sent_slot, behind])[inverse]


def _starts(lengths: list[int]) -> list[int]:
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return starts
