"""Causal attention of one context-parallel rank: its two chunks of queries, everybody's keys and values.

Keys and values are gathered over the ranks, and put into the sequence's order. A chunk of queries then attends to its
own chunk of keys causally, and to all keys before it without a mask; the two are merged by their logsumexp. No score
matrix, and no mask, is as large as the sequence squared.

Only the rank's own keys and values are kept for the backward pass, which gathers them again: what a layer keeps falls
with the number of ranks, what one layer holds for a moment does not. The gradients of keys and values, to which every
later chunk adds, go back to their owners in a reduce-scatter that sums in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from megatron_moe import platform
from megatron_moe.parallel.sequence import all_gather_sequence, by_rank, chunk_numbers

# ---- torch's flash kernel for a CPU, block by block, in fp32 whatever the operands' dtype.
#
# The kernel wants equal widths, or the whole score matrix is built: the narrower of keys and values is padded with
# zeros. Its backward pass in bf16 takes 2.5 to 4 times as long as in fp32, so operands are widened; on the way they
# become contiguous, which the kernel likes too.


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


# ----


@dataclass(frozen=True)
class OverRanks:
    """An attention of this file with its group. A record, in which a copy of a model finds the group to share."""

    attend: Callable[..., Tensor]
    group: ProcessGroup

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        """This rank's [B, n, S / CP, dk], [B, g, S / CP, dk], [B, g, S / CP, dv] -> [B, n, S / CP, dv]."""
        return self.attend(query, key, value, scale, dropout, self.group)


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, group: ProcessGroup
) -> Tensor:
    """See `OverRanks`; the result is fp32. Backward: see the module.

    Dropout takes the path that holds the scores, as it does without context parallelism.
    """
    if dropout:
        return attend_lower_right(query.float(), key.float(), value.float(), scale, dropout, group)
    return _FlashOverRanks.apply(query, key, value, scale, group)


class _FlashOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, group: ProcessGroup) -> Tensor:
        gathered = (_gathered(key, group), _gathered(value, group))
        context, logsumexp = attend_chunks(query, *gathered, scale, group.rank(), group.size())
        ctx.save_for_backward(query, key, value, context, logsumexp)
        ctx.scale, ctx.group = scale, group
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, context, logsumexp = ctx.saved_tensors
        group = ctx.group
        grad_query, grad_key, grad_value = chunk_gradients(
            grad,
            query,
            _gathered(key, group),
            _gathered(value, group),
            context,
            logsumexp,
            ctx.scale,
            group.rank(),
            group.size(),
        )
        grad_key, grad_value = _scattered(grad_key, group), _scattered(grad_value, group)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def attend_chunks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, rank: int, size: int
) -> tuple[Tensor, Tensor]:
    """A rank's two chunks of queries over all keys that they see.

    Args:
        query: [B, n, S / size, dk], this rank's. key, value: [B, g, S, dk] and [B, g, S, dv] in the sequence's order.

    Returns:
        context [B, n, S / size, dv] and logsumexp [B, n, S / size], fp32.
    """
    width = value.shape[-1]
    query, key, value = of_one_width(query, key, value)
    merged = []
    for number, queries in zip(chunk_numbers(rank, size), query.chunk(2, dim=2)):
        own, earlier = _blocks(number, queries.shape[2])
        context, logsumexp = attend_block(queries, key[:, :, own], value[:, :, own], scale, True)
        if number:
            before = attend_block(queries, key[:, :, earlier], value[:, :, earlier], scale, False)
            context, logsumexp = _merged((context, logsumexp), before)
        merged.append((context[..., :width], logsumexp))
    contexts, logsumexps = zip(*merged)
    return torch.cat(contexts, dim=2), torch.cat(logsumexps, dim=2)


