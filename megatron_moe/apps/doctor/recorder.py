"""Records of one step on one rank for the doctor: gradients, each router's rounding errors and its closest choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.apps.doctor.assemble import parameter_shards, router_names
from megatron_moe.moe.routing import (
    RoutedTokens,
    balanced_scores,
    choice_scores,
    group_scores,
    ranked_values,
    scores_from_logits,
    weigh_experts,
)
from megatron_moe.moe.routing_probe import RoutingProbe
from megatron_moe.training.optimizer import named_moments_and_masters, owned_range


class StepRecorder:
    """A step probe, like that of `training/health.py`: it observes routers while they choose, and the gradients.

    Attributes:
        routers: a record per router, by its layer's name.
        gradients: name -> (cuts, gradient, first and last + 1 element that this rank knows) of every parameter, as the
            optimizer uses it before clipping: fp32, reduced, divided by the loss scale.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], gradients: bool) -> None:
        self._chunks, self._wanted = chunks, gradients
        self.routers = {name: RouterRecord() for chunk in chunks for name, _ in router_names(chunk)}
        self.gradients: dict[str, Any] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the routers; the step's forward and backward passes run in this context."""
        with ExitStack() as stack:
            for chunk in self._chunks:
                for name, router in router_names(chunk):
                    stack.enter_context(router.observed_by(self.routers[name].see))
            yield

    def see_gradients(self, optimizer: Any) -> None:
        """Keep every gradient; with a distributed optimizer, the part of it that this rank reduces."""
        if self._wanted:
            self.gradients = values_of_masters(self._chunks, optimizer, lambda master: master.grad)


@torch.no_grad()
def values_of_masters(
    chunks: Sequence[torch.nn.Module], optimizer: Any, value: Callable[[Tensor], Tensor | None]
) -> dict[str, Any]:
    """Return `value` of every main weight, or of this rank's shard of it, under its parameter's name.

    Returns:
        name -> (cuts, fp32 tensor of the parameter's shape, first and last + 1 of the flattened elements that it
        holds). The other elements are not initialised.
    """
    found = named_moments_and_masters(chunks, optimizer)
    masters = {id(parameter): master for parameter, kind, master in found if kind == "master weight"}
    values = {}
    for chunk in chunks:
        for shard, parameter in parameter_shards(chunk):
            begin, end = owned_range(optimizer, parameter)
            full = torch.empty(parameter.shape, dtype=torch.float32)
            if begin < end and (own := value(masters[id(parameter)])) is not None:
                full.view(-1)[begin:end] = own.flatten()
            values[shard.name] = (tuple(tuple(cut) for cut in shard.cuts), full, begin, end)
    return values


class RouterRecord(RoutingProbe):
    """A record of what one router did in a step.

    Attributes:
        margins: per micro-batch [T] fp64, the distance of each token's choice from its alternative; infinite where
            there is none.
        drop_margin: the same for choices dropped by a capacity, by weight.
        error: largest relative error of logits and weights, against fp64 from the same hidden states and weight: the
            cost of a lower precision inside the router, which a comparison of two runs in that precision cannot show.
    """

    def __init__(self) -> None:
        super().__init__(num_tokens=0, num_micro_batches=1)
        self.margins: list[Tensor] = []
        self.drop_margin, self.error = float("inf"), 0.0

    @property
    def smallest(self) -> float:
        """The smallest of all margins."""
        return min([self.drop_margin, *(float(margins.min()) for margins in self.margins)])

    @torch.no_grad()
    def see(self, router: Any, routed: RoutedTokens) -> None:
        """Measure one micro-batch."""
        options, decision, logits = router.options, routed.decision, routed.logits
        exact = F.linear(routed.hidden.double(), router.weight.double())
        weights = weigh_experts(exact, scores_from_logits(exact, options), decision.expert_ids, options)
        if decision.kept is not None:
            self.drop_margin = min(self.drop_margin, _drop_margin(weights, decision, options))
            weights = weights.masked_fill(~decision.kept, 0.0)
        self.error = max(self.error, _worst(logits, exact), _worst(decision.probs, weights))
        if options.sinkhorn:  # every rank of the micro-batch is here
            ranked = balanced_scores(logits, routed.micro_batch.is_padding, router.groups.tp_cp)
        else:
            ranked = ranked_values(logits, routed.scores, options)
        self.margins.append(torch.minimum(_choice_margins(ranked, router), _group_margins(ranked, router)))


def _worst(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def _choice_margins(ranked: Tensor, router: Any) -> Tensor:
    """Return [T] fp64: K-th minus (K+1)-th of what experts are ranked by; infinite where a token has no further one."""
    options = router.options
    if options.topk == options.num_experts:
        return ranked.new_full(ranked.shape[:1], torch.inf, dtype=torch.float64)
    best = choice_scores(ranked, router.expert_bias, options).double().topk(options.topk + 1, dim=-1).values
    return best[:, -2] - best[:, -1]


def _group_margins(ranked: Tensor, router: Any) -> Tensor:
    """Return [T] fp64: worst chosen group minus best other group; infinite without groups or where all are chosen."""
    options = router.options
    if options.num_groups is None or options.group_topk is None or options.group_topk == options.num_groups:
        return ranked.new_full(ranked.shape[:1], torch.inf, dtype=torch.float64)
    ungrouped = ranked if router.expert_bias is None else ranked + router.expert_bias.to(ranked.dtype)
    best = group_scores(ungrouped.double(), options)
    chosen = torch.isfinite(choice_scores(ranked, router.expert_bias, options)).unflatten(-1, (options.num_groups, -1))
    inside = chosen.any(-1)
    worst_inside = best.masked_fill(~inside, torch.inf).amin(-1)
    return worst_inside - best.masked_fill(inside, -torch.inf).amax(-1)


def _drop_margin(weights: Tensor, decision: Any, options: Any) -> float:
    """Return the least weight kept minus the largest dropped, of the expert where they are closest.

    This rank's choices are compared, which are all there are in one process. Infinite where nothing is dropped, or not
    by weight.
    """
    if options.drop_policy != "probs" or bool(decision.kept.all()):
        return float("inf")
    experts, kept = decision.expert_ids.flatten(), decision.kept.flatten()
    lowest = weights.new_full((options.num_experts,), torch.inf)
    lowest = lowest.scatter_reduce(0, experts[kept], weights.flatten()[kept], "amin")
    highest = weights.new_full((options.num_experts,), -torch.inf)
    highest = highest.scatter_reduce(0, experts[~kept], weights.flatten()[~kept], "amax")
    return float((lowest - highest).min())
