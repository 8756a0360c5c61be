"""A probe that measures the margins of a router's choices on some tokens of one step.

The probe observes a router (`TopKRouter.observed_by`) during the steps that are measured. It keeps sums and maxima of
this rank; `megatron_moe/training/callbacks/reporting.py` combines the ranks afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_moe.moe.load_balance import dispatched_counts
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.routing import RoutedTokens, choice_scores, choose_experts, ranked_values, scores_from_logits

_STEPS_PER_OCTAVE, _LOWEST, _HIGHEST = 8, -40, 8
MARGIN_BINS = (_HIGHEST - _LOWEST) * _STEPS_PER_OCTAVE
"""The bins of the margins' histogram: 8 per factor of two between 2^-40 and 2^8; a percentile is accurate to 9 %."""


class RoutingProbe:
    """The sums over the sampled tokens of one router in one step.

    sampled, flipped: the sampled tokens, and those whose set of experts differs from the fp64 shadow's. margin_sum and
    margin_histogram [MARGIN_BINS] are over the tokens that had an alternative: with K = E, or K equal to the number of
    experts in a token's groups, there is no (K+1)-th score to compare with. max_logit is over all tokens that are not
    padding, infinite where a logit is not a number.

    Args:
        num_tokens: tokens to sample in the step, spread evenly over its micro-batches and within each of them.
        num_micro_batches: micro-batches of the step.
        num_sources: named sources, whose choices are counted; 0: none.
    """

    def __init__(self, num_tokens: int, num_micro_batches: int, num_sources: int = 0) -> None:
        self._num_tokens = num_tokens
        self._num_micro_batches = num_micro_batches
        self._seen = 0
        self.sums: Tensor | None = None
        """[3] fp64: sampled, flipped, margin_sum; None before the first micro-batch."""
        self.margin_histogram: Tensor | None = None
        self.max_logit: Tensor | None = None
        self.sources: Tensor | None = None
        """[K, B] bool, whether a sequence of the pass that comes is of a source."""
        self.tokens_per_source: Tensor | None = None
        """[K, E] int64, the choices that experts got of the tokens of each source; None without sources."""
        self._num_sources = num_sources

    @torch.no_grad()
    def see(self, router: TopKRouter, routed: RoutedTokens) -> None:
        """Measure one micro-batch.

        Raises:
            RuntimeError: nothing told the sources of its sequences.
        """
        logits, is_padding = routed.logits, routed.micro_batch.is_padding
        valid = None if is_padding is None else (~is_padding).nonzero().squeeze(-1)
        number = logits.shape[0] if valid is None else valid.shape[0]
        # Where the choice is not by score there is no margin, and no other choice in fp64.
        share = self._share() if router.options.chooses_by_score else 0
        sample = evenly(number, share, logits.device)
        ranked = ranked_values(logits, routed.scores, router.options)
        if valid is not None:
            sample, logits = valid[sample], logits[valid]
        if self.sums is None or self.margin_histogram is None or self.max_logit is None:
            self.sums = torch.zeros(3, dtype=torch.float64, device=logits.device)
            self.margin_histogram = torch.zeros(MARGIN_BINS, dtype=torch.int64, device=logits.device)
            self.max_logit = torch.zeros((), dtype=torch.float64, device=logits.device)
        if number:
            largest = logits.abs().amax().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
            self.max_logit = torch.maximum(self.max_logit, largest)
        flips = flipped(router, routed.hidden[sample], routed.decision.expert_ids[sample])
        margins = choice_margins(ranked[sample], router.expert_bias, router.options)
        self.sums += torch.stack([flips.new_tensor(flips.shape[0]), flips.sum(), margins.sum()])
        bins = ((margins.log2() - _LOWEST) * _STEPS_PER_OCTAVE).clamp(0, MARGIN_BINS - 1).long()
        self.margin_histogram += torch.bincount(bins, minlength=MARGIN_BINS)

        if self._num_sources and self.sources is None:
            raise RuntimeError(f"layer {router.layer_number}: a pass of a micro-batch whose sources are not known")
        if self.sources is not None:
            counts = torch.where(self.sources.unsqueeze(-1), dispatched_counts(routed), 0).sum(dim=1)
            self.tokens_per_source = counts if self.tokens_per_source is None else self.tokens_per_source + counts

    def _share(self) -> int:
        """Return the number of tokens to sample in this micro-batch."""
        before = self._seen * self._num_tokens // self._num_micro_batches
        self._seen += 1
        return self._seen * self._num_tokens // self._num_micro_batches - before


def evenly(number: int, wanted: int, device: torch.device) -> Tensor:
    """Return at most `wanted` of the indices below `number`, evenly spread and deterministic, int64."""
    take = min(number, wanted)
    return (torch.arange(take, device=device) * number) // max(take, 1)


def flipped(router: TopKRouter, hidden: Tensor, expert_ids: Tensor) -> Tensor:
    """Return [T] fp64, 1 where a router in fp64 chooses other experts than `expert_ids` [T, K] for `hidden` [T, H]."""
    bias = None if router.expert_bias is None else router.expert_bias.double()
    logits = router.logits_in_fp64(hidden)
    ranked = ranked_values(logits, scores_from_logits(logits, router.options), router.options)
    shadow = choose_experts(ranked, bias, router.options)
    return (shadow.sort(dim=-1).values != expert_ids.sort(dim=-1).values).any(dim=-1).double()


def choice_margins(ranked: Tensor, expert_bias: Tensor | None, options: MoEOptions) -> Tensor:
    """Return the K-th minus the (K+1)-th choice score, fp64, of the tokens that had an alternative; 0 is a tie."""
    if options.topk == options.num_experts:
        return torch.zeros(0, dtype=torch.float64, device=ranked.device)
    best = choice_scores(ranked, expert_bias, options).double().topk(options.topk + 1, dim=-1).values
    margins = best[:, -2] - best[:, -1]
    return margins[margins.isfinite()]


def margin_percentile(histogram: list[int], share: float) -> float | None:
    """Return the margin that `share` of the tokens are below, rounded down to a bin; None for an empty histogram."""
    total, below = sum(histogram), 0
    for index, number in enumerate(histogram):
        below += number
        if number and below >= share * total:
            return 0.0 if index == 0 else 2.0 ** (_LOWEST + index / _STEPS_PER_OCTAVE)
    return None
