"""The output layer and the loss: logits, cross entropy per token (fused or not), and its sum for the schedules.

The table is padded so that every tensor-parallel rank has an equal share. Columns of padding are no tokens: if they
took part in the softmax, the loss would depend on their number, and so on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.engine.layers import ColumnParallelLinear
from megatron_moe.engine.modules import DeepcopyKeepsGroups
from megatron_moe.model.cross_entropy import linear_cross_entropy
from megatron_moe.parallel.collectives import all_gather_rows, all_reduce_sum, shared_by_ranks
from megatron_moe.platform.protocols import AutogradContext
from megatron_moe.precision.contract import returns_wider

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""Logits [B, S, V] fp32 without padding and labels [B, S] int64 -> the loss [B, S] of each token.

A run multiplies by the loss mask and averages over the global batch, on every layout alike; S is a rank's part under
context parallelism."""


class OutputLayer(DeepcopyKeepsGroups, ColumnParallelLinear):
    """The engine's output layer, which gives columns of padding the least number of their dtype as logit.

    Its exponential is 0 next to any token's. It is not -inf, so that a search for non-finite numbers finds errors
    alone.

    Attributes:
        vocab_size: columns of the whole layer that are tokens.
    """

    vocab_size: int

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (logits [S, B, V / TP], None) for hidden states [S, B, H]; [S, B, V] where the output is gathered."""
        logits, bias = super().forward(input_, weight, runtime_gather_output)
        whole = logits.shape[-1] != self.output_size_per_partition
        first = 0 if whole else self.tp_group.rank() * self.output_size_per_partition
        tokens = max(self.vocab_size - first, 0)
        return (_WithoutPadding.apply(logits, tokens) if tokens < logits.shape[-1] else logits), bias


class _WithoutPadding(torch.autograd.Function):
    """A function that writes the least number into the columns from `tokens` on, in place to save memory."""

    @staticmethod
    def forward(ctx: AutogradContext, logits: Tensor, tokens: int) -> Tensor:
        ctx.tokens = tokens
        ctx.mark_dirty(logits)
        logits[..., tokens:] = torch.finfo(logits.dtype).min
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        grad[..., ctx.tokens :] = 0  # the softmax leaves 0 there; a function of the logits of another kind may not
        return grad, None


@returns_wider("the loss per token is fp32")
class OutputLayerWithLoss(OutputLayer):
    """An output layer that computes the loss itself when it is given labels.

    The loss is computed inside this layer's forward pass because with `--overlap-param-gather` the engine waits for a
    layer's weight where that layer is called.
    """

    chunk_tokens: int | None = None
    fused_gradient: bool = False

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (logits [S, B, V / TP], None) for hidden states [S, B, H]; with labels, (losses, None).

        Args:
            input_: hidden states; this rank's part of the sequence under sequence parallelism.
            weight: the embedding table, if the output layer shares it.
            labels: [B, S], of the whole sequence.

        Returns:
            losses: [B, S] fp32, per token.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        spread = all_gather_rows if self.sequence_parallel else shared_by_ranks
        hidden = spread(input_, self.tp_group)
        losses = linear_cross_entropy(
            hidden.flatten(0, 1),
            self.weight if weight is None else weight,
            labels.transpose(0, 1).reshape(-1),
            self.tp_group,
            self.chunk_tokens,
            vocab_size=self.vocab_size,
            fused_gradient=self.fused_gradient,
        )
        return losses.view(hidden.shape[:2]).transpose(0, 1).contiguous(), None


class FusedLoss:
    """A mixin before the engine's GPTModel that computes the loss in the output layer."""

    def token_losses(self: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy [B, S] fp32 of the output layer on hidden states [S, B, H] against labels [B, S]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        losses, _ = self.output_layer(hidden, weight=weight, labels=labels)
        return losses

    def _postprocess(self: Any, hidden_states: Tensor, *, labels: Tensor | None, **rest: Any) -> Tensor:
        """Return logits without labels and losses with them: the engine's last step of a forward pass."""
        if labels is None or not self.post_process or self.config.mtp_num_layers:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)  # type: ignore[misc]
        return self.token_losses(hidden_states, labels)


def loss_func(
    loss_mask: Tensor, output: Tensor, shared_by: ProcessGroup | None = None, sources: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: [B, S], 1 for tokens that count; a rank's own part of the sequence under context parallelism.
        output: [B, S] cross entropy per token, in nats.
        shared_by: the context-parallel ranks, where the loss is a mean over a micro-batch. The mean is over the tokens
            of all these ranks, whose numbers may differ: their tokens are added up (a collective), and because the
            gradients of these ranks will be averaged, each rank's sum is multiplied by the number of ranks.
        sources: [K, B] bool, whether a sequence is of a source; None: sources have no names.

    Returns:
        The sum (fp32 scalar), the number of tokens (int scalar), and for the logs {"lm loss": fp32 [sum, tokens]} of
        this rank alone, and {"source losses": fp64 [2, K]}, the same of each source. With three values the schedule
        divides by the tokens itself, or leaves that to the end of the step for a loss per token; with two it would also
        multiply by the context-parallel size.
    """
    mask = loss_mask.reshape(-1).float()
    losses = output.reshape(-1).float() * mask
    total = torch.sum(losses)
    tokens = mask.sum()
    # The schedule divides `total` in place; the logged value must not follow.
    logged = {"lm loss": torch.stack((total.detach().clone(), tokens))}
    if sources is not None:
        of_rows = torch.stack((losses.detach(), mask)).view(2, 1, *output.shape).sum(-1, dtype=torch.float64)
        # Not a product: one source's loss that is not finite would be every source's.
        logged["source losses"] = torch.where(sources, of_rows, 0.0).sum(-1)
    if shared_by is not None and shared_by.size() > 1:
        total, tokens = total * shared_by.size(), all_reduce_sum(tokens, shared_by)
    return total, tokens.to(torch.int), logged
