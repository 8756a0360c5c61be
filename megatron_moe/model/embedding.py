"""The embedding's lookup, with a gradient that loses no token.

torch's CPU kernel adds the gradients of all tokens of one id to each other in the gradient's dtype. In bf16 a row stops
growing once it is 256 times as large as what is added: 4,096 tokens of one id with gradients of 0.01 give 4 instead of
41, and nothing says so. Frequent tokens would be trained with too small gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_moe.parallel.copying import CopiesShareGroups


class _Lookup(torch.autograd.Function):
    """weight[ids]; in the backward pass each row's gradients are added in fp32 (or wider) and rounded once."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        total.index_add_(0, ids.flatten(), grad.reshape(-1, ctx.shape[1]).to(wide))
        return None, total.to(ctx.dtype)


class ExactEmbedding(CopiesShareGroups, VocabParallelEmbedding):
    """The engine's embedding table [V/TP, H] with the exact lookup: same weights, same keys, same outputs."""

    @classmethod
    def take_over(cls, embedding: VocabParallelEmbedding) -> None:
        """Turn an embedding that the engine has built, by a class it names itself, into this one."""
        embedding.__class__ = cls

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids [B, S] -> [B, S, H], or with sequence parallelism [S/TP, B, H]; summed over tensor parallelism."""
        if self.tp_group.size() == 1:
            rows = _Lookup.apply(input_, self.weight)
        else:
            elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            ids = (input_ - self.vocab_start_index).masked_fill(elsewhere, 0)
            rows = _Lookup.apply(ids, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            rows = rows.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)
