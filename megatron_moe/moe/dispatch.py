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
from torch import Tensor

from megatron_moe.config.setting import DISPATCHERS
from megatron_moe.moe.options import MoEGroups, MoEOptions
from megatron_moe.moe.routing import RoutingDecision, capacity
from megatron_moe.moe.rows import (
    Copies,
    CopyRows,
    Do,
    Exchanged,
    Packed,
    SortPlan,
    Sums,
    Unpacked,
    Way,
    WeightedCopies,
    copy_rows,
    first_rows,
    in_graph,
    sort_arrived,
    sort_by_expert,
    sum_copies,
)
from megatron_moe.parallel.collectives import all_gather_rows, reduce_scatter_rows, weights_behind
from megatron_moe.platform.hardware import HostCopy


@dataclass(frozen=True)
class ExpertInput:
    """The input of the experts of this rank.

    rows: [R, H], grouped by local expert. probs: [R] fp32. offsets: [e] int32, the end of each expert's rows.
    host_offsets: returns the offsets in the host's memory, where what they are made of is there anyway, for a backend
        that reads them; None elsewhere.
    copies: for experts that copy rows (`LocalExperts.copies_rows`), the step that rows and probs are the input of. The
        results of each row's copies are then added up. None: rows are copied.
    """

    rows: Tensor
    probs: Tensor
    offsets: Tensor
    host_offsets: Callable[[], Tensor] | None = None
    copies: WeightedCopies | Unpacked | None = None


class Dispatcher(ABC):
    """A method of sending tokens to the ranks of `num_experts` experts, and the results back.

    Args:
        drops: whether decisions contain choices that are not kept and so are not dispatched. The number of rows then
            depends on the data, and the local dispatcher too has to wait for it on the host, unless `fixed_rows`.

    Attributes:
        fixed_rows: whether the local dispatcher's rows are as many as there are choices, as a captured graph's have to
            be. What is not kept comes behind the experts' rows, and is anything; only grouped_mm passes it over.
    """

    def __init__(self, num_experts: int, groups: MoEGroups, drops: bool = False) -> None:
        self.num_experts = num_experts
        self.groups = groups
        self.drops = drops
        self.fixed_rows = False
        self.num_local_experts = num_experts // groups.ep_size

    def destinations(self, decision: RoutingDecision) -> Tensor:
        """Return the expert of each choice, [T, K] int64; `num_experts`, which sorts last, for one that is not kept."""
        if decision.kept is None:
            return decision.expert_ids
        return decision.expert_ids.masked_fill(~decision.kept, self.num_experts)

    def preprocess(self, decision: RoutingDecision) -> RoutingDecision:
        """Return the decision with what a dispatch finds of it alone: a captured graph holds it with the router."""
        return decision

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


def arrange_by_expert(
    hidden: Tensor,
    probs: Tensor,
    expert_ids: Tensor,
    num_experts: int,
    rows_here: Callable[[Tensor], int] | None,
    fixed_rows: bool = False,
) -> tuple[ExpertInput, SortPlan]:
    """Return copies of hidden [T, H] grouped by expert, and the sort that made them, for `sum_copies`.

    Args:
        probs, expert_ids: [T, K], the weight and the expert of each choice.
        num_experts: experts whose choices are here.
        rows_here: how many choices these are, from the end of each expert's; None: all. Other choices have the id
            `num_experts`, which sorts last, and are cut off.
        fixed_rows: see `Dispatcher`; the others are then not cut off.
    """
    given, plan = _to_arrange(hidden, probs, expert_ids, num_experts, rows_here, fixed_rows)
    rows, row_probs = CopyRows.apply(given.copies, hidden, probs)
    return ExpertInput(rows, row_probs, given.offsets), plan


def _to_arrange(
    hidden: Tensor,
    probs: Tensor,
    expert_ids: Tensor,
    num_experts: int,
    rows_here: Callable[[Tensor], int] | None,
    fixed_rows: bool = False,
) -> tuple[ExpertInput, SortPlan]:
    """Return what `arrange_by_expert` copies, with the step that does."""
    partial = rows_here is not None
    order, source, inverse, ends = sort_by_expert(expert_ids, num_experts, partial)
    if rows_here is not None and fixed_rows:
        inverse = inverse.masked_fill(inverse >= ends[-1], inverse.shape[0])
    elif rows_here is not None:
        order, source, inverse = first_rows(order, source, inverse, rows_here(ends))
    plan = SortPlan(order, source, inverse.view(expert_ids.shape))
    copies = WeightedCopies(plan, partial, hidden.shape[1], probs.shape)
    return ExpertInput(hidden, probs, ends, copies=copies), plan


