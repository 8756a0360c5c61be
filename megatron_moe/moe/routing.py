"""Routing: logits -> scores -> choice of experts -> weights -> choices within the experts' capacity.

`route` puts the steps together. What differs between routers is the choice: by score, by Sinkhorn's normalisation or
round robin (`chosen_experts`). The expert bias is added to the scores for the choice and does not enter the weights
(DeepSeek-V3, arXiv 2412.19437, section 2.1.2), whatever the score function is. A decision consists of indices [T, K],
without a dense [T, E] map.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.config.setting import SCORE_FUNCTIONS
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.moe.options import MoEGroups, MoEOptions
from megatron_moe.parallel.collectives import all_gather_rows, all_reduce_sum
from megatron_moe.platform.autograd import Function, once_differentiable
from megatron_moe.platform.protocols import AutogradContext


class MicroBatch(NamedTuple):
    """The properties of the T tokens that a router is given.

    is_padding: [T] bool, True for padding; None if no token is. num_sequences: B; token t is of sequence t % B, as in
    the engine's [S, B] order. training: whether the module trains. documents: [T] int64, the position in its sequence
    of the first token of a token's document, -1 for padding; None where they are not known.
    """

    is_padding: Tensor | None
    num_sequences: int
    training: bool
    documents: Tensor | None = None


@dataclass(frozen=True)
class ScoreFunction:
    """A function that scores the experts of a token, for `SCORE_FUNCTIONS.register`.

    scores: logits [T, E] in fp32 or fp64 -> scores [T, E] in the same dtype, not negative, differentiable, each row
    from its own logits alone. sums_to_one: whether each row is a distribution; the auxiliary losses divide other
    scores by their sum, and the weights of K > 1 experts are normalised in the same way unless a flag turns it off.
    """

    scores: Callable[[Tensor], Tensor]
    sums_to_one: bool


class RoutingDecision(NamedTuple):
    """The experts that each token is sent to, and their weights.

    expert_ids: [T, K] int64, the chosen experts of each token, all different.
    probs: [T, K] in the router's dtype (fp32), the weights of the experts' outputs; 0 for padded tokens.
    kept: [T, K] bool, False for choices that are not dispatched, whose weight is 0: padding, and choices beyond an
        expert's capacity. None without a capacity: all choices are dispatched.
    ahead: what the dispatcher has made of the choices ahead, see `Dispatcher.preprocess`; None: nothing.
    """

    expert_ids: Tensor
    probs: Tensor
    kept: Tensor | None = None
    ahead: tuple[Tensor, ...] | None = None


class RoutedTokens(NamedTuple):
    """One pass of a router over a micro-batch, for its observers and its load balancing.

    hidden: [T, H], the gate's input. logits, scores: [T, E]. decision: after the capacity, before the auxiliary losses
    are attached. counted: whether the pass counts for the step. The pass that has a backward does: recomputation runs
    the forward pass twice, first without gradients. live_ids: [T, K], the gate's own choice where balancing goes by it
    and the decision is another's; else None.
    """

    hidden: Tensor
    logits: Tensor
    scores: Tensor
    decision: RoutingDecision
    micro_batch: MicroBatch
    counted: bool
    live_ids: Tensor | None = None

    @property
    def balanced_ids(self) -> Tensor:
        """The choices [T, K] that balancing goes by."""
        return self.decision.expert_ids if self.live_ids is None else self.live_ids


Choice = Callable[[Tensor, Tensor, "Tensor | None", MicroBatch], Tensor]
"""(logits [T, E], scores [T, E], expert_bias [E] or None, micro-batch) -> [T, K] int64, different ones in each row."""


SCORE_FUNCTIONS.register("softmax", ScoreFunction(partial(torch.softmax, dim=-1), sums_to_one=True))
SCORE_FUNCTIONS.register("sigmoid", ScoreFunction(torch.sigmoid, sums_to_one=False))


# What the sum of chosen scores is at least, so that none divides by zero; DeepSeek-V3's number.
_SMALLEST_SUM = 1e-20


def scores_from_logits(logits: Tensor, options: MoEOptions) -> Tensor:
    """Return the scores [T, E] of all experts, in the dtype of the logits."""
    return SCORE_FUNCTIONS[options.score_function].scores(logits)


def ranked_values(logits: Tensor, scores: Tensor, options: MoEOptions) -> Tensor:
    """Return the values [T, E] by which experts and their groups are ranked, before a bias is added: the scores.

    With megatron-core's group score and a softmax after the choice they are the logits, since a softmax keeps the order
    of experts but not that of sums over groups. With an expert bias they are the scores there too: the bias grows by
    its update rate, which is a difference of scores, and megatron-core has no such bias to agree with.
    """
    if options.enable_expert_bias:
        return scores
    grouped_as_megatron = options.num_groups is not None and options.group_score == "megatron"
    softmax_after_choice = options.score_function == "softmax" and not options.pre_softmax
    return logits if grouped_as_megatron and softmax_after_choice else scores


def group_scores(choice: Tensor, options: MoEOptions) -> Tensor:
    """Return each token's score of each group of neighbouring experts, [T, groups], from [T, E] values plus bias.

    It is the group's best expert (`max`: DeepSeek-V2, arXiv 2405.04434), the sum of its best two (`top2`: DeepSeek-V3),
    or the sum of its best K // `group_topk` (`megatron`: megatron-core's group_limited_topk).
    """
    assert options.num_groups is not None and options.group_topk is not None
    grouped = choice.unflatten(-1, (options.num_groups, -1))
    if options.group_score == "max":
        return grouped.amax(dim=-1)
    summed = 2 if options.group_score == "top2" else options.topk // options.group_topk
    return grouped.topk(summed, dim=-1).values.sum(dim=-1)


def choice_scores(ranked: Tensor, expert_bias: Tensor | None, options: MoEOptions) -> Tensor:
    """Return the values [T, E] that decide the choice, without gradient.

    They are `ranked_values` plus bias, and -inf outside the groups that a token may use.
    """
    choice = ranked.detach()
    if expert_bias is not None:
        choice = choice + expert_bias.to(choice.dtype)
    if options.num_groups is None or options.group_topk is None:
        return choice
    of_groups = group_scores(choice, options)
    best = of_groups.topk(options.group_topk, dim=-1).indices
    outside = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, best, False)
    grouped = choice.unflatten(-1, (options.num_groups, -1))
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)


@has_kernel("choose_experts")
def choose_experts(ranked: Tensor, expert_bias: Tensor | None, options: MoEOptions) -> Tensor:
    """Return the K best experts of each token, [T, K] int64, by `ranked_values` plus bias, without gradient."""
    return choice_scores(ranked, expert_bias, options).topk(options.topk, dim=-1).indices


@has_kernel("expert_weights")
def expert_weights(
    weighed: Tensor,
    logits: Tensor,
    ids: Tensor,
    padding: Tensor | None,
    softmax: bool,
    normalize: bool,
    scaling: float,
) -> Tensor:
    """Return the weights [T, K] of the chosen experts, in the dtype of `weighed`.

    Args:
        weighed: [T, E], what the weights are made of.
        logits: [T, E]. The weights of a token with one that is not finite are NaN: a sigmoid turns an infinite logit
            into a score of 1, and nothing downstream would notice that the gate overflowed. With them the loss is NaN,
            and the step is not applied.
        ids: [T, K].
        padding: [T] bool, True for tokens whose weights are 0; None if there are none.
        softmax, normalize: whether the chosen values go through a softmax, or are divided by their sum.
        scaling: a factor of all weights.
    """
    probs = weighed.gather(-1, ids)
    if softmax:
        probs = torch.softmax(probs, dim=-1)
    elif normalize:
        probs = probs / (probs.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
    probs = probs * scaling + logits.sum(dim=-1, keepdim=True) * 0.0  # 0 x infinity is NaN
    return probs if padding is None else probs.masked_fill(padding.unsqueeze(-1), 0.0)


@has_kernel("expert_weights_backward")
def expert_weights_backward(
    grad: Tensor,
    weighed: Tensor,
    ids: Tensor,
    padding: Tensor | None,
    softmax: bool,
    normalize: bool,
    scaling: float,
) -> Tensor:
    """Return the gradient [T, E] of `weighed`, from that of the weights [T, K]; the others as in `expert_weights`."""
    slope, chosen = grad * scaling, weighed.gather(-1, ids)
    if padding is not None:
        slope = slope.masked_fill(padding.unsqueeze(-1), 0.0)
    if softmax:
        slope = torch._softmax_backward_data(slope, torch.softmax(chosen, dim=-1), -1, slope.dtype)
    elif normalize:
        total = chosen.sum(dim=-1, keepdim=True) + _SMALLEST_SUM
        slope = slope / total - (slope * (chosen / total / total)).sum(dim=-1, keepdim=True)
    return torch.zeros_like(weighed).scatter(-1, ids, slope)


Counts = tuple[Tensor, Tensor]
"""The experts' choices [E] fp32 and the tokens [1] int64, to which `add_counts` adds."""


