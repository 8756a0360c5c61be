"""The flex dispatcher: kernels of DeepEP or HybridEP in place of the all-to-all, through megatron-core's wrapper.

A row travels once to each rank that has experts of its token, however many; the all-to-all sends it once for each
expert. The rows that an expert gets, and their order, are those of the all-to-all. Results of one rank's experts are
summed before they travel back, in fp32, and rounded to the rows' dtype then: in bf16 a token's output is rounded once
more for each rank than with the other dispatchers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
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
    PhasedDispatcher,
    arrange_by_expert,
)
from megatron_moe.moe.options import MoEGroups
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe.moe.rows import SortPlan, sum_copies

_NOWHERE = -1  # DeepEP's index of a choice that is not sent, or whose expert is on another rank


@dataclass(frozen=True)
class DeepEPReceived:
    """What DeepEP returned besides tensors with a gradient.

    handle: DeepEP's own. local_ids [N, K]: the local experts of each arrived row, or -1. counts [e]: on the host.
    """

    handle: Any
    local_ids: Tensor
    counts: Tensor


@dataclass(frozen=True)
class FlexPlan:
    """The plan of a dispatch by DeepEP. handle: DeepEP's own. sort: arrived rows and the copies for their experts."""

    handle: Any
    sort: SortPlan


class DeepEPDispatcher(PhasedDispatcher):
    """A dispatcher that sends a row once to each rank with experts of its token, by DeepEP.

    DeepEP counts the arriving rows on the host, which waits for that. Its kernels take bf16 rows and fp32 weights.

    Args:
        num_sms: multiprocessors that its kernels take; None: DeepEP's default.

    Raises:
        ConfigError: DeepEP cannot be loaded.
    """

    def __init__(self, num_experts: int, groups: MoEGroups, drops: bool = False, num_sms: int | None = None) -> None:
        super().__init__(num_experts, groups, drops)
        if fused_a2a.fused_dispatch is None:
            raise _not_loaded("deepep", "the package deep_ep cannot be loaded here", "DeepEP")
        if num_sms is not None:
            fused_a2a.set_deepep_num_sms(num_sms)

    def prepare(self, hidden: Tensor, decision: RoutingDecision) -> tuple[tuple[Tensor, ...], Tensor]:
        ids = decision.expert_ids
        if decision.kept is not None:
            ids = ids.masked_fill(~decision.kept, _NOWHERE)
        return (hidden, decision.probs.float()), ids

    def send(self, leaving: tuple[Tensor, ...], plan: Tensor) -> tuple[tuple[Tensor, ...], DeepEPReceived]:
        # Without streams of its own: the current one waits for the rows.
        rows, local_ids, weights, counts, handle = fused_a2a.fused_dispatch(
            leaving[0], plan, leaving[1], self.num_experts, self.groups.expert
        )
        return (rows, weights), DeepEPReceived(handle, local_ids, counts)

    def arrange(self, arrived: tuple[Tensor, ...], plan: DeepEPReceived) -> tuple[ExpertInput, FlexPlan]:
        rows, weights = arrived
        choices = plan.local_ids.masked_fill(plan.local_ids == _NOWHERE, self.num_local_experts)
        num_rows = int(plan.counts.sum())
        given, sort = arrange_by_expert(rows, weights, choices, self.num_local_experts, lambda ends: num_rows)
        return replace(given, host_offsets=partial(plan.counts.cumsum, dim=0)), FlexPlan(plan.handle, sort)

    def collect(self, rows: Tensor, plan: FlexPlan) -> Tensor:
        return sum_copies(rows, plan.sort.source, plan.sort.slots, partial=True)

    def send_back(self, results: Tensor, plan: FlexPlan) -> Tensor:
        combined, _ = fused_a2a.fused_combine(results, self.groups.expert, plan.handle)
        return combined

    def add_up(self, returned_rows: Tensor, plan: FlexPlan) -> Tensor:
        return returned_rows


class HybridEPDispatcher(PhasedDispatcher):
    """A dispatcher by HybridEP, which also copies the arrived rows for their experts, and adds up their results.

    HybridEP takes the choices as a map of tokens and experts. Its ranks send equally many tokens. The host waits
    until the arriving rows are counted. Its kernels take bf16 rows and fp32 weights.

    Args:
        num_sms: multiprocessors that a dispatch takes, and a combine; None: the default of the wrapper or the library.

    Raises:
        ConfigError: HybridEP cannot be loaded.
    """

    def __init__(self, num_experts: int, groups: MoEGroups, drops: bool = False, num_sms: int | None = None) -> None:
        super().__init__(num_experts, groups, drops)
        if fused_a2a.hybrid_ep_dispatch is None:
            raise _not_loaded(
                "hybridep",
                "the package deep_ep cannot be loaded here, or has no HybridEPBuffer",
                "its branch hybrid-ep",
            )
        self.sizes = {} if num_sms is None else {"num_sms_dispatch_api": num_sms, "num_sms_combine_api": num_sms}

    def prepare(self, hidden: Tensor, decision: RoutingDecision) -> tuple[tuple[Tensor, ...], Tensor]:
        ids, kept = decision.expert_ids, decision.kept
        weights = decision.probs.float()
        by_expert = weights.new_zeros((ids.shape[0], self.num_experts))
        chosen = torch.zeros_like(by_expert, dtype=torch.bool)
        chosen.scatter_(1, ids, torch.ones_like(ids, dtype=torch.bool) if kept is None else kept)
        return (hidden.contiguous(), by_expert.scatter(1, ids, weights)), chosen

    def send(self, leaving: tuple[Tensor, ...], plan: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        rows, weights, _, counts, handle = fused_a2a.hybrid_ep_dispatch(
            leaving[0], plan, leaving[1], self.groups.expert, self.num_local_experts, **self.sizes
        )
        return (rows, weights), (counts, handle)

    def arrange(self, arrived: tuple[Tensor, ...], plan: Any) -> tuple[ExpertInput, Any]:
        (rows, weights), (counts, handle) = arrived, plan
        ends = counts.to("cpu", torch.int64).cumsum(dim=0)
        return ExpertInput(rows, weights, ends.to(rows.device, torch.int32), lambda: ends), handle

    def collect(self, rows: Tensor, plan: Any) -> Tensor:
        return rows

    def send_back(self, results: Tensor, plan: Any) -> Tensor:
        return fused_a2a.hybrid_ep_combine(results, plan, results.shape[0], None)

    def add_up(self, returned_rows: Tensor, plan: Any) -> Tensor:
        return returned_rows


_LIBRARIES = {"deepep": DeepEPDispatcher, "hybridep": HybridEPDispatcher}


def flex_dispatcher(
    num_experts: int, groups: MoEGroups, drops: bool = False, library: str = "deepep", num_sms: int | None = None
) -> Dispatcher:
    """Return the dispatcher by a library; on an imagined machine one that moves the same rows, since a plan moves none.

    Raises:
        ConfigError: for a library that is not here, or cannot be loaded.
    """
    if library not in _LIBRARIES:
        raise ConfigError(f"--moe-flex-dispatcher-backend {library}: not one of {', '.join(_LIBRARIES)}")
    if platform.has_cuda() and not platform.has_streams():
        return AllToAllDispatcher(num_experts, groups, drops)
    return _LIBRARIES[library](num_experts, groups, drops, num_sms)


def _not_loaded(library: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"--moe-token-dispatcher-type flex, --moe-flex-dispatcher-backend {library}: {reason}; install {remedy} for "
        "this torch and CUDA, or use --moe-token-dispatcher-type alltoall"
    )