class LocalDispatcher(Dispatcher):
    """A dispatcher for a rank that has all experts, which sorts and does not communicate."""

    arrange = staticmethod(arrange_by_expert)

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, SortPlan]:
        rows_here = self.rows_here if self.drops else None
        ids = self.destinations(decision)
        return self.arrange(hidden, decision.probs, ids, self.num_experts, rows_here, self.fixed_rows)

    def combine(self, rows: Tensor, plan: SortPlan) -> Tensor:
        return sum_copies(rows, plan.source, plan.slots, partial=self.drops)


class LocalWithoutCopies(LocalDispatcher):
    """The same for experts that copy rows."""

    arrange = staticmethod(_to_arrange)

    def combine(self, rows: Tensor, plan: SortPlan) -> Tensor:
        return rows


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


class _Send(Way):
    """Rows on their way to experts."""


class _SendBack(Way):
    """Results on their way to tokens."""


class AllToAllDispatcher(PhasedDispatcher):
    """A dispatcher that sends each row to the ranks of its expert and its result back, by one all-to-all each way.

    For a schedule that puts other work in between, each step is a node of the graph; else several are one (`do`).
    """

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, ExchangePlan]:
        """See `Dispatcher.dispatch`."""
        plans: list[RecvPlan] = []

        def work(do: Do) -> tuple[Tensor, ...]:
            arrived, plan = self.send(*self.prepare(hidden, decision, do), do)
            plans.append(plan)
            return arrived

        # Not `arrange`: a node holds its gradients until it is done, here of all rows while two exchanges' are there.
        return self.arrange(_Send.apply(work, hidden, decision.probs), plans[0])

    def combine(self, rows: Tensor, plan: ExchangePlan) -> Tensor:
        """See `Dispatcher.combine`."""

        def work(do: Do) -> tuple[Tensor]:
            return (self.add_up(self.send_back(self.collect(rows, plan, do), plan, do), plan, do),)

        return _SendBack.apply(work, rows)[0]

    def preprocess(self, decision: RoutingDecision) -> RoutingDecision:
        """Sort the choices: `ahead` is order, source, inverse, and [2, ranks, e] with the rows to each rank in [0]."""
        if decision.ahead is not None:
            return decision
        etp, ids = self.groups.etp_size, self.destinations(decision)
        both = ids.new_empty((2, self.groups.expert.size(), self.num_local_experts))
        counts = both[0].view(-1) if etp == 1 else both.new_empty(self.num_experts)
        order, source, inverse, _ = sort_by_expert(ids, self.num_experts, self.drops, counts)
        if etp > 1:  # every ETP rank of an expert gets its rows
            by_rank = counts.view(self.groups.ep_size, self.num_local_experts)
            both[0].copy_(by_rank.repeat_interleave(etp, dim=0))
        return decision._replace(ahead=(order, source, inverse, both))

    def prepare(
        self, hidden: Tensor, decision: RoutingDecision, do: Do = in_graph
    ) -> tuple[tuple[Tensor, ...], SendPlan]:
        num_tokens, topk = decision.expert_ids.shape
        etp, group = self.groups.etp_size, self.groups.expert
        ahead = self.preprocess(decision).ahead
        assert ahead is not None
        order, source, inverse, both = ahead
        sent_counts, received_counts = both.unbind()
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
        probs, width = decision.probs, hidden.shape[1]
        packed = do(Packed(sent, self.drops, width, probs.shape, probs.dtype), hidden, probs)
        return packed, SendPlan(sent, copied, received_counts, width, probs.dtype)

    def send(
        self, leaving: tuple[Tensor, ...], plan: SendPlan, do: Do = in_graph
    ) -> tuple[tuple[Tensor, ...], RecvPlan]:
        send_splits, recv_splits = self.splits(plan.counts_on_host)
        arrived = do(Exchanged(send_splits, recv_splits, self.groups.expert), *leaving)
        return arrived, RecvPlan(plan, send_splits, recv_splits)

    def arrange(
        self, arrived: tuple[Tensor, ...], plan: RecvPlan, do: Do = in_graph
    ) -> tuple[ExpertInput, ExchangePlan]:
        step, ends, back = self.unpacking(plan)
        rows, row_weights = do(step, *arrived)
        return ExpertInput(rows, row_weights, ends, plan.send_plan.ends_on_host), back

    def unpacking(self, plan: RecvPlan) -> tuple[Unpacked, Tensor, ExchangePlan]:
        """Return the step by which arrived rows are sorted by expert, the end of each one's, and the plan back."""
        send_plan = plan.send_plan
        order, inverse, ends = sort_arrived(send_plan.counts, sum(plan.recv_splits))
        back = ExchangePlan(send_plan.sent, plan.send_splits, plan.recv_splits, order, inverse)
        return Unpacked(order, inverse, send_plan.hidden, send_plan.dtype), ends, back

    def splits(self, copied: HostCopy) -> tuple[list[int], list[int]]:
        """Return the rows to and from each rank of the group; the host waits for their copy."""
        to, of = copied.result().sum(dim=2).tolist()
        return to, of

    def collect(self, rows: Tensor, plan: ExchangePlan, do: Do = in_graph) -> Tensor:
        return do(Copies(plan.inverse, plan.order.unsqueeze(1), False), rows)[0]

    def send_back(self, results: Tensor, plan: ExchangePlan, do: Do = in_graph) -> Tensor:
        return do(Exchanged(plan.recv_splits, plan.send_splits, self.groups.expert), results)[0]

    def add_up(self, returned_rows: Tensor, plan: ExchangePlan, do: Do = in_graph) -> Tensor:
        return do(Sums(plan.sent.source, plan.sent.slots, self.drops), returned_rows)[0]


