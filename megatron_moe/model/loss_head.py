"""The output layer: logits without the vocabulary's padding, or losses in place of logits.

The table is padded so that every tensor-parallel rank holds an equal share. Columns that only pad are no tokens: left
as they are, they take part in the softmax, and the loss depends on how many there are, on the layout that is.

The fused loss is computed inside the output layer's own forward pass, not beside it: with `--overlap-param-gather` the
engine waits for a layer's weight where that layer is called.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_moe.model.linear_cross_entropy import linear_cross_entropy
from megatron_moe.parallel.collectives import all_gather_rows, shared_by_ranks
from megatron_moe.parallel.copying import CopiesShareGroups
from megatron_moe.precision.declared import returns_wider


class OutputLayer(CopiesShareGroups, ColumnParallelLinear):
    """The engine's output layer; the logit of a column that only pads the vocabulary is its dtype's least number, whose
    exponential is 0 beside any token's. Not -inf: who looks for numbers that are not finite is to find errors.

    Attributes:
        vocab_size: columns of the whole layer that are tokens.
    """

    vocab_size: int

    @classmethod
    def take_over(cls, layer: ColumnParallelLinear, vocab_size: int) -> None:
        """Make an output layer that GPTModel has built one of these: it builds its own without asking for the class,
        and nothing but the forward pass differs."""
        layer.__class__ = cls
        layer.vocab_size = vocab_size

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """hidden states [S, B, H] -> (logits [S, B, V / TP], None); [S, B, V] where the output is gathered."""
        logits, bias = super().forward(input_, weight, runtime_gather_output)
        whole = logits.shape[-1] != self.output_size_per_partition
        first = 0 if whole else self.tp_group.rank() * self.output_size_per_partition
        tokens = max(self.vocab_size - first, 0)
        return (_without_padding(logits, tokens) if tokens < logits.shape[-1] else logits), bias


def _without_padding(logits: Tensor, tokens: int) -> Tensor:
    return _WithoutPadding.apply(logits, tokens)


class _WithoutPadding(torch.autograd.Function):
    """The least number in the columns from `tokens` on, in place: the logits are the largest tensor there is."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: int) -> Tensor:
        ctx.tokens = tokens
        ctx.mark_dirty(logits)
        logits[..., tokens:] = torch.finfo(logits.dtype).min
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad[..., ctx.tokens :] = 0  # the softmax leaves 0 there; a function of the logits of another kind may not
        return grad, None


@returns_wider("the loss per token is fp32")
class OutputLayerWithLoss(OutputLayer):
    """The output layer, which computes the loss itself where it is given labels."""

    chunk_tokens: int | None = None

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden states [S, B, H] -> (logits [S, B, V / TP], None), as the engine's; with labels, (losses, None).

        Args:
            input_: hidden states; this rank's part of the sequence under sequence parallelism.
            weight: the embedding table, where it is the output layer's too.
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
        )
        return losses.view(hidden.shape[:2]).transpose(0, 1).contiguous(), None


class FusedLoss:
    """Mixed into the engine's GPTModel, before it."""

    def fuse_loss(self, chunk_tokens: int | None) -> None:
        """From now on the output layer, if this pipeline stage has it, computes losses itself.

        GPTModel builds its output layer without asking for the class; nothing but its forward pass differs.

        Args:
            chunk_tokens: see `linear_cross_entropy`.
        """
        if self.post_process:  # type: ignore[attr-defined]
            layer = self.output_layer  # type: ignore[attr-defined]
            layer.__class__ = OutputLayerWithLoss
            layer.chunk_tokens = chunk_tokens

    def token_losses(self: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy [B, S] fp32 of the output layer on hidden states [S, B, H] against labels [B, S]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        losses, _ = self.output_layer(hidden, weight=weight, labels=labels)
        return losses

    def _postprocess(self: Any, hidden_states: Tensor, *, labels: Tensor | None, **rest: Any) -> Tensor:
        """The engine's last step of a forward pass: logits without labels, losses with them."""
        if labels is None or not self.post_process or self.config.mtp_num_layers:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)  # type: ignore[misc]
        return self.token_losses(hidden_states, labels)
