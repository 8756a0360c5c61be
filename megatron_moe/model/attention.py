"""Core attention on torch's scaled_dot_product_attention: causal, no S x S matrix in memory.

Takes the place of the engine's DotProductAttention, which has no context for value heads of another width (latent
attention) and holds the whole score matrix.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError


class SDPACoreAttention(torch.nn.Module):
    """softmax(q k^T x scale) v with a causal mask, softmax in fp32, dropout in training only.

    Queries may share key/value heads (grouped-query attention: head i of n uses group i // (n / g)), and values may
    have another width than keys. Constructor and call follow megatron-core's protocol for core attention.

    Args:
        config: the engine's TransformerConfig.
        layer_number: unused; part of the protocol.
        attn_mask_type: causal, the only one there is.
        softmax_scale: factor on q k^T; default 1 / sqrt(key width).
        k_channels, v_channels, cp_comm_type, attention_type, attention_dropout, pg_collection: the protocol's.

    Raises:
        ConfigError: with context parallelism, which it does not support.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ConfigError(
                f"--context-parallel-size {config.context_parallel_size}: this attention does not split a sequence "
                "over ranks yet; use --context-parallel-size 1"
            )
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"attention is causal only, not {attn_mask_type.name}")
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        # Under sequence parallelism the engine has switched to the rank's own random stream around the whole layer.
        self._own_stream = not config.sequence_parallel
        self._kernel = _attend_cuda if platform.has_cuda() else _attend_cpu

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [S, B, n, dk], key [S, B, g, dk], value [S, B, g, dv] -> [S, B, n x dv] in the query's dtype.

        The mask is causal by construction: `attention_mask` must be None, as must biases and packed sequences.
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("causal attention takes no attention_mask, attention_bias or packed sequences")
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        dropout = self.dropout if self.training else 0.0
        # TP ranks hold different heads and must drop different weights.
        stream = get_cuda_rng_tracker().fork() if dropout and self._own_stream else contextlib.nullcontext()
        with stream:
            context = self._kernel(
                query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), scale, dropout
            )
        return context.permute(2, 0, 1, 3).to(query.dtype).reshape(*query.shape[:2], -1)


def _attend_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """[B, n, S, dk], [B, g, S, dk], [B, g, S, dv] -> [B, n, S, dv], in fp32.

    torch's flash kernel for CPU wants equal widths, or the whole score matrix is built: the narrower side is padded
    with zeros. Its backward pass in bf16 takes 2.5 to 4 times as long as in fp32, so everything is in fp32; on the way
    the tensors become contiguous, which the kernel likes too.
    """
    if query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _FlashInFp32.apply(query, key, value, scale)
    value_width = value.shape[-1]
    query, key, value = _of_one_width(query, key, value)
    context = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=key.shape[1] != query.shape[1]
    )
    return context[..., :value_width]


class _FlashInFp32(torch.autograd.Function):
    """The flash kernel on widened copies of half-precision operands, of which it keeps the operands: left to itself,
    autograd would keep the copies, which are two to three times as large. Same numbers."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        wide = _of_one_width(query, key, value)
        context, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, True, scale=scale)
        ctx.save_for_backward(query, key, value, context, logsumexp)
        ctx.scale = scale
        return context[..., : value.shape[-1]]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, context, logsumexp = ctx.saved_tensors
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _wide(grad, context.shape[-1] - value.shape[-1]),
            *_of_one_width(query, key, value),
            context,
            logsumexp,
            0.0,
            True,
            scale=ctx.scale,
        )
        narrow = (g[..., : t.shape[-1]].to(t.dtype) for g, t in zip(gradients, (query, key, value)))
        return (*narrow, None)


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 and contiguous, the narrower of keys and values padded with zeros."""
    key_width, value_width = query.shape[-1], value.shape[-1]
    missing = max(0, value_width - key_width)
    return _wide(query, missing), _wide(key, missing), _wide(value, max(0, key_width - value_width))


def _wide(tensor: Tensor, padding: int) -> Tensor:
    """fp32, contiguous, the last dimension longer by `padding` zeros."""
    if padding:
        return F.pad(tensor.float(), (0, padding))
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


def _attend_cuda(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """As `_attend_cpu`, in the input's dtype. Of the CUDA kernels without a score matrix, the flash kernel knows
    grouped-query attention but neither fp32 nor two widths; the memory-efficient one knows these but no groups, so keys
    and values are repeated for it.
    """
    grouped = key.shape[1] != query.shape[1]
    if grouped and (query.dtype == torch.float32 or value.shape[-1] != query.shape[-1]):
        times = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=grouped
    )
