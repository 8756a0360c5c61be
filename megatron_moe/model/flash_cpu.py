"""torch's flash kernel for a CPU, block by block, in fp32 whatever the operands' dtype.

The kernel wants equal widths, or the whole score matrix is built: the narrower of keys and values is padded with zeros.
Its backward pass in bf16 takes 2.5 to 4 times as long as in fp32, so operands are widened; on the way they become
contiguous, which the kernel likes too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 and contiguous, the narrower of keys and values padded with zeros."""
    key_width, value_width = query.shape[-1], value.shape[-1]
    missing = max(0, value_width - key_width)
    return wide(query, missing), wide(key, missing), wide(value, max(0, key_width - value_width))


def wide(tensor: Tensor, padding: int = 0) -> Tensor:
    """fp32, contiguous, the last dimension longer by `padding` zeros."""
    if padding:
        return F.pad(tensor.float(), (0, padding))
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


def attend_block(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One block of queries against one block of keys, all of `of_one_width`.

    Args:
        query: [B, n, Q, d]. key, value: [B, g, K, d].
        causal: the blocks are the same tokens, and each query sees keys up to its own.

    Returns:
        context [B, n, Q, d] and logsumexp [B, n, Q] of the scaled scores.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)


def block_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    logsumexp: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients of its queries, keys and values.

    With the context and logsumexp of the block alone, these are its gradients. With those of the queries over all their
    keys, it is the block's share of them: the probabilities are exp(score - logsumexp), and what softmax subtracts is
    the product of the context and its gradient.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, context, logsumexp, 0.0, causal, scale=scale
    )
