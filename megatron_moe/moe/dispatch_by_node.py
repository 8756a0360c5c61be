"""An all-to-all that knows nodes: a token goes to each node with experts of its once, and is copied there.

A rank sends a token's row to the rank of its own place on each of those nodes, over the network between them. That rank
copies the row for every expert of the node that the token chose, and sends the copies on within the node. Gradients of
results are rows of tokens too, and travel in the same way.

Results and gradients of copies differ from copy to copy. They take the same way back, each for itself, so that the
token's rank adds up what the plain all-to-all brings it, in the same order: all bits are the plain exchange's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.config.errors import ConfigError
from megatron_moe.moe.dispatch import AllToAllDispatcher, Dispatcher, ExpertInput, PhasedDispatcher
from megatron_moe.moe.options import MoEGroups
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe.moe.rows import (
    SortPlan,
    add_up_rows,
    copy_rows,
    first_rows,
    sort_arrived,
    sort_by_expert,
    spread_rows,
    unpack_weighted,
)
from megatron_moe.parallel.collectives import all_to_all_rows, room_for_rows, weights_behind
from megatron_moe.parallel.groups import neighbours, partition, ranks_of_machine
from megatron_moe.platform.hardware import HostCopy
from megatron_moe.platform.protocols import AutogradContext


@dataclass(frozen=True)
class NodeSplits:
    """Rows of the exchanges, on the host. N nodes with G ranks each; a rank's place is its number on its node.

    tokens_out, tokens_in: [N], tokens that are sent to, and come from, the rank of this place on each node.
    choices_out, choices_in: [N], their choices of experts of the node that they are sent to.
    copies_out, copies_in: [G], copies to and from each rank of this node.
    """

    tokens_out: list[int]
    tokens_in: list[int]
    choices_out: list[int]
    choices_in: list[int]
    copies_out: list[int]
    copies_in: list[int]


@dataclass(frozen=True)
class CountedPlan:
    """What is known of an exchange when its counts are on their way to the host.

    expert_ids: [T, K], see `Dispatcher.destinations`. by_expert: the sort of the choices that the plain all-to-all has.
    by_node: the sort of tokens by the nodes they are sent to, with slots [T, K], of which one a node is used.
    counts: on the host, all that `NodeSplits` is made of. choices_in: [N, experts of the node], of the ranks of this
    place. copies_in: [G, e x N], of this rank's experts, by the rank that copies and by the token's node.
    """

    expert_ids: Tensor
    by_expert: SortPlan
    by_node: SortPlan
    counts: HostCopy
    choices_in: Tensor
    copies_in: Tensor


@dataclass(frozen=True)
class NodePath:
    """The tables by which rows travel from their tokens to experts, and back.

    tokens: the tokens to send, sorted by node. copies: the arrived tokens' copies, sorted by expert of this node.
    order, inverse: from the order of the copies to that of the ranks their results go back to, and back.
    choices: the order in which results come back to the tokens' rank: that of the plain all-to-all.
    partial: whether some choices are not dispatched.
    """

    splits: NodeSplits
    inside: ProcessGroup
    across: ProcessGroup
    tokens: SortPlan
    copies: SortPlan
    order: Tensor
    inverse: Tensor
    choices: SortPlan
    partial: bool

    def to_experts(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return copies of tokens' rows for the experts of this rank, in order of arrival.

        Args:
            rows: [T, H].
            weights: [arrived tokens, K], of which each copy gets its own, packed behind it; None: rows alone.
        """
        splits, hidden = self.splits, rows.shape[1]
        once = _copied(rows, self.tokens)
        arrived = all_to_all_rows(once, splits.tokens_out, splits.tokens_in, self.across)
        if weights is None:
            copies = _copied(arrived, self.copies)
        else:
            sort = self.copies
            copies = room_for_rows(sort.order.shape[0], hidden, arrived, weights)
            into = (copies[:, :hidden], weights_behind(copies, weights.dtype))
            spread_rows(arrived, weights.flatten(), sort.order, sort.source, sort.slots, *into)
        return all_to_all_rows(copies, splits.copies_out, splits.copies_in, self.inside)

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Return rows of this rank's experts [R, ...], on their tokens' rank, in the order of `choices`."""
        splits = self.splits
        copies = all_to_all_rows(rows, splits.copies_in, splits.copies_out, self.inside)
        ordered = _copied(copies, SortPlan(self.order, self.order, self.inverse.unsqueeze(1)))
        return all_to_all_rows(ordered, splits.choices_in, splits.choices_out, self.across)


def _copied(rows: Tensor, sort: SortPlan) -> Tensor:
    copies = rows.new_empty((sort.source.shape[0], rows.shape[1]))
    spread_rows(rows, None, sort.source, sort.source, sort.slots, copies, None)
    return copies


@dataclass(frozen=True)
class ArrivedPlan:
    """The plan of rows [R, W] that have arrived. hidden, dtype: the width of rows, the weights' dtype."""

    counted: CountedPlan
    path: NodePath
    hidden: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ArrangedPlan:
    """The plan for the way back. order, inverse [R]: from the order of arrival to that of experts, and back."""

    path: NodePath
    order: Tensor
    inverse: Tensor