class AllToAllWithoutCopies(AllToAllDispatcher):
    """The same for experts that copy rows, which keep what has arrived: not for a schedule in steps, which frees it."""

    def arrange(
        self, arrived: tuple[Tensor, ...], plan: RecvPlan, do: Do = in_graph
    ) -> tuple[ExpertInput, ExchangePlan]:
        """Return packed rows in the order of arrival."""
        step, ends, back = self.unpacking(plan)
        weights = weights_behind(arrived[0].detach(), step.dtype)  # their gradient is packed with the rows'
        return ExpertInput(arrived[0], weights, ends, copies=step), back

    def collect(self, rows: Tensor, plan: ExchangePlan, do: Do = in_graph) -> Tensor:
        return rows


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

    inner: the wrapped dispatcher's plan. slots [R]: the padded row of each of its R rows, of one behind the experts'
    rows the last. sources [e x P, 1]: the row that each padded row comes from; R for padding.
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

    def preprocess(self, decision: RoutingDecision) -> RoutingDecision:
        return self.inner.preprocess(decision)

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, PaddedPlan]:
        expert_input, plan = self.inner.dispatch(hidden, decision)
        ends, num_rows = expert_input.offsets.long(), expert_input.rows.shape[0]
        # The rows of every local expert, from the number of tokens of this rank.
        num_tokens, topk = decision.expert_ids.shape
        size = capacity(num_tokens * self.groups.tp_cp.size(), topk, self.num_experts, self.factor)
        size = min(size * self.num_micro_batches, num_tokens * self.groups.expert.size())
        row, starts = torch.arange(num_rows, device=hidden.device), torch.cat([ends.new_zeros(1), ends])
        expert = torch.searchsorted(ends, row, right=True)
        slots = (expert * size + row - starts[expert]).clamp(max=self.num_local_experts * size - 1)
        source = starts[:-1, None] + torch.arange(size, device=hidden.device)
        sources = source.where(source < ends[:, None], num_rows).view(-1, 1)
        padded = PaddedPlan(plan, slots, sources)
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


_WITHOUT_COPIES: dict[type, type[Dispatcher]] = {
    LocalDispatcher: LocalWithoutCopies, AllToAllDispatcher: AllToAllWithoutCopies
}  # fmt: skip
"""Dispatchers that leave it to experts to copy rows; with others they get copies."""


def build_layer_dispatcher(options: MoEOptions, groups: MoEGroups, experts_copy: bool = False) -> Dispatcher:
    """Return the dispatcher of a layer with these options. experts_copy: see `LocalExperts.copies_rows`."""
    factor, settings = options.capacity_factor, options.dispatcher_settings
    inner = build_dispatcher(options.dispatcher, options.num_experts, groups, factor is not None, **settings)
    if factor is not None and options.pad_to_capacity:
        return PaddedDispatcher(inner, groups, factor)
    kind = _WITHOUT_COPIES.get(type(inner)) if experts_copy and not options.in_steps else None
    return inner if kind is None else kind(inner.num_experts, groups, inner.drops)