@has_kernel("count_tokens")
def count_tokens(
    expert_ids: Tensor, num_experts: int, is_padding: Tensor | None = None, num_sequences: int = 1
) -> Tensor:
    """Return the number of tokens per sequence and expert, [B, E] int64, of a decision.

    Args:
        expert_ids: [T, K]; token t belongs to sequence t % B, as in the engine's [S, B] order.
        num_experts: E.
        is_padding: [T] bool, True for tokens that are not counted; None if none is padding.
        num_sequences: B.
    """
    num_tokens = expert_ids.shape[0]
    valid = (
        torch.ones_like(expert_ids) if is_padding is None else (~is_padding).long().unsqueeze(-1).expand_as(expert_ids)
    )
    counts = torch.zeros(num_sequences * num_experts, dtype=torch.int64, device=expert_ids.device)
    cell = expert_ids
    if num_sequences > 1:
        sequence = torch.arange(num_tokens, device=expert_ids.device) % num_sequences
        cell = expert_ids + sequence.unsqueeze(-1) * num_experts
    # Integer addition: atomics on a GPU may add in any order and still give the same bits, without a host sync.
    return counts.scatter_add_(0, cell.flatten(), valid.flatten()).view(num_sequences, num_experts)


@has_kernel("add_counts")
def add_counts(
    tokens_per_expert: Tensor, num_tokens: Tensor, expert_ids: Tensor, is_padding: Tensor | None = None
) -> None:
    """Add a decision's choices to the experts' counts [E] fp32, and its tokens to `num_tokens` [1] int64, in place.

    expert_ids, is_padding: see `count_tokens`. Sums of whole numbers up to 2^24 are exact in any order.
    """
    tokens_per_expert += count_tokens(expert_ids, tokens_per_expert.shape[0], is_padding)[0]
    num_tokens += expert_ids.shape[0] if is_padding is None else (~is_padding).sum()