class _SendOverNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, probs: Tensor, arrived_weights: Tensor, path: NodePath) -> Tensor:
        ctx.path, ctx.hidden, ctx.shape, ctx.dtype = path, rows.shape[1], probs.shape, probs.dtype
        return path.to_experts(rows, arrived_weights)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        path = ctx.path
        copies = path.to_tokens(grad)
        weights = weights_behind(copies, ctx.dtype)
        of_rows, of_weights = add_up_rows(copies, weights, path.choices.slots, path.partial, ctx.hidden)
        return of_rows, None if of_weights is None else of_weights.view(ctx.shape), None, None


class _SendBackOverNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, results: Tensor, path: NodePath) -> Tensor:
        ctx.path = path
        copies = path.to_tokens(results)
        return add_up_rows(copies, None, path.choices.slots, path.partial, results.shape[1])[0]

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.path.to_experts(grad), None


class ByNodeDispatcher(PhasedDispatcher):
    """The all-to-all in two stages: between nodes over ranks of one place, then within the node.

    Nodes are what the launcher says (`LOCAL_WORLD_SIZE`). The groups of both stages are made here, by all ranks of the
    expert group.

    Raises:
        ConfigError: several ranks share an expert, or the group is not several nodes with equally many of its ranks.
    """

    def __init__(self, num_experts: int, groups: MoEGroups, drops: bool = False) -> None:
        super().__init__(num_experts, groups, drops)
        ranks = dist.get_process_group_ranks(groups.expert)
        per_node = neighbours(ranks, ranks_of_machine())
        if groups.etp_size > 1 or per_node == len(ranks):
            raise ConfigError(
                f"--moe-alltoall-by-node: {groups.ep_size} EP x {groups.etp_size} ETP ranks, {ranks_of_machine()} ranks"
                " a node; it needs ETP 1, and EP over several whole nodes; drop the flag"
            )
        self.inside, self.across = partition(groups.expert, per_node)
        self.num_node_experts = self.num_local_experts * per_node

    def preprocess(self, decision: RoutingDecision) -> RoutingDecision:
        """Sort choices by expert and tokens by node; `ahead` is the experts, both sorts' tables, and what is sent."""
        if decision.ahead is not None:
            return decision
        nodes, expert_ids = self.across.size(), self.destinations(decision)
        counts, tokens = expert_ids.new_empty(self.num_experts), expert_ids.new_empty(nodes)
        by_expert = sort_by_expert(expert_ids, self.num_experts, self.drops, counts)[:3]
        first = first_of_each_node(expert_ids // self.num_node_experts, nodes)
        by_node = sort_by_expert(first, nodes, partial=True, counts=tokens)[:3]
        # A row for each node: choices of its experts, and tokens that are sent there.
        sent = torch.cat([counts.view(nodes, -1), tokens.unsqueeze(1)], dim=1)
        return decision._replace(ahead=(expert_ids, *by_expert, *by_node, sent))

    def prepare(self, hidden: Tensor, decision: RoutingDecision) -> tuple[tuple[Tensor, ...], CountedPlan]:
        """Exchange the counts of both stages, so that the host waits once."""
        ahead = self.preprocess(decision).ahead
        assert ahead is not None
        expert_ids, *tables, sent = ahead
        by_expert, by_node = (
            SortPlan(order, source, inverse.view(expert_ids.shape))
            for order, source, inverse in (tables[:3], tables[3:])
        )
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.across)
        choices_in = received[:, :-1]
        copies_out = choices_in.unflatten(1, (self.inside.size(), -1)).permute(1, 2, 0).contiguous()  # [G, e, N]
        copies_in = torch.empty_like(copies_out)
        dist.all_to_all_single(copies_in, copies_out, group=self.inside)
        counted = HostCopy(torch.cat([sent.flatten(), received.flatten(), copies_in.flatten()]))
        plan = CountedPlan(expert_ids, by_expert, by_node, counted, choices_in, copies_in.flatten(1))
        return (hidden, decision.probs), plan

    def send(self, leaving: tuple[Tensor, ...], plan: CountedPlan) -> tuple[tuple[Tensor, ...], ArrivedPlan]:
        """Send rows to nodes, and copies of them to experts."""
        hidden, probs = leaving
        splits, topk = self.node_splits(plan.counts), probs.shape[1]
        choices, tokens = plan.by_expert, _cut(plan.by_node, sum(splits.tokens_out))
        if self.drops:
            choices = _cut(choices, sum(splits.choices_out))
        # What a node has to know of a token: its experts, and their weights' bits.
        bits = probs.detach().contiguous().view(torch.int32)
        table = torch.cat([plan.expert_ids.to(torch.int32), bits], dim=1).index_select(0, tokens.source)
        arrived = all_to_all_rows(table, splits.tokens_out, splits.tokens_in, self.across)
        expert_ids = arrived[:, :topk].long() - self.across.rank() * self.num_node_experts
        # A copy: a slice of one row is contiguous, and may begin where no number of the weights' dtype can.
        weights = arrived[:, topk:].clone(memory_format=torch.contiguous_format).view(probs.dtype)
        elsewhere = (expert_ids < 0) | (expert_ids >= self.num_node_experts)
        expert_ids = expert_ids.masked_fill(elsewhere, self.num_node_experts)
        order, source, inverse, _ = sort_by_expert(expert_ids, self.num_node_experts, partial=True)
        copies = _cut(SortPlan(order, source, inverse.view(expert_ids.shape)), sum(splits.copies_out))
        # Copies are sorted by expert and then by the node they came from. They go back by node and then by expert.
        order, inverse, _ = sort_arrived(plan.choices_in.t().contiguous(), copies.order.shape[0])
        path = NodePath(splits, self.inside, self.across, tokens, copies, order, inverse, choices, self.drops)
        rows = _SendOverNodes.apply(hidden, probs, weights, path)
        return (rows,), ArrivedPlan(plan, path, hidden.shape[1], probs.dtype)

    def node_splits(self, counts: HostCopy) -> NodeSplits:
        """Return the rows of both stages; the host waits for their copy."""
        nodes, places = self.across.size(), self.inside.size()
        found, width = counts.result(), self.num_node_experts + 1
        sent, received, copies_in = found.split([nodes * width, nodes * width, self.num_node_experts * nodes])
        sent, received = sent.view(nodes, width), received.view(nodes, width)
        return NodeSplits(
            tokens_out=sent[:, -1].tolist(),
            tokens_in=received[:, -1].tolist(),
            choices_out=sent[:, :-1].sum(dim=1).tolist(),
            choices_in=received[:, :-1].sum(dim=1).tolist(),
            copies_out=received[:, :-1].sum(dim=0).view(places, -1).sum(dim=1).tolist(),
            copies_in=copies_in.view(places, -1).sum(dim=1).tolist(),
        )

    def arrange(self, arrived: tuple[Tensor, ...], plan: ArrivedPlan) -> tuple[ExpertInput, ArrangedPlan]:
        """Sort copies by expert, then by the token's rank, as after the plain all-to-all."""
        nodes, counts = self.across.size(), plan.counted.copies_in
        # A pair of expert and node is sorted as an expert would be: its copies are then in order of places.
        order, inverse, ends = sort_arrived(counts, sum(plan.path.splits.copies_in))
        rows, row_weights = unpack_weighted(arrived[0], order, inverse, plan.hidden, plan.dtype)

        def ends_on_host() -> Tensor:
            copies_in = plan.counted.counts.result()[-self.num_node_experts * nodes :]
            return copies_in.view(self.inside.size(), -1, nodes).sum(dim=(0, 2)).cumsum(dim=0)

        of_experts = ends[nodes - 1 :: nodes].contiguous()
        return ExpertInput(rows, row_weights, of_experts, ends_on_host), ArrangedPlan(plan.path, order, inverse)

    def collect(self, rows: Tensor, plan: ArrangedPlan) -> Tensor:
        return copy_rows(rows, plan.inverse, plan.order.unsqueeze(1))

    def send_back(self, results: Tensor, plan: ArrangedPlan) -> Tensor:
        """Return the sum of the results for each token, [T, H]."""
        return _SendBackOverNodes.apply(results, plan.path)

    def add_up(self, returned_rows: Tensor, plan: ArrangedPlan) -> Tensor:
        """Return what `send_back` has added up: its gradient is a row for each token, and is sent once to a node."""
        return returned_rows


def first_of_each_node(node: Tensor, nodes: int) -> Tensor:
    """Return each token's nodes, [T, K], once each; `nodes`, which sorts last, in the other places."""
    node = node.sort(dim=1).values
    again = torch.zeros_like(node, dtype=torch.bool)
    again[:, 1:] = node[:, 1:] == node[:, :-1]
    return node.masked_fill(again, nodes)


def _cut(sort: SortPlan, num_rows: int) -> SortPlan:
    return SortPlan(*first_rows(sort.order, sort.source, sort.slots, num_rows))


def alltoall_dispatcher(num_experts: int, groups: MoEGroups, drops: bool = False, by_node: bool = False) -> Dispatcher:
    """Return the all-to-all, in one stage or, `by_node`, in two."""
    return (ByNodeDispatcher if by_node else AllToAllDispatcher)(num_experts, groups, drops)
