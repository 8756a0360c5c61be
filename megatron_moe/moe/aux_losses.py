"""Auxiliary losses of one router: what each adds, per token of the global batch, and how it enters the gradient.

Each loss is a sum over sets of tokens, loss of the set x tokens of the set, and it is divided by the tokens of the
global batch. The sets: a sequence (seq_aux_loss), a micro-batch (aux_loss), the global batch (global_aux_loss), a token
(z_loss). A rank attaches its own share of the sum; all ranks' shares add up, however the global batch is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_moe.moe.groups import MoEGroups
from megatron_moe.moe.load_balance import balance_share, z_loss_share
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe.parallel.collectives import sum_over_ranks


@dataclass(frozen=True)
class GlobalBatch:
    """What a step tells its routers before the first micro-batch.

    num_tokens: tokens, without padding, that every router will route, over all ranks and micro-batches.
    loss_weight: what one token's auxiliary loss is multiplied by when it is attached, so that after the engine's
    scaling (by 1 / micro-batches and the mean over data-parallel ranks, or for a loss per token by 1 / tokens with a
    loss) each token of the global batch has the weight 1 / num_tokens. A number, or a tensor of one.
    tokens_per_expert: [E] int64, of the whole global batch before any choice is dropped, where it was counted ahead.
    """

    num_tokens: int
    loss_weight: float | Tensor
    tokens_per_expert: Tensor | None = None


@dataclass(frozen=True)
class RoutedMicroBatch:
    """What the losses are made of. logits, scores: [T, E] of this rank, each row of `scores` a distribution, or zeros
    for padding. counts: [B, E] int64, choices per sequence and expert over all ranks of the micro-batch."""

    logits: Tensor
    scores: Tensor
    counts: Tensor
    is_padding: Tensor | None
    global_batch: GlobalBatch | None


class AuxLosses:
    """The losses of one router, and what they have come to since the last step.

    totals: by name this rank's share of the sum over tokens, fp64. A router that no step tells about its global batch
    weighs as Megatron-LM does: each micro-batch alike, or each token where the loss is per token.
    """

    def __init__(self, options: MoEOptions, groups: MoEGroups) -> None:
        self.options, self.groups = options, groups
        self.totals: dict[str, Tensor] = {}
        self._counted: Tensor | None = None  # [1, E]: global_aux_loss without counts ahead
        shares: dict[str, Callable[[RoutedMicroBatch], Tensor]] = {
            "aux_loss": self._micro_batch_share,
            "seq_aux_loss": self._sequence_share,
            "global_aux_loss": self._global_batch_share,
        }
        self._terms = [(name, coeff, shares[name]) for name, coeff in options.aux_losses]
        if options.z_loss_coeff:
            self._terms.append(("z_loss", options.z_loss_coeff, _z_loss_share))

    def reset(self) -> None:
        """The step is over, or given up."""
        self.totals = {}
        self._counted = None

    def attach(
        self,
        decision: RoutingDecision,
        logits: Tensor,
        scores: Tensor,
        counts: Tensor,
        is_padding: Tensor | None,
        global_batch: GlobalBatch | None,
    ) -> RoutingDecision:
        """Let the losses' gradients enter the graph at the probs, with the scale that the engine's schedule sets.

        Args:
            counts: [B, E] int64, this rank's choices per sequence and expert, dropped ones too.
        """
        counts = sum_over_ranks(counts, self.groups.tp_cp)
        seen = RoutedMicroBatch(logits, self._distributions(scores, is_padding), counts, is_padding, global_batch)
        weight = self._weight(seen)
        probs = decision.probs
        for name, coeff, share in self._terms:
            value = share(seen)
            previous = self.totals.get(name)
            now = value.detach().double()
            self.totals[name] = now if previous is None else previous + now
            probs = _Attached.apply(probs, value * coeff * weight)
        return decision._replace(probs=probs)

    def _weight(self, seen: RoutedMicroBatch) -> float | Tensor:
        if seen.global_batch is not None:
            weight = seen.global_batch.loss_weight
            return weight.to(seen.scores.dtype) if isinstance(weight, Tensor) else weight
        if self.options.per_token_loss:
            return 1.0
        return self.options.topk / seen.counts.sum().clamp(min=1).to(seen.scores.dtype)

    def _distributions(self, scores: Tensor, is_padding: Tensor | None) -> Tensor:
        if self.options.score_function == "sigmoid":
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return scores if is_padding is None else scores.masked_fill(is_padding.unsqueeze(-1), 0.0)

    def _sequence_share(self, seen: RoutedMicroBatch) -> Tensor:
        return balance_share(seen.scores, seen.counts)

    def _micro_batch_share(self, seen: RoutedMicroBatch) -> Tensor:
        return balance_share(seen.scores, seen.counts.sum(dim=0, keepdim=True))

    def _global_batch_share(self, seen: RoutedMicroBatch) -> Tensor:
        told = seen.global_batch
        if told is not None and told.tokens_per_expert is not None:
            return balance_share(seen.scores, told.tokens_per_expert.unsqueeze(0))
        # Nothing was counted ahead: the whole global batch if this is its only micro-batch, else what was seen of it.
        # `counts` is the same on all ranks of the micro-batch; their first stands for them.
        mine = seen.counts.sum(dim=0, keepdim=True) * int(self.groups.tp_cp.rank() == 0)
        now = sum_over_ranks(mine, self.groups.tp_dp_cp)
        self._counted = now if self._counted is None else self._counted + now
        return balance_share(seen.scores, self._counted)


class _Attached(torch.autograd.Function):
    """Hands on the probs; in the backward pass the loss gets the scale that the engine's schedule has set, or 1.

    The engine's function of this kind sets a scale itself where there is none. It would outlive the pass, and the next
    schedule in the process cannot write its own into it.
    """

    @staticmethod
    def forward(ctx: Any, probs: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return grad, torch.ones_like(loss) if scale is None else torch.ones_like(loss) * scale


def _z_loss_share(seen: RoutedMicroBatch) -> Tensor:
    return z_loss_share(seen.logits, seen.is_padding)


def build_aux_losses(options: MoEOptions, groups: MoEGroups) -> AuxLosses | None:
    """The losses that the options ask for; None if there is none."""
    return AuxLosses(options, groups) if options.aux_losses or options.z_loss_coeff else None
