"""Padding each expert's rows to a fixed number, so that the shapes of the experts' products never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.moe.capacity import capacity
from megatron_moe.moe.dispatch import Dispatcher, ExpertInput, build_dispatcher
from megatron_moe.moe.groups import MoEGroups
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.permute import copy_rows, sum_copies
from megatron_moe.moe.routing import RoutingDecision


@dataclass(frozen=True)
class PaddedPlan:
    """The wrapped dispatcher's plan; where each of its R rows stands among the padded ones ([R]), and which row each
    padded one is ([e x P, 1]; R for padding)."""

    inner: Any
    places: Tensor
    sources: Tensor


class PaddedDispatcher(Dispatcher):
    """A dispatcher whose experts get the same number of rows each, at every step: zeros with weight 0 fill them up.

    An expert gets at most its capacity from each micro-batch that the expert-parallel ranks hold together; so many
    rows it has. Padded rows come out of an expert as zeros, are not combined, and add zeros to its gradients.

    Args:
        inner: what carries the tokens; it drops what is beyond the capacity.
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
        places = expert * size + row - starts[expert]
        sources = row.new_full((self.num_local_experts * size,), num_rows)
        sources[places] = row
        padded = PaddedPlan(plan, places, sources.unsqueeze(1))
        full = torch.arange(1, self.num_local_experts + 1, device=hidden.device, dtype=torch.int32) * size
        # "The sum of each place's rows", of which there is one, or none.
        rows = sum_copies(expert_input.rows, padded.places, padded.sources, partial=True)
        probs = sum_copies(expert_input.probs, padded.places, padded.sources, partial=True)
        return ExpertInput(rows, probs, full), padded

    def combine(self, rows: Tensor, plan: PaddedPlan) -> Tensor:
        return self.inner.combine(copy_rows(rows, plan.places, plan.sources, partial=True), plan.inner)

    def rows_per_expert(self, num_tokens: int) -> int:
        """Rows of every local expert, from the T tokens of this rank."""
        of_micro_batch = num_tokens * self.groups.tp_cp.size()
        size = capacity(of_micro_batch, self.options.topk, self.num_experts, self.factor)
        return min(size * self.num_micro_batches, num_tokens * self.groups.expert.size())


def micro_batches_among(expert_ranks: int, sharing_ranks: int) -> int:
    """The most micro-batches that the ranks of one expert-parallel group can hold parts of.

    Both groups are blocks of neighbouring ranks: one within the other, or cut at both ends.
    """
    if expert_ranks % sharing_ranks == 0:
        return expert_ranks // sharing_ranks
    return 1 if sharing_ranks % expert_ranks == 0 else expert_ranks // sharing_ranks + 2


def build_layer_dispatcher(options: MoEOptions, groups: MoEGroups) -> Dispatcher:
    """The dispatcher of a layer with these options."""
    if options.capacity_factor is None:
        return build_dispatcher(options.dispatcher, options.num_experts, groups)
    inner = build_dispatcher(options.dispatcher, options.num_experts, groups, drops=True)
    return PaddedDispatcher(inner, options, groups, options.capacity_factor) if options.pad_to_capacity else inner