@has_kernel("choose_and_weigh")
def choose_and_weigh(
    ranked: Tensor,
    expert_bias: Tensor | None,
    weighed: Tensor,
    logits: Tensor,
    padding: Tensor | None,
    options: MoEOptions,
    counts: Counts | None,
    *how: Any,
) -> tuple[Tensor, Tensor]:
    """Return what `choose_experts` and then `expert_weights` return, and count the choices of tokens, in one.

    All padding looks alike. Its rows, which weigh nothing, go to all experts in turn.

    Args:
        counts: what `add_counts` adds to; None: nothing is counted.
        how: as in `expert_weights`; the others as there and in `choose_experts`.
    """
    ids = _apart(choose_experts(ranked, expert_bias, options), padding, ranked.shape[-1])
    if counts is not None:
        add_counts(*counts, ids, padding)
    return ids, expert_weights(weighed, logits, ids, padding, *how)


def _apart(expert_ids: Tensor, padding: Tensor | None, num_experts: int) -> Tensor:
    """Return the experts of each token, with padding on all in turn."""
    if padding is None:
        return expert_ids
    choice = torch.arange(expert_ids.numel(), device=expert_ids.device).view_as(expert_ids)
    return torch.where(padding.unsqueeze(-1), choice % num_experts, expert_ids)


