"""Causal attention in pieces: a rank's two chunks of queries over all ranks' keys, and documents in a sequence.

Keys and values are gathered over the ranks and put into the sequence's order, or come like that from latent attention,
which gathers its latents. A chunk of queries then attends to its own chunk of keys causally, and to all keys before it
without a mask; the two results are merged by their logsumexp. Neither a score matrix nor a mask is as large as the
sequence squared. Where documents do not see each other, each document's part of a chunk is such a piece, whose keys
begin with the document. Where a token sees a window of those before it, a piece has no more queries than the window,
and sees the keys that leave the window one by one as a causal block in reverse order.

A sink is a logit of each head that takes its part of the softmax and has no value: the context is multiplied by
sigmoid(logsumexp - sink). With that context, and the logsumexp over the sink too, the backward pass of each block is
right as it is.

Where it gathers them, the backward pass keeps the rank's own keys and values alone and gathers the others again. So the
memory that a layer keeps falls with the number of ranks; the peak within one layer does not. The gradients of keys and
values, to which every later chunk adds, go back to their owners in a reduce-scatter that sums in fp32.

The first functions attend block by block with torch's flash kernel for a CPU, in fp32 whatever the operands' dtype. The
kernel needs equal widths, or it builds the whole score matrix: the narrower of keys and values is padded with zeros.
Its backward pass in bf16 takes 2.5 to 4 times as long as in fp32, so operands are widened, which also makes them
contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from megatron_moe import platform
from megatron_moe.parallel.sequence import (
    Documents,
    HostDocuments,
    all_gather_sequence,
    by_rank,
    chunk_numbers,
    once,
)
from megatron_moe.platform.hardware import capability, on_device
from megatron_moe.platform.protocols import AutogradContext


def of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous fp32 operands, with the narrower of keys and values padded with zeros."""
    key_width, value_width = query.shape[-1], value.shape[-1]
    missing = max(0, value_width - key_width)
    return wide(query, missing), wide(key, missing), wide(value, max(0, key_width - value_width))


def _operands(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the kernels for blocks take on this device: on a CPU of one width and in fp32."""
    return of_one_width(query, key, value) if platform.on_cpu(query) else (query, key, value)


def wide(tensor: Tensor, padding: int = 0) -> Tensor:
    """Return a contiguous fp32 tensor whose last dimension is longer by `padding` zeros."""
    if padding:
        return F.pad(tensor.float(), (0, padding))
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
_EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward
"""The kernel for CUDA that returns logsumexp in every dtype, without groups of heads. Not verified on a card."""


def _per_head(query: Tensor, key: Tensor) -> Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def attend_block(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the attention of one block of queries to one block of keys, operands from `of_one_width`.

    Args:
        query: [B, n, Q, d]. key, value: [B, g, K, d].
        causal: whether the blocks are of the same tokens, and each query sees keys up to its own.

    Returns:
        context [B, n, Q, d] and logsumexp [B, n, Q] of the scaled scores.
    """
    if not platform.on_cpu(query):
        key, value = _per_head(query, key), _per_head(query, value)
        found = _EFFICIENT(query, key, value, None, True, 0.0, causal, scale=scale)
        return found[0], found[1][..., : query.shape[2]]
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
    """Return the summands of one block in the gradients of its queries, keys and values.

    With the context and logsumexp of the block alone, these are its gradients. With those of the queries over all their
    keys, they are the block's share: the probabilities are exp(score - logsumexp), and the softmax's backward
    subtracts the product of the context and its gradient.
    """
    if not platform.on_cpu(query):
        # The kernel for CUDA pads logsumexp to multiples of 32, with what makes a weight 0, and has no dropout here.
        padded = F.pad(logsumexp, (0, -logsumexp.shape[-1] % 32), value=math.inf)
        keys, values, unused = _per_head(query, key), _per_head(query, value), torch.zeros((), dtype=torch.int64)
        wanted = [True, True, True, False]
        grad, context = grad.to(query.dtype), context.to(query.dtype)
        found = _EFFICIENT_BACKWARD(
            grad, query, keys, values, None, context, padded, unused, unused, 0.0, wanted, causal, scale=scale
        )
        groups = key.shape[1]
        return found[0], *(of_head.unflatten(1, (groups, -1)).sum(2) for of_head in found[1:3])
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, context, logsumexp, 0.0, causal, scale=scale
    )