def chunk_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    logsumexp: Tensor,
    scale: float,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The way back of `attend_chunks`, from its arguments and results.

    Returns:
        fp32 gradients: of this rank's queries, whole; of ALL keys and values, this rank's share of them.
    """
    key_width, value_width = key.shape[-1], value.shape[-1]
    query, key, value = of_one_width(query, key, value)
    missing = value.shape[-1] - value_width
    grad, context = wide(grad, missing), wide(context, missing)
    grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    length = query.shape[2] // 2
    for half, number in enumerate(chunk_numbers(rank, size)):
        rows = slice(half * length, (half + 1) * length)
        own, earlier = _blocks(number, length)
        for block, causal in ((own, True), (earlier, False)) if number else ((own, True),):
            shares = block_gradients(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, block],
                value[:, :, block],
                context[:, :, rows],
                logsumexp[:, :, rows],
                scale,
                causal,
            )
            grad_query[:, :, rows] += shares[0]
            grad_key[:, :, block] += shares[1]
            grad_value[:, :, block] += shares[2]
    return grad_query[..., :key_width], grad_key[..., :key_width], grad_value[..., :value_width]


def attend_lower_right(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, group: ProcessGroup
) -> Tensor:
    """As `attend_on_cpu`, in the operands' dtype, with torch's own attention: for CUDA, and for dropout on a CPU.

    The last query of a chunk sees the last key that the chunk may see, which is torch's lower-right causal mask; its
    kernels for CUDA need no mask in memory. Autograd keeps the gathered keys and values.
    """
    key, value = (_gathered(tensor, group) for tensor in (key, value))
    key, value, grouped = for_kernels(query, key, value)
    contexts = []
    for number, queries in zip(chunk_numbers(group.rank(), group.size()), query.chunk(2, dim=2)):
        length = queries.shape[2]
        end = (number + 1) * length
        contexts.append(
            platform.kernel(F.scaled_dot_product_attention)(
                queries,
                key[:, :, :end],
                value[:, :, :end],
                attn_mask=_lower_right(length, end),
                dropout_p=dropout,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(contexts, dim=2)


def _lower_right(queries: int, keys: int) -> Tensor:
    """The mask, which is a description and no matrix. It is a class of tensors that cannot be made under a dispatch
    mode, so not while operations are audited or counted, unless the mode looks away."""
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, so where it is needed

    with _disable_current_modes():
        return causal_lower_right(queries, keys)


def for_kernels(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Keys and values as CUDA's kernels without a score matrix take them, and whether they are still grouped.

    The flash kernel knows grouped-query attention but neither fp32 nor two widths; the memory-efficient one knows these
    but no groups, so keys and values are repeated for it.
    """
    grouped = key.shape[1] != query.shape[1]
    if grouped and (query.dtype == torch.float32 or value.shape[-1] != query.shape[-1]):
        times = query.shape[1] // key.shape[1]
        return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
    return key, value, grouped


def _blocks(number: int, length: int) -> tuple[slice, slice]:
    """The keys of chunk `number`, and all keys before it."""
    return slice(number * length, (number + 1) * length), slice(0, number * length)


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Context and logsumexp over the keys of both."""
    logsumexp = torch.logaddexp(one[1], other[1])
    shares = ((part * (own - logsumexp).exp().unsqueeze(-1)) for part, own in (one, other))
    return sum(shares), logsumexp  # type: ignore[return-value]


def _gathered(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """[B, g, S / CP, d] -> [B, g, S, d] in the sequence's order, in the tensor's own dtype."""
    return _as_heads(all_gather_sequence(_as_rows(tensor), group))


def _scattered(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """fp32 [B, g, S, d] -> the sum over ranks of this rank's [B, g, S / CP, d]."""
    rows = by_rank(_as_rows(tensor), group.size())
    own = rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    dist.reduce_scatter_tensor(own, rows, group=group)
    return _as_heads(own)


def _as_rows(tensor: Tensor) -> Tensor:
    """[B, h, S, d] -> [S, B, h, d], in which the engine has it: no copy."""
    return tensor.permute(2, 0, 1, 3)


def _as_heads(rows: Tensor) -> Tensor:
    """[S, B, h, d] -> [B, h, S, d]."""
    return rows.permute(1, 2, 0, 3)
