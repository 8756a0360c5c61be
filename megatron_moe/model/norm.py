"""RMSNorm for megatron-core's layers, before or behind them, over a head or all; the stream in fp32 or scaled.

The engine's own torch norm refuses sequence parallelism; this one marks its weight so that the engine sums the weight's
gradient over the tensor-parallel ranks, each of which normalises its own part of the sequence.

The engine's residual add casts the stream to the dtype of what is added, so that `fp32_residual_connection` alone gives
an fp32 stream that was rounded to bf16 in every layer. `fp32_bias_dropout_add` adds in the stream's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.engine.dist_checkpointing import make_sharded_tensors_for_checkpoint
from megatron_moe.engine.layers import (
    SelfAttention,
    SelfAttentionSubmodules,
    TransformerLayer,
    TransformerLayerSubmodules,
    set_tensor_model_parallel_attributes,
)
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.parallel.collectives import all_reduce_sum
from megatron_moe.platform.protocols import AutogradContext, EngineConfig, ProcessGroups
from megatron_moe.precision.contract import mixes_dtypes


class RMSNorm(torch.nn.Module):
    """A norm y = weight * x / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467).

    Statistics and product are in fp32. The output has the input's dtype, or with an fp32 residual stream the weight's,
    so that the stream's readers get the model's dtype. The weight is [hidden_size] in the model's dtype and starts at
    one.

    Args:
        config: the engine's TransformerConfig.
        hidden_size: the width that is normalised.
        eps: added to the mean square.
    """

    def __init__(self, config: EngineConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=platform.device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        # torch has one fused kernel per direction on CUDA. On a CPU its backward is a chain of elementwise operations,
        # 1.3 to 1.9 times as slow as ours, with the same rounding errors.
        self._kernel = _fused if platform.has_cuda() else _RMSNormFunction.apply
        self._narrows = config.fp32_residual_connection

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [..., hidden_size]; the class describes its dtype."""
        return self._kernel(x, self.weight, self.eps, self.weight.dtype if self._narrows else x.dtype)

    def extra_repr(self) -> str:
        """Return the text that print(model) shows."""
        return f"{self.weight.numel()}, eps={self.eps}"


