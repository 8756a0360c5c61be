"""Causal core attention on torch's scaled_dot_product_attention, without an S x S matrix in memory.

It replaces the engine's DotProductAttention, which does not support value heads of another width (latent attention)
and stores the whole score matrix.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe import platform
from megatron_moe.engine.dist_checkpointing import make_sharded_tensors_for_checkpoint
from megatron_moe.engine.layers import AttnMaskType, get_cuda_rng_tracker
from megatron_moe.engine.modules import DeepcopyKeepsGroups
from megatron_moe.model.context_parallel import (
    OverRanks,
    attend_block,
    attend_on_cpu,
    attend_with_torch,
    block_gradients,
    for_kernels,
    of_one_width,
    wide,
)
from megatron_moe.model.norm import RMSNorm
from megatron_moe.parallel.sequence import Documents, all_gather_sequence
from megatron_moe.platform.protocols import AutogradContext, EngineConfig, ProcessGroups

WHOLE = "whole"
"""The `cp_comm_type` of an attention that is given the keys and values of the whole sequence."""


class SDPACoreAttention(DeepcopyKeepsGroups, torch.nn.Module):
    """A module that computes softmax(q k^T x scale) v with a causal mask, softmax in fp32 and dropout in training.

    Queries may share key/value heads (grouped-query attention: head i of n uses group i // (n / g)), and values may
    have another width than keys. Constructor and call follow megatron-core's protocol for core attention.

    Args:
        config: the engine's TransformerConfig.
        layer_number: unused; part of the protocol.
        attn_mask_type: causal; other masks are not supported.
        softmax_scale: factor on q k^T; default 1 / sqrt(key width).
        k_channels, v_channels, attention_type, attention_dropout: part of the protocol.
        cp_comm_type: `WHOLE` if keys and values come for the whole sequence; otherwise they are gathered.
        pg_collection: process groups, of which `cp` is used.

    Under context parallelism a rank has its two chunks of the sequence (`parallel/sequence.py`), and attends to
    the whole sequence.

    Attributes:
        window: how many tokens before itself a token of this layer sees; None: all.
        softmax_offset: the sinks of this rank's heads [n], logits that take their part of the softmax and have no
            value, in the model's dtype; None unless the softmax type is "learnable".

    Raises:
        ValueError: another mask than the causal one, or context parallelism without its process group.
    """

    def __init__(
        self,
        config: EngineConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroups | None = None,
    ) -> None:
        super().__init__()
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"attention is causal only, not {attn_mask_type.name}")
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        # Under sequence parallelism the engine has switched to the rank's own random stream around the whole layer.
        self.own_stream = not config.sequence_parallel
        self.window: int | None = None
        if config.window_size is not None and config.window_attn_skip_freq[layer_number - 1]:
            self.window = config.window_size[0]
        self.softmax_type = config.softmax_type
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self._kernel: Callable[..., Tensor] = _attend_cuda if platform.has_cuda() else _attend_cpu
        self._in_pieces: OverRanks | None = None
        if pg_collection is not None:
            attend = attend_with_torch if platform.has_cuda() else attend_on_cpu
            self._in_pieces = OverRanks(attend, pg_collection.cp, gathers=cp_comm_type != WHOLE)
        if config.context_parallel_size > 1:
            if self._in_pieces is None:
                raise ValueError("attention under context parallelism needs pg_collection, for its group cp")
            self._kernel = self._in_pieces

    def compared(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [S, B, n, dk] and keys [S, B, g, dk] as their products are taken: here as they are given."""
        return query, key

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: None = None,
    ) -> Tensor:
        """Return the attention's context [S, B, n x dv] in the query's dtype.

        Args:
            query: [S, B, n, dk]; S / CP in place of S under context parallelism, here and below.
            key, value: [S, B, g, dk] and [S, B, g, dv]; S as it is with `WHOLE`.
            attention_mask: the batch's `Documents` as a mask; None: a sequence is one document. The mask is causal by
                construction.
            attention_bias, packed_seq_params: None.
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError("causal attention takes no attention_bias or packed sequences")
        documents, kernel = Documents.of(attention_mask, query.shape[1]), self._kernel
        known = None if documents is None else (documents.firsts.shape, documents.firsts.dtype)
        if known not in (None, ((query.shape[1], query.shape[0]), torch.int64)):
            raise ValueError("attention_mask is int64, for each token the first one that it sees; see Documents")
        special = self.window is not None or self.softmax_type != "vanilla"
        if documents is not None or special:
            if self._in_pieces is None:
                raise ValueError("documents, windows and sinks need pg_collection, for its group cp")
            kernel = partial(self._in_pieces, documents=documents)
        if special:
            kernel = partial(kernel, window=self.window, sinks=self.sinks(query))
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        dropout = self.dropout if self.training else 0.0
        # TP ranks hold different heads and must drop different weights.
        stream = get_cuda_rng_tracker().fork() if dropout and self.own_stream else contextlib.nullcontext()
        with stream:
            context = kernel(
                query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), scale, dropout
            )
        return context.permute(2, 0, 1, 3).to(query.dtype).reshape(*query.shape[:2], -1)

    def sinks(self, query: Tensor) -> Tensor | None:
        """Return the logit of each head's sink, fp32 [n], for queries [S, B, n, dk]; None without sinks."""
        if self.softmax_type == "off-by-one":
            return query.new_zeros(query.shape[2], dtype=torch.float32)
        return None if self.softmax_offset is None else self.softmax_offset.float()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the sinks, which are split over TP ranks, and norms, which are not, if there are any."""
        own = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets)


class NormedCoreAttention(SDPACoreAttention):
    """SDPACoreAttention that normalises each head of the queries and keys it is given: after their rotation."""

    def __init__(self, config: EngineConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.q_layernorm = RMSNorm(config, config.kv_channels, config.layernorm_epsilon)
        self.k_layernorm = RMSNorm(config, config.kv_channels, config.layernorm_epsilon)

    def compared(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return both normalised."""
        return self.q_layernorm(query), self.k_layernorm(key)

    def forward(self, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return what SDPACoreAttention returns."""
        return super().forward(*self.compared(query, key), *args, **options)


LOGITS_AT_A_TIME = 2**24
ROWS_AT_A_TIME = 1024
"""Logits in memory at a time where their maximum is taken, 64 MiB in fp32, and how many queries of a head these are
about at most: with more, more logits after their query would be computed, and with fewer of either a GPU would wait."""


class MeasuredCoreAttention(SDPACoreAttention):
    """SDPACoreAttention that keeps the largest logit of each of its heads, over the passes that will be differentiated.

    Passes of evaluation, generation and counting ahead have no gradients and are not measured. A pass that is
    recomputed is measured once or twice, which makes no difference to a maximum.

    Attributes:
        layer_number: one-based, in the whole model; further predictions come after its layers.
        largest_logits: fp32 [n], of this rank's heads since it was last filled with -inf; None: there never was a pass.
            It stays where it is: a captured graph of the layer writes there at each replay.
    """

    def __init__(self, config: EngineConfig, layer_number: int, *args: Any, **options: Any) -> None:
        super().__init__(config, layer_number, *args, **options)
        self.layer_number = layer_number
        # No buffer: it is no state of the model, and a model in half precision would round it.
        self.largest_logits: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        """Return what SDPACoreAttention returns."""
        if self.training and torch.is_grad_enabled():
            documents = Documents.of(attention_mask, query.shape[1])
            if self._in_pieces is None:
                found = largest_logits(query, key, self.scale)
            else:
                found = largest_in_pieces(query, key, self.scale, self._in_pieces, documents)
            if self.largest_logits is None:
                self.largest_logits = torch.full_like(found, -math.inf)
            torch.maximum(self.largest_logits, found, out=self.largest_logits)
        return super().forward(query, key, value, attention_mask, *args, **options)


class MeasuredNormedCoreAttention(NormedCoreAttention, MeasuredCoreAttention):
    """NormedCoreAttention that measures as MeasuredCoreAttention does."""


def measured_attentions(model_chunks: Iterable[torch.nn.Module]) -> Iterator[MeasuredCoreAttention]:
    """Yield every core attention of these chunks that is measured, wrapped or not, in the order of the layers."""
    for chunk in model_chunks:
        for module in chunk.modules():
            if isinstance(module, MeasuredCoreAttention):
                yield module


@torch.no_grad()
def largest_logits(
    query: Tensor, key: Tensor, scale: float | None, first: int = 0, at_a_time: int = LOGITS_AT_A_TIME
) -> Tensor:
    """Return the largest q . k x scale of each head, fp32 [n], over all keys that are not after their query.

    The products are added up in fp32. A piece of some heads and rows of the score matrix is in memory at a time.

    Args:
        query: [Q, B, n, d].
        key: [K, B, g, d], of the sequence from its first token on.
        scale: see SDPACoreAttention.
        first: the position of the first query.
        at_a_time: the logits of a piece, at most; a row of one group is a piece at least.
    """
    (length, batch, heads, width), groups = query.shape, key.shape[2]
    if platform.on_cpu(query):
        query, key = query.float(), key.float()
    # Heads that share a key are rows of one product: [B g, n / g, Q, d] and [B g, d, K].
    query = query.permute(1, 2, 0, 3).reshape(batch * groups, heads // groups, length, width)
    key = key.permute(1, 2, 3, 0).reshape(batch * groups, width, -1)[:, :, : first + length]
    row = heads // groups * key.shape[2]
    rows = min(length, ROWS_AT_A_TIME, max(1, at_a_time // row))
    stacked = max(1, at_a_time // (row * rows))
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    largest = torch.full(query.shape[:2], -math.inf, device=query.device)
    for some, queries, keys in zip(largest.split(stacked), query.split(stacked), key.split(stacked)):
        for begin in range(0, length, rows):
            piece = queries[:, :, begin : begin + rows]
            count = piece.shape[2]
            seen = first + begin + count
            # In fp32, in which products of half-precision numbers are exact.
            options: dict[str, Any] = {} if piece.dtype == torch.float32 else {"out_dtype": torch.float32}
            logits = torch.bmm(piece.flatten(1, 2), keys[:, :, :seen], **options).unflatten(1, (-1, count))
            logits[..., seen - count :].masked_fill_(future[:count, :count], -math.inf)
            torch.maximum(some, logits.amax((2, 3)), out=some)
    return largest.view(batch, heads).amax(0) * (width**-0.5 if scale is None else scale)


@torch.no_grad()
def largest_in_pieces(
    query: Tensor, key: Tensor, scale: float | None, over: OverRanks, documents: Documents | None
) -> Tensor:
    """Return the largest logits, fp32 [n], of this rank's queries [S / CP, B, n, d] and the keys that they see.

    Args:
        key: [S / CP, B, g, d]; [S, B, g, d] where `over` does not gather.
        documents: None: a sequence is one.
    """
    places = None if documents is None else documents.places
    keys = all_gather_sequence(key, over.group, places) if over.gathers else key
    largest = [query.new_full(query.shape[2:3], -math.inf, dtype=torch.float32)]
    for rows, queries, own, earlier, padding, _ in over.pieces(query.shape[0], documents):
        if padding:
            continue
        seen = keys[earlier.start : own.stop, rows]
        largest.append(largest_logits(query[queries, rows], seen, scale, own.start - earlier.start))
    return torch.stack(largest).amax(0)


def attend_with_last(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the context [1, B, n, dv], in the query's dtype, of the last token, which attends to all tokens.

    Args:
        query: [1, B, n, dk].
        keys, values: [B, g, S, dk] and [B, g, S, dv].
        scale, window, sinks: see SDPACoreAttention.
    """
    if window is not None:
        keys, values = keys[:, :, -window - 1 :], values[:, :, -window - 1 :]
    # Without a mask the heads that share a key are rows of one product.
    rows = query[0].unflatten(1, (keys.shape[1], -1))
    if not platform.has_cuda():
        rows, keys, values = rows.float(), keys.float(), values.float()
    if sinks is None:
        context = F.scaled_dot_product_attention(rows, keys, values, scale=scale)
    else:
        logits = (rows @ keys.transpose(2, 3)).float() * (rows.shape[-1] ** -0.5 if scale is None else scale)
        of_rows = sinks.view(1, keys.shape[1], -1, 1).expand(*rows.shape[:3], 1)
        context = torch.cat((logits, of_rows), dim=-1).softmax(-1)[..., :-1].to(values.dtype) @ values
    return context.flatten(1, 2).unsqueeze(0).to(query.dtype)


def _attend_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """Return [B, n, S, dv] for [B, n, S, dk], [B, g, S, dk] and [B, g, S, dv], computed in fp32."""
    if query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _FlashInFp32.apply(query, key, value, scale)
    value_width = value.shape[-1]
    query, key, value = of_one_width(query, key, value)
    context = platform.kernel(F.scaled_dot_product_attention)(
        query, key, value, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=key.shape[1] != query.shape[1]
    )
    return context[..., :value_width]


class _FlashInFp32(torch.autograd.Function):
    """The flash kernel on widened copies of half-precision operands, which saves the operands for the backward pass.

    Autograd alone would save the copies, which are two to three times as large. The results are the same.
    """

    @staticmethod
    def forward(ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        context, logsumexp = attend_block(*of_one_width(query, key, value), scale, True)
        if context.shape[-1] > value.shape[-1]:
            context = context[..., : value.shape[-1]].clone()  # what is kept has no zeros that only fill up
        ctx.save_for_backward(query, key, value, context, logsumexp)
        ctx.scale = scale
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, context, logsumexp = ctx.saved_tensors
        operands = of_one_width(query, key, value)
        padding = operands[0].shape[-1] - value.shape[-1]
        context = wide(context, padding) if padding else context
        gradients = block_gradients(wide(grad, padding), *operands, context, logsumexp, ctx.scale, True)
        grad_query, grad_key, grad_value = (
            g[..., : t.shape[-1]].to(t.dtype) for g, t in zip(gradients, (query, key, value))
        )
        return grad_query, grad_key, grad_value, None


def _attend_cuda(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """Return what `_attend_cpu` returns, computed in the input's dtype."""
    key, value, grouped = for_kernels(query, key, value)
    return platform.kernel(F.scaled_dot_product_attention)(
        query, key, value, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=grouped
    )