class Piece(NamedTuple):
    """Neighbouring queries that see the same earlier keys, and each its own key and those between.

    rows: the sequences of the micro-batch. queries: their places in this rank's part. own: the keys of the same tokens,
    in the whole sequence. earlier: the keys before them. padding: whether they are of no document. leaving: as many
    keys as queries, before the others, of which query i sees those from the i-th on: what leaves the window.
    """

    rows: slice
    queries: slice
    own: slice
    earlier: slice
    padding: bool = False
    leaving: slice = slice(0, 0)

    def blocks(self) -> list[tuple[slice, bool, bool]]:
        """Return the blocks of keys that are not empty, whether each is causal, and whether in reverse order."""
        found = [(self.own, True, False), (self.earlier, False, False), (self.leaving, True, True)]
        return [block for block in found if block[0].stop > block[0].start]


def pieces_of(length: int, rank: int, size: int, documents: Documents | None = None) -> list[Piece]:
    """Return the pieces of the `length` queries of one of `size` ranks. None: a sequence is one document."""
    if documents is None:
        firsts = [number * (length // 2) for number in chunk_numbers(rank, size)] if size > 1 else [0]
        count = length // len(firsts)
        return [
            Piece(slice(None), slice(at * count, (at + 1) * count), slice(first, first + count), slice(0, first))
            for at, first in enumerate(firsts)
        ]
    asked = (rank, size, tuple(documents.firsts.shape))
    return once(documents.firsts, asked, lambda: _pieces_of_documents(length, rank, documents.on_host()))


def _pieces_of_documents(length: int, rank: int, documents: HostDocuments) -> list[Piece]:
    places = documents.places[rank] if len(documents.places) else torch.arange(length)
    found = []
    for row, firsts_of_row in enumerate(documents.firsts):
        ends = ((places.diff() != 1) | (firsts_of_row.diff() != 0)).nonzero().flatten() + 1
        begin = 0
        for end in (*ends.tolist(), length):
            place, first = int(places[begin]), int(firsts_of_row[begin])
            padding = first < 0
            earlier = slice(place if padding else first, place)  # padding sees only itself
            own = slice(place, place + end - begin)
            found.append(Piece(slice(row, row + 1), slice(begin, end), own, earlier, padding))
            begin = end
    return found


def within_window(pieces: list[Piece], window: int) -> list[Piece]:
    """Return pieces of the same queries in which each sees itself and `window` keys before it at most."""
    found = []
    for piece in pieces:
        begin, end, first = piece.own.start, piece.own.stop, piece.earlier.start
        shift = piece.queries.start - begin
        whole = min(end, max(begin, first + window))  # those before see everything from the first key on
        if whole > begin:
            own = slice(begin, whole)
            found.append(piece._replace(queries=slice(begin + shift, whole + shift), own=own))
        for at in range(whole, end, window):
            stop = min(at + window, end)
            earlier, leaving = slice(stop - window, at), slice(at - window, stop - window)
            queries = slice(at + shift, stop + shift)
            found.append(Piece(piece.rows, queries, slice(at, stop), earlier, piece.padding, leaving))
    return found


@dataclass(frozen=True)
class OverRanks:
    """An attention of this file with its group, as a record, so that copies of a model share the group.

    gathers: whether keys and values are gathered here; otherwise they are already of the whole sequence.
    """

    attend: Callable[..., Tensor]
    group: ProcessGroup
    gathers: bool = True

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        dropout: float,
        documents: Documents | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return [B, n, S / CP, dv] for this rank's [B, n, S / CP, dk], [B, g, S / CP, dk] and [B, g, S / CP, dv].

        Keys and values are [B, g, S, dk] and [B, g, S, dv] where they are not gathered here.

        Args:
            window: how many keys before its own a query sees; None: all. sinks: [n] fp32, a logit of each head.
        """
        if window is None and sinks is None:
            return self.attend(query, key, value, scale, dropout, self, documents)
        if dropout:
            raise ValueError("attention with windows or sinks drops no weights")
        return _FlashInPieces.apply(query, key, value, scale, self, documents, window, sinks)

    def pieces(self, length: int, documents: Documents | None, window: int | None = None) -> list[Piece]:
        """Return the pieces of this rank's S / CP = `length` queries."""
        found = pieces_of(length, self.group.rank(), self.group.size(), documents)
        return found if window is None else within_window(found, window)

    def whole(self, tensor: Tensor, documents: Documents | None) -> Tensor:
        """Return the keys or values [B, g, S, d] of the whole sequence, in its order and in their own dtype."""
        if not self.gathers:
            return tensor
        places = None if documents is None else documents.places
        return all_gather_sequence(_as_rows(tensor), self.group, places).permute(1, 2, 0, 3)

    def own(self, grad: Tensor, documents: Documents | None) -> Tensor:
        """Return the gradient of what `whole` took, from this rank's fp32 share [B, g, S, d] in that of its result."""
        if not self.gathers or self.group.size() == 1:
            return grad
        places = None if documents is None else documents.places
        rows = by_rank(_as_rows(grad), self.group.size(), places)
        own = rows.new_empty((rows.shape[0] // self.group.size(), *rows.shape[1:]))
        dist.reduce_scatter_tensor(own, rows, group=self.group)
        return own.permute(1, 2, 0, 3)


def attend_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    over: OverRanks,
    documents: Documents | None = None,
) -> Tensor:
    """Attend as `OverRanks` says, with a result in fp32; the module's docstring describes the backward pass.

    Dropout takes the path that stores the scores, as it does without context parallelism.
    """
    if dropout:
        return attend_with_torch(query.float(), key.float(), value.float(), scale, dropout, over, documents)
    return _FlashInPieces.apply(query, key, value, scale, over, documents)


class _FlashInPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        over: OverRanks,
        documents: Documents | None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        pieces = over.pieces(query.shape[2], documents, window)
        whole = over.whole(key, documents), over.whole(value, documents)
        context, logsumexp = platform.kernel(attend_pieces)(query, *whole, scale, pieces)
        if sinks is not None:
            alone, logsumexp = logsumexp, torch.logaddexp(logsumexp, sinks.unsqueeze(-1))
            context *= (alone - logsumexp).exp().unsqueeze(-1)
        ctx.save_for_backward(query, key, value, context, logsumexp, sinks)
        ctx.scale, ctx.over, ctx.documents, ctx.pieces = scale, over, documents, pieces
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context, logsumexp, sinks = ctx.saved_tensors
        over, documents = ctx.over, ctx.documents
        whole = (over.whole(key, documents), over.whole(value, documents))
        grad_query, grad_key, grad_value = platform.kernel(piece_gradients)(
            grad, query, *whole, context, logsumexp, ctx.scale, ctx.pieces
        )
        grad_key, grad_value = over.own(grad_key, documents), over.own(grad_value, documents)
        grad_sinks = None
        if sinks is not None:  # the softmax's backward, of a logit whose value is 0
            taken = (sinks.unsqueeze(-1) - logsumexp).exp()
            grad_sinks = -(taken * (grad * context).sum(-1)).sum((0, 2))
        found = grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
        return *found, None, None, None, None, grad_sinks


def _in_order(reverse: bool, *tensors: Tensor) -> list[Tensor]:
    """Return tensors [B, n, S, ...] as they are, or with their tokens in reverse order."""
    return [tensor.flip(2) for tensor in tensors] if reverse else list(tensors)


def attend_pieces(
    query: Tensor, key: Tensor, value: Tensor, scale: float, pieces: list[Piece]
) -> tuple[Tensor, Tensor]:
    """Return the attention of a rank's queries to the keys that they see.

    Args:
        query: [B, n, S / CP, dk] of this rank. key, value: [B, g, S, dk] and [B, g, S, dv] in the sequence's order.
        pieces: all queries, each in one piece.

    Returns:
        context [B, n, S / CP, dv] and logsumexp [B, n, S / CP], fp32.
    """
    width = value.shape[-1]
    query, key, value = _operands(query, key, value)
    contexts = query.new_empty((*query.shape[:3], width), dtype=torch.float32)
    logsumexps = query.new_empty(query.shape[:3], dtype=torch.float32)
    for piece in pieces:
        at, merged = (piece.rows, slice(None), piece.queries), None
        for seen, causal, reverse in piece.blocks():
            block = (piece.rows, slice(None), seen)
            queries, keys, values = _in_order(reverse, query[at], key[block], value[block])
            context, logsumexp = _in_order(reverse, *attend_block(queries, keys, values, scale, causal))
            merged = (context, logsumexp) if merged is None else _merged(merged, (context, logsumexp))
        assert merged is not None, "each query sees its own key"
        contexts[at], logsumexps[at] = merged[0][..., :width], merged[1]
    return contexts, logsumexps


def piece_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    logsumexp: Tensor,
    scale: float,
    pieces: list[Piece],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the backward pass of `attend_pieces` from its arguments and results.

    Returns:
        fp32 gradients: the whole gradient of this rank's queries, and this rank's share of those of all keys and
        values.
    """
    key_width, value_width = key.shape[-1], value.shape[-1]
    query, key, value = _operands(query, key, value)
    missing = value.shape[-1] - value_width
    grad, context = wide(grad, missing), wide(context, missing)
    grad_query, grad_key, grad_value = (torch.zeros_like(t, dtype=torch.float32) for t in (query, key, value))
    for piece in pieces:
        at = (piece.rows, slice(None), piece.queries)
        for seen, causal, reverse in piece.blocks():
            block = (piece.rows, slice(None), seen)
            queries, keys, values = _in_order(reverse, query[at], key[block], value[block])
            grads, contexts, logsums = _in_order(reverse, grad[at], context[at], logsumexp[at])
            found = block_gradients(grads, queries, keys, values, contexts, logsums, scale, causal)
            shares = _in_order(reverse, *found)
            grad_query[at] += shares[0]
            grad_key[block] += shares[1]
            grad_value[block] += shares[2]
    return grad_query[..., :key_width], grad_key[..., :key_width], grad_value[..., :value_width]


def attend_with_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    over: OverRanks,
    documents: Documents | None = None,
) -> Tensor:
    """Attend in the operands' dtype with torch's own attention, for CUDA, and for dropout on a CPU.

    The last query of a piece sees the last key that the piece may see, which is torch's lower-right causal mask; its
    kernels for CUDA need no mask in memory. Autograd saves the keys and values of the whole sequence.
    """
    if documents is not None and not dropout and over.group.size() == 1 and packs(query, value):
        return attend_packed(query, key, value, scale, over, documents)
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, so where it is needed

    key, value, grouped = for_kernels(query, over.whole(key, documents), over.whole(value, documents))
    attend = platform.kernel(F.scaled_dot_product_attention)
    by_row: dict[int | None, list[Tensor]] = {}
    for rows, queries, own, earlier, *_ in over.pieces(query.shape[2], documents):
        seen = slice(earlier.start, own.stop)
        # The mask is a description and not a matrix. Its tensor class cannot be created under a dispatch mode, so the
        # modes that audit or count operations are disabled while it is.
        with _disable_current_modes():
            mask = causal_lower_right(own.stop - own.start, seen.stop - seen.start)
        operands = (query[rows, :, queries], key[rows, :, seen], value[rows, :, seen])
        context = attend(*operands, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped)
        by_row.setdefault(rows.start, []).append(context)
    return torch.cat([torch.cat(contexts, dim=2) for contexts in by_row.values()])


def packs(query: Tensor, value: Tensor) -> bool:
    """Return whether `attend_packed` takes these: half precision from Ampere on, and a width that the kernel has.

    torch's function takes groups from 2.12 on.
    """
    if query.dtype not in (torch.bfloat16, torch.float16) or torch.__version__ < "2.12":
        return False
    found, width = capability(query), max(query.shape[-1], value.shape[-1])
    return found is not None and found >= (8, 0) and width % 8 == 0 and width <= 256


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, scale: float, over: OverRanks, documents: Documents
) -> Tensor:
    """Attend on one rank in one call of torch's flash kernel for sequences of several lengths, each of them a piece.

    The kernel has one width: zeros fill up the narrower. Not verified on a card.
    """
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, length, key_width = query.shape
    value_width, grouped = value.shape[-1], key.shape[1] != heads
    narrow = value_width - key_width
    # [B x S, heads, width], in which the rows of each piece are neighbours
    query, key, value = (
        F.pad(tensor, (0, max(0, missing))).transpose(1, 2).flatten(0, 1)
        for tensor, missing in ((query, narrow), (key, narrow), (value, -narrow))
    )

    lengths = [piece.own.stop - piece.own.start for piece in over.pieces(length, documents)]
    longest, ends = max(lengths), [0, *accumulate(lengths)]
    on_card = once(documents.firsts, "ends of documents", lambda: on_device(ends, torch.int32, query.device))
    causal = (-1, 0)
    context = varlen_attn(
        query, key, value, on_card, on_card, longest, longest, scale=scale, window_size=causal, enable_gqa=grouped
    )
    assert isinstance(context, Tensor), "no logsumexp was asked for"
    return context[..., :value_width].unflatten(0, (batch, length)).transpose(1, 2)


def for_kernels(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return keys and values for CUDA's kernels without a score matrix, and whether they are still grouped.

    The flash kernel has grouped-query attention but neither fp32 nor two widths; the memory-efficient one has these but
    no groups, so keys and values are repeated for it.
    """
    grouped = key.shape[1] != query.shape[1]
    if grouped and (query.dtype == torch.float32 or value.shape[-1] != query.shape[-1]):
        times = query.shape[1] // key.shape[1]
        return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
    return key, value, grouped


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return context and logsumexp over the keys of both."""
    logsumexp = torch.logaddexp(one[1], other[1])
    shares = ((part * (own - logsumexp).exp().unsqueeze(-1)) for part, own in (one, other))
    return sum(shares), logsumexp  # type: ignore[return-value]


def _as_rows(tensor: Tensor) -> Tensor:
    """Return [S, B, h, d], the engine's order, as a view of [B, h, S, d]."""
    return tensor.permute(2, 0, 1, 3)
