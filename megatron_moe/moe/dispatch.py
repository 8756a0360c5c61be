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
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.setting import DISPATCHERS
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.moe.options import MoEGroups
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe.parallel.collectives import all_gather_rows, reduce_scatter_rows
from megatron_moe.platform import hardware
from megatron_moe.platform.protocols import AutogradContext

# Rows are moved between token order and expert order with gathers in both directions. A permutation is stored as two
# index tables: `source` has the row that each copy comes from, `slots` the positions of a row's copies. Copying is a
# gather by `source`, and its gradient a gather by `slots` with a sum over the copies; summing copies is the same pair
# the other way round. No backward pass scatters, so the result is deterministic on every device, without atomics.


@has_kernel("gather_rows")
def gather_rows(rows: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    """Return copies [R, ...] of rows [T, ...]; the tables are those of `copy_rows`."""
    return rows.index_select(0, source)


@has_kernel("sum_rows")
def sum_rows(copies: Tensor, slots: Tensor, partial: bool) -> Tensor:
    """Return the sum [T, ...] of each row's copies [R, ...], added in fp32 or wider and rounded once.

    With `partial`, slots [T, C] may be R, for a copy that is not here.
    """
    if partial:
        copies = torch.cat([copies, copies.new_zeros((1, *copies.shape[1:]))])
    if slots.shape[1] == 1:
        return copies.index_select(0, slots.squeeze(1))
    if copies.dim() == 2 and hardware.on_cpu(copies):
        # On a CPU the bag kernel reads each row once, adds in fp32 and builds no [T, C, H] tensor.
        return F.embedding_bag(slots, copies, mode="sum")
    found = copies.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    return found.sum(dim=1, dtype=torch.promote_types(copies.dtype, torch.float32)).to(copies.dtype)


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, source: Tensor, slots: Tensor, partial: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.partial = partial
        return gather_rows(rows, source, slots)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return sum_rows(grad, slots, ctx.partial), None, None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, source: Tensor, slots: Tensor, partial: bool) -> Tensor:
        ctx.save_for_backward(source, slots)
        return sum_rows(rows, slots, partial)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, slots = ctx.saved_tensors
        return gather_rows(grad, source, slots), None, None, None


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
    host_offsets: the offsets in the host's memory, where they are there anyway, for a backend that reads them.
    """

    rows: Tensor
    probs: Tensor
    offsets: Tensor
    host_offsets: Tensor | None = None


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
    """A sort of rows by expert. source [R]: the token of each row; slots [T, C]: the rows of each token."""

    source: Tensor
    slots: Tensor


@has_kernel("sort_by_expert")
def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order of the choices by expert, stable in the token; its inverse; each expert's end in it, int64.

    expert_ids: int64 of any shape, from 0 to `num_experts` - 1.
    """
    sorted_ids, order = torch.sort(expert_ids.flatten(), stable=True)
    experts = torch.arange(num_experts, device=sorted_ids.device, dtype=sorted_ids.dtype)
    ends = torch.searchsorted(sorted_ids, experts, right=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return order, inverse, ends


def sort_kept(expert_ids: Tensor, num_experts: int, drops: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return `sort_by_expert`; with `drops` ids may be `num_experts`, for choices that come last and have no end."""
    order, inverse, ends = sort_by_expert(expert_ids, num_experts + drops)
    return order, inverse, ends[:num_experts]


class LocalDispatcher(Dispatcher):
    """A dispatcher for a rank that has all experts, which sorts and does not communicate."""

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, SortPlan]:
        num_tokens, topk = decision.expert_ids.shape
        order, inverse, ends = sort_kept(self.destinations(decision), self.num_experts, self.drops)
        if self.drops:
            order, inverse = first_rows(order, inverse, self.rows_here(ends))
        plan = SortPlan(source=order // topk, slots=inverse.view(num_tokens, topk))
        rows = copy_rows(hidden, plan.source, plan.slots, partial=self.drops)
        probs = copy_rows(decision.probs.flatten(), order, inverse.unsqueeze(1), partial=self.drops)
        return ExpertInput(rows, probs, ends.to(torch.int32)), plan

    def combine(self, rows: Tensor, plan: SortPlan) -> Tensor:
        return sum_copies(rows, plan.source, plan.slots, partial=self.drops)


def first_rows(order: Tensor, inverse: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the first rows of a sort, and its inverse, where `num_rows` stands for rows that were cut off."""
    return order[:num_rows], inverse.clamp(max=num_rows)


@dataclass(frozen=True)
class GatherPlan:
    """The rows of this rank among all ranks' tokens. In `sort`, slots of other ranks' rows point past the last row."""

    sort: SortPlan


class AllGatherDispatcher(Dispatcher):
    """A dispatcher that gathers all tokens of the group on every rank and sums the results by a reduce-scatter in fp32.

    Each rank works on the tokens that chose its experts. This is cheaper than the all-to-all for few ranks or large K;
    T has to be the same on all ranks.
    """

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, GatherPlan]:
        group, topk = self.groups.expert, decision.expert_ids.shape[1]
        tokens = all_gather_rows(hidden, group)
        probs = all_gather_rows(decision.probs, group)
        local_ids = all_gather_rows(self.destinations(decision), group) - self.groups.ep_rank * self.num_local_experts
        elsewhere = (local_ids < 0) | (local_ids >= self.num_local_experts)
        local_ids = local_ids.masked_fill(elsewhere, self.num_local_experts)  # sorts last, and is cut off
        order, inverse, ends = sort_kept(local_ids, self.num_local_experts, drops=True)
        order, slots = first_rows(order, inverse, self.rows_here(ends))
        plan = GatherPlan(SortPlan(source=order // topk, slots=slots.view(-1, topk)))
        rows = copy_rows(tokens, plan.sort.source, plan.sort.slots, partial=True)
        weights = copy_rows(probs.flatten(), order, slots.unsqueeze(1), partial=True)
        return ExpertInput(rows, weights, ends.to(torch.int32)), plan

    def combine(self, rows: Tensor, plan: GatherPlan) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        sums = sum_copies(wide, plan.sort.source, plan.sort.slots, partial=True)
        return reduce_scatter_rows(sums, self.groups.expert).to(rows.dtype)


DISPATCHERS.register("allgather", AllGatherDispatcher)


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
