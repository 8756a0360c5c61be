"""Load balancing of the experts.

Pure functions come first: token counts, the bias update and the shares of the auxiliary losses. After them the state
that a router keeps during a step: its tokens (`StepTokens`) and its auxiliary losses (`AuxLosses`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.config.setting import SCORE_FUNCTIONS
from megatron_moe.engine.schedules import MoEAuxLossAutoScaler
from megatron_moe.moe.options import MoEGroups, MoEOptions
from megatron_moe.moe.routing import RoutedTokens, RoutingDecision, count_tokens
from megatron_moe.parallel.collectives import all_reduce_sum
from megatron_moe.platform.protocols import AutogradContext

EXACT_FP32_INTEGER = 2**24
"""Every integer up to this one is a float32; a count beyond it would be rounded."""


class TokenCountError(RuntimeError):
    """An error for a step whose counts are not its tokens x K: some were lost, or counted twice."""


def requested_counts(routed: RoutedTokens) -> Tensor:
    """Return the number of choices per sequence and expert, [B, E] int64, before the capacity drops any.

    Balancing goes by these counts, including choices that an expert has no capacity for.
    """
    ids, micro_batch = routed.balanced_ids, routed.micro_batch
    return count_tokens(ids, routed.scores.shape[-1], micro_batch.is_padding, micro_batch.num_sequences)


def dispatched_counts(routed: RoutedTokens) -> Tensor:
    """Return the number of choices per sequence and expert that are dispatched, [B, E] int64."""
    ids, kept, num_sequences = routed.decision.expert_ids, routed.decision.kept, routed.micro_batch.num_sequences
    if kept is None:
        return requested_counts(routed._replace(live_ids=None))
    # All first choices, then all second ones: a choice's place says, as a token's does, of which sequence it is.
    one_each = ids.t().reshape(-1, 1)
    return count_tokens(one_each, routed.scores.shape[-1], ~kept.t().reshape(-1), num_sequences)


def updated_expert_bias(
    expert_bias: Tensor, tokens_per_expert: Tensor, update_rate: float, center: bool = False
) -> Tensor:
    """Return the bias after a step of auxiliary-loss-free balancing (arXiv 2408.15664).

    It goes up for experts below the mean load, and down for those above.

    The sign is decided in integers: an expert is below the mean where E x count < total. No division, no rounding,
    no dependence on the order in which ranks were summed.

    Args:
        expert_bias: [..., E] fp32.
        tokens_per_expert: [..., E] int64, summed over all ranks that share the global batch.
        update_rate: the step.
        center: whether to subtract the mean (in fp64) from the result. The choice of experts depends on differences
            only, so it stays the same. Without this the mean drifts, because the numbers of experts below and above
            the mean load differ.

    Returns:
        A new [..., E] fp32.

    Raises:
        TypeError: if the bias is not float32 or the counts are not int64.
    """
    if expert_bias.dtype != torch.float32 or tokens_per_expert.dtype != torch.int64:
        raise TypeError(
            f"the expert bias update needs a float32 bias and int64 counts, got {expert_bias.dtype} and "
            f"{tokens_per_expert.dtype}"
        )
    total = tokens_per_expert.sum(dim=-1, keepdim=True)
    direction = torch.sign(total - tokens_per_expert * tokens_per_expert.shape[-1])
    updated = expert_bias + direction.to(torch.float32) * update_rate
    if not center:
        return updated
    wide = updated.double()
    return (wide - wide.mean(dim=-1, keepdim=True)).to(torch.float32)


# Quantile balancing (Kimi K3's technical report, 2.3.3 and appendix D). A token takes expert i where score plus bias is
# above its threshold, the best value that it does not choose. So an expert takes its even share of the tokens with the
# bias above just that share of the tokens' differences threshold - score. Each expert's differences are counted in bins
# of equal width: whole numbers, whose sums over micro-batches and ranks have no roundings and no order.


def difference_bins(expert_bias: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """Return where the first bin of the differences begins, and a bin's width, in the dtype of the bias [E].

    Scores are from 0 to 1, so thresholds are from the least bias to the largest plus 1.
    """
    low = expert_bias.min() - 1
    return low, (expert_bias.max() + 1 - low) / num_bins


@torch.no_grad()
def count_differences(
    histogram: Tensor, scores: Tensor, expert_bias: Tensor, topk: int, is_padding: Tensor | None = None
) -> None:
    """Add each token's threshold less its score, for each expert, to the histogram [E, bins] int32, in place.

    Args:
        scores: [T, E], from 0 to 1. expert_bias: [E], by which these tokens chose `topk` of the experts, and not all.
        is_padding: [T] bool, True for tokens that are not counted.
    """
    num_experts, num_bins = histogram.shape
    bias = expert_bias.to(scores.dtype)
    low, width = difference_bins(bias, num_bins)
    threshold = (scores + bias).topk(topk + 1, dim=-1).values[:, -1:]
    place = ((threshold - scores - low) / width).long().clamp_(0, num_bins - 1)
    place += torch.arange(num_experts, device=place.device) * num_bins
    counted = torch.ones_like(place, dtype=histogram.dtype)
    if is_padding is not None:
        counted.masked_fill_(is_padding.unsqueeze(-1), 0)
    histogram.view(-1).scatter_add_(0, place.flatten(), counted.flatten())


def quantile_bias(expert_bias: Tensor, histogram: Tensor, topk: int, ema: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the bias with which each expert would have had K / E of the tokens, and the bound of its error.

    The quantile's bin is found in integers; inside it differences count as evenly spread. The mean is subtracted.

    Args:
        expert_bias: [E] fp32, the bias of the step. histogram: [E, bins] int64, see `count_differences`, summed over
            all ranks that share the global batch.
        ema: the share of the old bias in the new one.

    Returns:
        A new [E] fp32, and the width of a bin, fp64: the exact quantile is in the same bin, and the bias within
        1 - `ema` of that width.
    """
    if expert_bias.dtype != torch.float32 or histogram.dtype != torch.int64:
        raise TypeError(f"needs a float32 bias and int64 counts, got {expert_bias.dtype} and {histogram.dtype}")
    num_experts, num_bins = histogram.shape
    old = expert_bias.double()
    low, width = difference_bins(old, num_bins)
    up_to = histogram.cumsum(dim=-1) * num_experts  # compared as whole numbers: counts x E with tokens x K
    wanted = up_to[:, -1:] // num_experts * topk
    place = (up_to < wanted).sum(dim=-1, keepdim=True)
    inside = histogram.gather(-1, place) * num_experts
    share = (wanted - up_to.gather(-1, place) + inside).double() / inside.clamp(min=1)
    found = (low + (place + share) * width).squeeze(-1)
    updated = old * ema + (found - found.mean()) * (1 - ema)
    return updated.to(torch.float32), width