def _fused(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    # The kernel needs one dtype; where the stream is wider than the weight, widening the weight is exact.
    return platform.kernel(F.rms_norm)(x, weight.shape, weight.to(x.dtype), eps).to(dtype)


@has_kernel("rms_norm_forward")
@mixes_dtypes("the weight, in the model's dtype, is multiplied in fp32 without a copy of it")
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the norm [..., H] in a dtype, and one fp32 number per row, [..., 1], for the backward pass."""
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * inverse_rms).mul_(weight).to(dtype), inverse_rms


@has_kernel("rms_norm_backward")
@mixes_dtypes("the weight, in the model's dtype, is multiplied in fp32 without a copy of it")
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight, in their dtypes."""
    normed = x.float() * inverse_rms
    wide = grad.float()
    weight_grad = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
    # d(x * inverse_rms): the part of the gradient along `normed` is taken out.
    inner = wide * weight
    along = (inner * normed).mean(-1, keepdim=True)
    x_grad = inner.sub_(normed.mul_(along)).mul_(inverse_rms)
    return x_grad.to(x.dtype), weight_grad


class _RMSNormFunction(torch.autograd.Function):
    """The norm as a function that saves x in its own dtype and one fp32 number per row, and recomputes the rest."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y, inverse_rms = rms_norm_forward(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *rms_norm_backward(grad, *ctx.saved_tensors), None, None


# ---- One norm over the queries, or the keys, of all heads, which tensor-parallel ranks share.


class RMSNormAcrossHeads(RMSNorm):
    """RMSNorm over the queries, or the keys, of all n heads together, before they are rotated.

    The weight [n / TP x width] is split as the rows of the projection are. A rank's gradient of it is whole, because
    each rank has its heads of the whole sequence, sequence parallelism or not.

    Args:
        config: the engine's TransformerConfig.
        heads: the number n of heads of all ranks.
        tp_group: the ranks that share the heads.
    """

    def __init__(self, config: EngineConfig, heads: int, tp_group: ProcessGroup) -> None:
        super().__init__(config, heads // tp_group.size() * config.kv_channels, config.layernorm_epsilon)
        self.tp_group = tp_group
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [S, B, n / TP, width] in its dtype."""
        rows = x.flatten(2)
        if self.tp_group.size() == 1:
            return super().forward(rows).view_as(x)
        return _NormOverRanks.apply(rows, self.weight, self.eps, self.tp_group).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the weight as this rank's part of the whole model's."""
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets)


class _NormOverRanks(torch.autograd.Function):
    """The norm of rows [..., H / TP] that are parts of rows [..., H] of all ranks.

    Forward, the ranks' sums of squares are added, one fp32 number per row. Backward, so is how much of the gradient is
    along the normalised row, which goes through the mean square to all ranks.
    """

    @staticmethod
    @mixes_dtypes("the weight, in the model's dtype, is multiplied in fp32 without a copy of it")
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, eps: float, group: ProcessGroup) -> Tensor:
        wide = x.float()
        squares = all_reduce_sum(wide.square().sum(-1, keepdim=True), group)
        inverse_rms = torch.rsqrt(squares / (x.shape[-1] * group.size()) + eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.group = group
        return (wide * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @mixes_dtypes("the weight, in the model's dtype, is multiplied in fp32 without a copy of it")
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        normed, wide = x.float() * inverse_rms, grad.float()
        weight_grad = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        inner = wide * weight
        along = all_reduce_sum((inner * normed).sum(-1, keepdim=True), ctx.group)
        along /= x.shape[-1] * ctx.group.size()
        return inner.sub_(normed.mul_(along)).mul_(inverse_rms).to(x.dtype), weight_grad, None, None


class SelfAttentionNormedAcrossHeads(SelfAttention):
    """The engine's self-attention with one norm over the queries of all heads, and one over the keys."""

    def __init__(
        self,
        config: EngineConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        pg_collection: ProcessGroups,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, **options)
        self.q_layernorm = RMSNormAcrossHeads(config, config.num_attention_heads, pg_collection.tp)
        self.k_layernorm = RMSNormAcrossHeads(config, config.num_query_groups, pg_collection.tp)


# ---- Norms behind attention and MLP.


class ReorderedNormLayer(TransformerLayer):
    """The engine's layer with x + norm(f(x)) in place of x + f(norm(x)) (OLMo 2, arXiv 2501.00656, section 3.2).

    Its submodules have no norms before attention and MLP.
    """

    def __init__(
        self, config: EngineConfig, submodules: TransformerLayerSubmodules, *args: Any, **options: Any
    ) -> None:
        super().__init__(config, submodules, *args, **options)
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = partial(_normed_before, self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = partial(_normed_before, self.post_mlp_layernorm, self.mlp_bda)


def _normed_before(
    norm: torch.nn.Module, adding: Callable[[bool, bool], BiasDropoutAdd], training: bool, fused: bool
) -> BiasDropoutAdd:
    """Return a function that normalises what it adds to the residual stream; see `fp32_bias_dropout_add`."""
    add = adding(training, fused)

    def added(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
        x, bias = x_with_bias
        return add((norm(x if bias is None else x + bias), None), residual, probability)

    return added


BiasDropoutAdd = Callable[[tuple[Tensor, "Tensor | None"], Tensor, float], Tensor]


def fp32_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return a function for residual + dropout(x + bias) in the residual's dtype, as the engine's protocol asks.

    Args:
        training: whether dropout drops.
        fused: part of the protocol; unused.

    Returns:
        A function of ((x, bias or None), residual, dropout probability); x [S, B, H] in the model's dtype, residual
        and result [S, B, H] in fp32.
    """

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
        x, bias = x_with_bias
        wide = x.to(residual.dtype) if bias is None else x.to(residual.dtype) + bias.to(residual.dtype)
        return residual + F.dropout(wide, p=probability, training=training)

    return add


def multiplied(adding: Callable[[bool, bool], BiasDropoutAdd], factor: float) -> Callable[[bool, bool], BiasDropoutAdd]:
    """Return `adding` for what is multiplied by a factor in its dtype before it is added; see `fp32_bias_dropout_add`.

    It is a plain function, as megatron-core 0.16.1 asks.
    """

    def scaled(training: bool, fused: bool) -> BiasDropoutAdd:
        add = adding(training, fused)

        def added(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
            x, bias = x_with_bias
            return add((x * factor, None if bias is None else bias * factor), residual, probability)

        return added

    return scaled


def residual_dtype(fp32_residual: bool, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the stream between layers, in which pipeline stages send activations."""
    return torch.float32 if fp32_residual else model_dtype
