"""The output layer that returns losses in place of logits, and how a model comes to use it.

The loss is computed inside the output layer's own forward pass, not beside it: with `--overlap-param-gather` the
engine waits for a layer's weight where that layer is called.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_moe.model.linear_cross_entropy import linear_cross_entropy
from megatron_moe.parallel.collectives import all_gather_rows, shared_by_ranks
from megatron_moe.precision.declared import returns_wider


@returns_wider("the loss per token is fp32")
class OutputLayerWithLoss(ColumnParallelLinear):
    """The engine's output layer, which computes the loss itself where it is given labels."""

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
