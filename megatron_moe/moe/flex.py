"""The flex dispatcher: DeepEP's kernels in place of the all-to-all, through megatron-core's wrapper of them.

A row travels once to each rank that has experts of its token, however many; the all-to-all sends it once for each
expert. The rows that an expert gets, and their order, are those of the all-to-all. Results of one rank's experts are
summed before they travel back, in fp32, and rounded to the rows' dtype then: in bf16 a token's output is rounded once
more for each rank than with the other dispatchers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe import fused_a2a
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError
from megatron_moe.moe.dispatch import (
    AllToAllDispatcher,
    Dispatcher,
    ExpertInput,
    SortPlan,
    copy_rows,
    sort_by_expert,
    sum_copies,
)
from megatron_moe.moe.groups import MoEGroups
from megatron_moe.moe.routing import RoutingDecision

_NOWHERE = -1  # DeepEP's index of a choice that is not sent, or whose expert is on another rank


@dataclass(frozen=True)
class FlexPlan:
    """The plan of a dispatch by DeepEP. handle: DeepEP's own. sort: arrived rows and the copies for their experts."""

    handle: Any
    sort: SortPlan


class FlexDispatcher(Dispatcher):
    """A dispatcher that sends a row once to each rank with experts of its token, by DeepEP.

    DeepEP counts the arriving rows on the host, which waits for that. Its kernels take bf16 rows and fp32 weights.

    Raises:
        ConfigError: DeepEP cannot be loaded.
    """

    def __init__(self, num_experts: int, groups: MoEGroups, drops: bool = False) -> None:
        super().__init__(num_experts, groups, drops)
        if fused_a2a.fused_dispatch is None:
            raise ConfigError(
                "--moe-token-dispatcher-type flex: the package deep_ep cannot be loaded here; install DeepEP for this "
                "torch and CUDA, or use --moe-token-dispatcher-type alltoall"
            )

    def dispatch(self, hidden: Tensor, decision: RoutingDecision) -> tuple[ExpertInput, FlexPlan]:
        ids = decision.expert_ids
        if decision.kept is not None:
            ids = ids.masked_fill(~decision.kept, _NOWHERE)
        # Without streams of its own: the gathers that follow need the rows at once.
        arrived, local_ids, weights, counts, handle = fused_a2a.fused_dispatch(
            hidden, ids, decision.probs.float(), self.num_experts, self.groups.expert
        )
        topk = ids.shape[1]
        # A choice of another rank's expert sorts last, and is cut off.
        choices = local_ids.masked_fill(local_ids == _NOWHERE, self.num_local_experts)
        order, inverse, ends = sort_by_expert(choices, self.num_local_experts + 1)
        num_rows = int(counts.sum())
        order, slots = order[:num_rows], inverse.clamp(max=num_rows)
        plan = FlexPlan(handle, SortPlan(source=order // topk, slots=slots.view(-1, topk)))
        rows = copy_rows(arrived, plan.sort.source, plan.sort.slots, partial=True)
        row_weights = copy_rows(weights.flatten(), order, slots.unsqueeze(1), partial=True)
        offsets = ends[: self.num_local_experts].to(torch.int32)
        return ExpertInput(rows, row_weights, offsets, counts.cumsum(dim=0)), plan

    def combine(self, rows: Tensor, plan: FlexPlan) -> Tensor:
        sums = sum_copies(rows, plan.sort.source, plan.sort.slots, partial=True)
        combined, _ = fused_a2a.fused_combine(sums, self.groups.expert, plan.handle)
        return combined


def flex_dispatcher(num_experts: int, groups: MoEGroups, drops: bool = False) -> Dispatcher:
    """Return the dispatcher by DeepEP; on an imagined machine one that moves the same rows, since a plan moves none."""
    imagined = platform.has_cuda() and not platform.has_streams()
    return (AllToAllDispatcher if imagined else FlexDispatcher)(num_experts, groups, drops)