class _ExpertWeights(Function):
    """The experts and weights that `work` returns. The weights have a gradient, which is that of `weighed`."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        work: Callable[[], tuple[Tensor, Tensor]],
        weighed: Tensor,
        padding: Tensor | None,
        how: tuple[bool, bool, float],
    ) -> tuple[Tensor, Tensor]:
        ids, probs = work()
        ctx.how = how
        ctx.save_for_backward(weighed, ids, padding)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)  # of the experts: they would be zeros that nobody reads
        return ids, probs

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, _: None, grad: Tensor) -> tuple[Tensor | None, ...]:
        weighed, ids, padding = ctx.saved_tensors
        return None, expert_weights_backward(grad, weighed, ids, padding, *ctx.how), None, None


def _weighing(options: MoEOptions) -> tuple[bool, bool, float]:
    """Return the last arguments of `expert_weights`.

    A softmax over the chosen logits alone is the normalised softmax over all of them, and is exact where the sum of
    the chosen scores underflows; so that is what the softmax without `pre_softmax` uses.
    """
    softmax = options.score_function == "softmax" and not options.pre_softmax and options.norm_topk_prob
    return softmax, options.norm_topk_prob, options.scaling_factor or 1.0


def weigh_experts(
    logits: Tensor, scores: Tensor, expert_ids: Tensor, options: MoEOptions, is_padding: Tensor | None = None
) -> Tensor:
    """Return the weights [T, K] of the chosen experts, from unbiased scores; 0 for padding."""
    how = _weighing(options)
    weighed = logits if how[0] else scores

    def work() -> tuple[Tensor, Tensor]:
        return expert_ids, expert_weights(weighed, logits, expert_ids, is_padding, *how)

    return _ExpertWeights.apply(work, weighed, is_padding, how)[1]


def route(
    logits: Tensor,
    scores: Tensor,
    expert_bias: Tensor | None,
    options: MoEOptions,
    micro_batch: MicroBatch,
    choose: Choice | None = None,
    counts: Counts | None = None,
) -> RoutingDecision:
    """Choose the experts of every token, weigh them, and count them.

    Args:
        logits, scores: [T, E], fp32 or fp64.
        expert_bias: [E] fp32, or None.
        options: the layer's options.
        micro_batch: the tokens' properties. The weights of padding are 0, so that it reaches no output and sends no
            gradient.
        choose: the choice of experts, see `chosen_experts`; None: the best ones by their scores.
        counts: what is counted, see `choose_and_weigh`.

    Returns:
        The decision. The weights of a token with a logit that is not finite are NaN.
    """
    padding, how = micro_batch.is_padding, _weighing(options)
    weighed = logits if how[0] else scores

    def work() -> tuple[Tensor, Tensor]:
        if choose is None:
            ranked = ranked_values(logits, scores, options)
            return choose_and_weigh(ranked, expert_bias, weighed, logits, padding, options, counts, *how)
        ids = _apart(choose(logits, scores, expert_bias, micro_batch), padding, logits.shape[-1])
        if counts is not None:
            add_counts(*counts, ids, padding)
        return ids, expert_weights(weighed, logits, ids, padding, *how)

    return RoutingDecision(*_ExpertWeights.apply(work, weighed, padding, how))


# Sinkhorn's normalisation makes the experts be chosen about equally often within a micro-batch. It is S-BASE (arXiv
# 2202.01169) with Megatron-LM's iteration and tolerance, but in fp64 and with each token's logits taken relative to
# their largest, so that none overflows; a token's own factor does not change the order of its experts.

TOLERANCE = 1e-4
_EPSILON = 1e-8
MAX_ROUNDS = 1000
"""The limit on rounds. Without convergence the choice is still valid, and less even."""


@torch.no_grad()
def sinkhorn_scores(logits: Tensor, is_padding: Tensor | None, group: ProcessGroup) -> Tensor:
    """Return exp(logits) [T, E] fp64, times a factor per expert that makes the experts' shares of tokens equal.

    Rows and columns are normalised in turn until the experts' factors change by less than 1e-4 in the mean. The sums
    over tokens are over all ranks of `group`, so that the result does not depend on how a micro-batch is split. The
    end is decided on the host: one synchronisation, and one all-reduce of E numbers, per round.

    Args:
        logits: [T, E] of this rank.
        is_padding: [T] bool, True for tokens that take no part; their rows are 0.
        group: the ranks that share the micro-batch.
    """
    wide = logits.double()
    cost = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    valid = torch.ones_like(wide[:, 0])
    if is_padding is not None:
        valid = (~is_padding).double()
        cost = cost * valid.unsqueeze(-1)
    num_tokens, num_experts = all_reduce_sum(valid.sum(), group), cost.shape[1]
    factors = cost.new_ones(num_experts)
    for _ in range(MAX_ROUNDS):
        token_factors = 1 / (num_tokens * (cost @ factors + _EPSILON))
        columns = all_reduce_sum(token_factors @ cost, group)
        updated = 1 / (num_experts * (columns + _EPSILON))
        change = (updated - factors).abs().mean()
        factors = updated
        if not bool(change > TOLERANCE):  # also where a logit is not a number: the step will not be applied
            break
    return cost * factors


def positions(num_tokens: int, num_sequences: int, groups: MoEGroups, device: torch.device) -> Tensor:
    """Return the positions [T] int64 of this rank's tokens in the [S, B] order of their whole micro-batch.

    Under sequence parallelism TP rank r has the r-th piece of the part of its context-parallel rank c, which consists
    of the chunks c and 2 CP - 1 - c of the sequence's 2 CP chunks.
    """
    tp, tp_rank = groups.tp.size(), groups.tp.rank()
    cp, cp_rank = groups.tp_cp.size() // tp, groups.tp_cp.rank() // tp  # TP ranks are neighbours
    token = torch.arange(num_tokens, device=device)
    length = num_tokens // num_sequences
    position = tp_rank * length + token // num_sequences  # in the context-parallel rank's part of the sequence
    if cp > 1:
        half = length * tp // 2
        chunk = torch.where(position < half, cp_rank, 2 * cp - 1 - cp_rank)
        position = chunk * half + position % half
    return position * num_sequences + token % num_sequences


def chosen_experts(
    options: MoEOptions,
    groups: MoEGroups,
    logits: Tensor,
    scores: Tensor,
    expert_bias: Tensor | None,
    micro_batch: MicroBatch,
) -> Tensor:
    """Return the K experts of each token, [T, K] int64: with the first two arguments given, a `Choice`.

    By score plus bias they are the best ones within the token's groups.

    By Sinkhorn's normalisation they are the best ones in training, and those by score in evaluation. It is over the
    micro-batch's tokens on all TP x CP ranks; in Megatron-LM, which this follows otherwise, every rank normalises its
    own tokens.

    With a forced balance token p of the micro-batch gets the experts p K, p K + 1, ... modulo E, whatever its scores
    are. Every expert gets the same number of choices where E divides the micro-batch's tokens x K.
    """
    if options.force_load_balancing:
        position = positions(logits.shape[0], micro_batch.num_sequences, groups, logits.device)
        turn = torch.arange(options.topk, device=logits.device)
        return (position.unsqueeze(1) * options.topk + turn) % options.num_experts
    if not options.sinkhorn:
        return choose_experts(ranked_values(logits, scores, options), expert_bias, options)
    if not micro_batch.training:
        return choose_experts(scores, None, options)
    balanced = sinkhorn_scores(logits, micro_batch.is_padding, groups.tp_cp)
    return balanced.topk(options.topk, dim=-1).indices


# ---- Expert capacity, the limit on an expert's choices in a micro-batch.
#
# The micro-batch is that of all TP x CP ranks together, and the decision is made on all of its choices, so that every
# layout keeps the same ones. At TP = CP = 1 the rules are Megatron-LM's, except that ties are broken by position.


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
    """A limit that drops the choices beyond the experts' capacity, if any, which get weight 0 and are not dispatched.

    The other weights of the token do not change.
    """

    def __init__(self, options: MoEOptions, groups: MoEGroups) -> None:
        self.options, self.groups, self.factor = options, groups, options.capacity_factor
        self.by_weight = options.drop_policy == "probs"

    def __call__(self, decision: RoutingDecision, micro_batch: MicroBatch) -> RoutingDecision:
        """Return the decision with `kept`, and weights of 0 where it is False. Collective over TP x CP."""
        if self.factor is None:
            return decision
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
