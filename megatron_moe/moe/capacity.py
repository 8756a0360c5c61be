"""Expert capacity: the limit on an expert's choices in a micro-batch, and the padding of rows to that limit.

The micro-batch is that of all TP x CP ranks together, and the decision is made on all of its choices, so that every
layout keeps the same ones. At TP = CP = 1 the rules are Megatron-LM's, except that ties are broken by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.moe.dispatch import Dispatcher, ExpertInput, build_dispatcher, copy_rows, sum_copies
from megatron_moe.moe.options import MoEGroups, MoEOptions
from megatron_moe.moe.routing import MicroBatch, RoutingDecision, positions
from megatron_moe.parallel.collectives import all_gather_rows

Limit = Callable[[RoutingDecision, MicroBatch], RoutingDecision]


def capacity(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Return an expert's capacity: its even share of tokens x K times the factor, rounded up, at most one per token.

    Padding is included, so that the capacity follows from shapes alone and not from the data.
    """
    return min(math.ceil(num_tokens * topk / num_experts * factor), num_tokens)


def kept_choices(expert_ids: Tensor, weights: Tensor | None, position: Tensor, size: int, num_experts: int) -> Tensor:
    """Return whether each choice is among the first `size` of its expert, [T, K] bool.

    Args:
        expert_ids: [T, K]; `num_experts` for a choice that does not count (padding), which is not kept.
        weights: [T, K], larger ones come first, equal ones by position; None orders all by position.
        position: [T] int64, all different.
        size: the capacity.
        num_experts: E.
    """
    flat = expert_ids.flatten()
    # Stable sorts, from the least to the most significant key.
    order = position.unsqueeze(1).expand_as(expert_ids).flatten().argsort(stable=True)
    if weights is not None:
        order = order[weights.flatten()[order].argsort(descending=True, stable=True)]
    order = order[flat[order].argsort(stable=True)]
    by_expert = flat[order]
    starts = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=flat.device, dtype=flat.dtype))
    rank = torch.arange(flat.shape[0], device=flat.device) - starts[by_expert]
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept[order] = (rank < size) & (by_expert < num_experts)
    return kept.view_as(expert_ids)


class ExpertCapacity:
    """A limit that drops the choices beyond the experts' capacity, which get weight 0 and are not dispatched.

    The other weights of the token do not change.
    """

    def __init__(self, options: MoEOptions, groups: MoEGroups, factor: float) -> None:
        self.options, self.groups, self.factor = options, groups, factor
        self.by_weight = options.drop_policy == "probs"

    def __call__(self, decision: RoutingDecision, micro_batch: MicroBatch) -> RoutingDecision:
        """Return the decision with `kept`, and weights of 0 where it is False. Collective over TP x CP."""
        ids, group = decision.expert_ids, self.groups.tp_cp
        num_tokens, num_experts = ids.shape[0], self.options.num_experts
        position = positions(num_tokens, micro_batch.num_sequences, self.groups, ids.device)
        if micro_batch.is_padding is not None:
            ids = ids.masked_fill(micro_batch.is_padding.unsqueeze(1), num_experts)
        gathered = all_gather_rows(torch.cat([ids, position.unsqueeze(1)], dim=1), group)
        weights = all_gather_rows(decision.probs.detach(), group) if self.by_weight else None
        size = capacity(gathered.shape[0], ids.shape[1], num_experts, self.factor)
        kept = kept_choices(gathered[:, :-1], weights, gathered[:, -1], size, num_experts)
        here = kept[group.rank() * num_tokens : (group.rank() + 1) * num_tokens]
        return decision._replace(probs=decision.probs.masked_fill(~here, 0.0), kept=here)


def dropless(decision: RoutingDecision, micro_batch: MicroBatch) -> RoutingDecision:
    """Return the decision as it is: every choice is kept."""
    return decision


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

    def __init__(self, inner: Dispatcher, options: MoEOptions, groups: MoEGroups, factor: float) -> None:
        super().__init__(inner.num_experts, groups, drops=True)
        self.inner, self.options, self.factor = inner, options, factor
        self.num_micro_batches = micro_batches_among(groups.expert.size(), groups.tp_cp.size())

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, PaddedPlan]:
        expert_input, plan = self.inner.dispatch(hidden, decision)
        ends, num_rows = expert_input.offsets.long(), expert_input.rows.shape[0]
        size = self.rows_per_expert(decision.expert_ids.shape[0])
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

    def rows_per_expert(self, num_tokens: int) -> int:
        """Return the number of rows of every local expert, from the number of tokens of this rank."""
        of_micro_batch = num_tokens * self.groups.tp_cp.size()
        size = capacity(of_micro_batch, self.options.topk, self.num_experts, self.factor)
        return min(size * self.num_micro_batches, num_tokens * self.groups.expert.size())


def micro_batches_among(expert_ranks: int, sharing_ranks: int) -> int:
    """Return the largest number of micro-batches that the ranks of one expert-parallel group can have parts of.

    Both groups are blocks of neighbouring ranks: one within the other, or cut at both ends.
    """
    if expert_ranks % sharing_ranks == 0:
        return expert_ranks // sharing_ranks
    return 1 if sharing_ranks % expert_ranks == 0 else expert_ranks // sharing_ranks + 2


def build_layer_dispatcher(options: MoEOptions, groups: MoEGroups) -> Dispatcher:
    """Return the dispatcher of a layer with these options."""
    if options.capacity_factor is None:
        return build_dispatcher(options.dispatcher, options.num_experts, groups, **options.dispatcher_settings)
    inner = build_dispatcher(options.dispatcher, options.num_experts, groups, drops=True, **options.dispatcher_settings)
    return PaddedDispatcher(inner, options, groups, options.capacity_factor) if options.pad_to_capacity else inner
