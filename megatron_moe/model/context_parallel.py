"""Causal attention in pieces: a rank's two chunks of queries over all ranks' keys, and documents in a sequence.

Keys and values are gathered over the ranks and put into the sequence's order, or come like that from latent attention,
which gathers its latents. A chunk of queries then attends to its own chunk of keys causally, and to all keys before it
without a mask; the two results are merged by their logsumexp. Neither a score matrix nor a mask is as large as the
sequence squared. Where documents do not see each other, each document's part of a chunk is such a piece, whose keys
begin with the document.

Where it gathers them, the backward pass keeps the rank's own keys and values alone and gathers the others again. So the
memory that a layer keeps falls with the number of ranks; the peak within one layer does not. The gradients of keys and
values, to which every later chunk adds, go back to their owners in a reduce-scatter that sums in fp32.

The first functions attend block by block with torch's flash kernel for a CPU, in fp32 whatever the operands' dtype. The
kernel needs equal widths, or it builds the whole score matrix: the narrower of keys and values is padded with zeros.
Its backward pass in bf16 takes 2.5 to 4 times as long as in fp32, so operands are widened, which also makes them
contiguous.
"""

from __future__ import annotations

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


def wide(tensor: Tensor, padding: int = 0) -> Tensor:
    """Return a contiguous fp32 tensor whose last dimension is longer by `padding` zeros."""
    if padding:
        return F.pad(tensor.float(), (0, padding))
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


def attend_block(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the attention of one block of queries to one block of keys, operands from `of_one_width`.

    Args:
        query: [B, n, Q, d]. key, value: [B, g, K, d].
        causal: whether the blocks are of the same tokens, and each query sees keys up to its own.

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
    """Return the summands of one block in the gradients of its queries, keys and values.

    With the context and logsumexp of the block alone, these are its gradients. With those of the queries over all their
    keys, they are the block's share: the probabilities are exp(score - logsumexp), and the softmax's backward
    subtracts the product of the context and its gradient.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, context, logsumexp, 0.0, causal, scale=scale
    )


class Piece(NamedTuple):
    """Neighbouring queries that see the same earlier keys, and each its own key and those between.

    rows: the sequences of the micro-batch. queries: their places in this rank's part. own: the keys of the same tokens,
    in the whole sequence. earlier: the keys before them. padding: whether they are of no document.
    """

    rows: slice
    queries: slice
    own: slice
    earlier: slice
    padding: bool = False


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
    ) -> Tensor:
        """Return [B, n, S / CP, dv] for this rank's [B, n, S / CP, dk], [B, g, S / CP, dk] and [B, g, S / CP, dv].

        Keys and values are [B, g, S, dk] and [B, g, S, dv] where they are not gathered here.
        """
        return self.attend(query, key, value, scale, dropout, self, documents)

    def pieces(self, length: int, documents: Documents | None) -> list[Piece]:
        """Return the pieces of this rank's S / CP = `length` queries."""
        return pieces_of(length, self.group.rank(), self.group.size(), documents)

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
    ) -> Tensor:
        pieces = over.pieces(query.shape[2], documents)
        context, logsumexp = attend_pieces(
            query, over.whole(key, documents), over.whole(value, documents), scale, pieces
        )
        ctx.save_for_backward(query, key, value, context, logsumexp)
        ctx.scale, ctx.over, ctx.documents, ctx.pieces = scale, over, documents, pieces
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, context, logsumexp = ctx.saved_tensors
        over, documents = ctx.over, ctx.documents
        whole = (over.whole(key, documents), over.whole(value, documents))
        grad_query, grad_key, grad_value = piece_gradients(
            grad, query, *whole, context, logsumexp, ctx.scale, ctx.pieces
        )
        grad_key, grad_value = over.own(grad_key, documents), over.own(grad_value, documents)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


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
    query, key, value = of_one_width(query, key, value)
    contexts, logsumexps = query.new_empty((*query.shape[:3], width)), query.new_empty(query.shape[:3])
    for piece in pieces:
        at = (piece.rows, slice(None), piece.queries)
        queries, own = query[at], (piece.rows, slice(None), piece.own)
        context, logsumexp = attend_block(queries, key[own], value[own], scale, True)
        if piece.earlier.stop > piece.earlier.start:
            earlier = (piece.rows, slice(None), piece.earlier)
            before = attend_block(queries, key[earlier], value[earlier], scale, False)
            context, logsumexp = _merged((context, logsumexp), before)
        contexts[at], logsumexps[at] = context[..., :width], logsumexp
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
    query, key, value = of_one_width(query, key, value)
    missing = value.shape[-1] - value_width
    grad, context = wide(grad, missing), wide(context, missing)
    grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for piece in pieces:
        at = (piece.rows, slice(None), piece.queries)
        for seen, causal in ((piece.own, True), (piece.earlier, False)):
            if seen.stop == seen.start:
                continue
            block = (piece.rows, slice(None), seen)
            shares = block_gradients(
                grad[at], query[at], key[block], value[block], context[at], logsumexp[at], scale, causal
            )
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
    for rows, queries, own, earlier, _ in over.pieces(query.shape[2], documents):
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