def balance_share(scores: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return this rank's share of a load-balancing loss (Switch, arXiv 2101.03961, for K choices), summed over tokens.

    For one set of tokens the loss is E x sum_i f_i P_i, with f_i the share of the choices that fell on expert i and
    P_i the mean score of expert i. The result is loss x tokens, summed over the sets; divided by the tokens it is their
    mean, weighted by tokens. f is over all ranks that share a set and the scores are this rank's, so that all ranks'
    shares add up to the whole.

    Args:
        scores: [T, E] fp32 or fp64, one distribution per valid local token, rows of padding zero; token t is in set
            t % B.
        tokens_per_expert: [B, E] int64, choices per set and expert over all ranks that share the set.
    """
    num_sets, num_experts = tokens_per_expert.shape
    choices = tokens_per_expert.sum(dim=-1, keepdim=True).clamp(min=1)
    f = (tokens_per_expert.double() / choices).to(scores.dtype)  # counts of a global batch may pass 2^24
    return num_experts * (f * scores.view(-1, num_sets, num_experts).sum(dim=0)).sum()


def document_balance_share(
    scores: Tensor, expert_ids: Tensor, documents: Tensor, num_sequences: int, group: ProcessGroup
) -> Tensor:
    """Return what `balance_share` returns, for sets that are documents. Collective over `group`.

    Args:
        scores: as `balance_share`'s. expert_ids: [T, K], the choices, dropped ones included.
        documents: [T] int64, see `routing.MicroBatch`; B = `num_sequences`.
        group: the ranks that share the sequences, whose T tokens each are all of them, once or more.
    """
    num_tokens, num_experts = scores.shape
    sequence = torch.arange(num_tokens, device=scores.device) % num_sequences
    # A document's row is its first token's number among all tokens, on every rank alike.
    row = documents.clamp(min=0) * num_sequences + sequence
    valid = (documents >= 0).to(torch.int32).unsqueeze(-1).expand_as(expert_ids)
    counts = torch.zeros(group.size() * num_tokens * num_experts, dtype=torch.int32, device=scores.device)
    counts.scatter_add_(0, (row.unsqueeze(-1) * num_experts + expert_ids).flatten(), valid.flatten())
    of_token = all_reduce_sum(counts, group).view(-1, num_experts)[row]
    choices = of_token.sum(dim=-1, keepdim=True).clamp(min=1)
    f = (of_token.double() / choices).to(scores.dtype)
    return num_experts * (f * scores).sum()


# Each auxiliary loss is a sum over sets of tokens, loss of the set x tokens of the set, divided by the tokens of the
# global batch. The sets are a sequence or a document in it (seq_aux_loss), a micro-batch (aux_loss), the global batch
# (global_aux_loss), or a token (z_loss). A rank attaches its own share of the sum; all ranks' shares add up, however
# the global batch is split.


@dataclass(frozen=True)
class GlobalBatch:
    """The global batch, which a step announces to the routers before the first micro-batch.

    num_tokens: tokens, without padding, that every router will route, over all ranks and micro-batches.
    loss_weight: the factor of one token's auxiliary loss when it is attached, such that after the engine's scaling (by
    1 / micro-batches and the mean over data-parallel ranks, or for a loss per token by 1 / tokens with a loss) each
    token of the global batch has the weight 1 / num_tokens. A number, or a tensor of one.
    tokens_per_expert: [E] int64, the choices of the global batch before any is dropped; None if not counted ahead.
    """

    num_tokens: int
    loss_weight: float | Tensor
    tokens_per_expert: Tensor | None = None


class StepTokens:
    """The tokens that a router was given since the last committed or abandoned step, and their global batch.

    num_tokens: on this rank, padding included; counted on the host, for a replay of a captured graph by what replays it
    (`engine/cuda_graphs.py`). global_batch: None until a step announces it.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.global_batch: GlobalBatch | None = None

    def add(self, num_tokens: int, where: str) -> None:
        """Count a micro-batch of `num_tokens` tokens; `where` names the layer for the message.

        Raises:
            OverflowError: before a count could pass 2^24, from where fp32 rounds integers. An expert gets at most one
                choice per token, so the number of tokens bounds every count without a sync.
        """
        if self.num_tokens + num_tokens > EXACT_FP32_INTEGER:
            raise OverflowError(
                f"{where}: {self.num_tokens + num_tokens} tokens on one rank in one step; counts are exact up to "
                f"{EXACT_FP32_INTEGER}. Use a smaller --global-batch-size or more data-parallel ranks."
            )
        self.num_tokens += num_tokens


class AuxLosses:
    """The auxiliary losses of one router, and their sums since the last step.

    totals: this rank's share of each loss's sum over tokens, fp64, by name. Without an announced global batch the
    losses are weighed as in Megatron-LM: each micro-batch alike, or each token where the loss is per token.

    All tensors stay where they are from step to step, and are filled in place: a captured graph reads and adds there.
    """

    def __init__(self, options: MoEOptions, groups: MoEGroups) -> None:
        self.options, self.groups = options, groups
        self.sums_to_one = SCORE_FUNCTIONS[options.score_function].sums_to_one
        self.totals: dict[str, Tensor] = {}
        self._weight: Tensor | None = None  # fp64, of the announced global batch; None: no batch was ever announced
        self._ahead: Tensor | None = None  # [1, E] int64, the announced choices
        self._counted: Tensor | None = None  # [1, E]: global_aux_loss without counts ahead
        self._announced = self._counted_ahead = False
        self._terms = [*options.aux_losses]
        if options.z_loss_coeff:
            self._terms.append(("z_loss", options.z_loss_coeff))

    def reset(self) -> None:
        """Reset the sums and forget the global batch, after a step was committed or abandoned."""
        for total in self.totals.values():
            total.zero_()
        if self._counted is not None:
            self._counted.zero_()
        self._announced = self._counted_ahead = False

    def announce(self, global_batch: GlobalBatch, device: torch.device) -> None:
        """Weigh the losses of the coming passes by a global batch, until they are reset."""
        weight, ahead = global_batch.loss_weight, global_batch.tokens_per_expert
        if self._weight is None:
            self._weight = torch.zeros((), dtype=torch.float64, device=device)
        if isinstance(weight, Tensor):
            self._weight.copy_(weight)
        else:
            self._weight.fill_(weight)
        if ahead is not None:
            if self._ahead is None:
                self._ahead = torch.zeros_like(ahead).unsqueeze(0)
            self._ahead.copy_(ahead)
        self._announced, self._counted_ahead = True, ahead is not None

    def attach(self, routed: RoutedTokens, requested: Tensor) -> RoutingDecision:
        """Attach the losses' gradients to the graph at the probs, with the scale that the engine's schedule sets.

        Args:
            requested: [B, E] int64, this rank's choices per sequence and expert, dropped ones included.
        """
        is_padding = routed.micro_batch.is_padding
        counts = all_reduce_sum(requested, self.groups.tp_cp)
        scores = routed.scores
        if not self.sums_to_one:
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        if is_padding is not None:
            scores = scores.masked_fill(is_padding.unsqueeze(-1), 0.0)
        weight: float | Tensor
        if self._announced and self._weight is not None:
            weight = self._weight.to(scores.dtype)
        elif self.options.per_token_loss:
            weight = 1.0
        else:
            weight = self.options.topk / counts.sum().clamp(min=1).to(scores.dtype)
        probs = routed.decision.probs
        for name, coeff in self._terms:
            if name == "z_loss":
                # The router z-loss (ST-MoE, arXiv 2202.08906): the sum over tokens of logsumexp^2.
                squares = torch.logsumexp(routed.logits, dim=-1).square()
                if is_padding is not None:
                    squares = squares.masked_fill(is_padding, 0.0)
                value = squares.sum()
            elif name == "seq_aux_loss" and self.options.seq_loss_per == "document":
                of_batch, ids = routed.micro_batch, routed.balanced_ids
                if of_batch.documents is None:
                    raise ValueError("moe_seq_aux_loss_per document needs the tokens' documents as padding_mask")
                value = document_balance_share(
                    scores, ids, of_batch.documents, of_batch.num_sequences, self.groups.tp_cp
                )
            else:
                value = balance_share(scores, self._counts_of_sets(name, counts))
            if name not in self.totals:
                self.totals[name] = torch.zeros((), dtype=torch.float64, device=value.device)
            self.totals[name] += value.detach().double()
            probs = _Attached.apply(probs, value * coeff * weight)
        return routed.decision._replace(probs=probs)

    def _counts_of_sets(self, name: str, counts: Tensor) -> Tensor:
        """Return the choices [sets, E] of the sets of a loss, from those [B, E] of the micro-batch's sequences."""
        if name == "seq_aux_loss":
            return counts
        of_micro_batch = counts.sum(dim=0, keepdim=True)
        if name == "aux_loss":
            return of_micro_batch
        if self._counted_ahead and self._ahead is not None:
            return self._ahead
        # Without counts ahead, the part of the global batch that was seen so far, which is all of it if there is one
        # micro-batch. All TP x CP ranks of a micro-batch bring its counts: of every expert equally many times too much.
        now = all_reduce_sum(of_micro_batch, self.groups.tp_dp_cp)
        if self._counted is None:
            self._counted = torch.zeros_like(now)
        self._counted += now
        return self._counted


class _Attached(torch.autograd.Function):
    """The identity on the probs, whose backward gives the loss the scale that the engine's schedule has set, or 1.

    The engine's function of this kind sets a scale itself if there is none. That scale would remain after the pass, and
    the next schedule in the process cannot write its own into it.
    """

    @staticmethod
    def forward(ctx: AutogradContext, probs: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return probs

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return grad, torch.ones_like(loss) if scale is None else torch.ones_like(loss) * scale
