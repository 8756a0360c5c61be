"""RMSNorm for megatron-core's layers, and the residual stream: in fp32, or of what a factor multiplies.

The engine's own torch norm refuses sequence parallelism; this one marks its weight so that the engine sums the weight's
gradient over the tensor-parallel ranks, each of which normalises its own part of the sequence.

The engine's residual add casts the stream to the dtype of what is added, so that `fp32_residual_connection` alone gives
an fp32 stream that was rounded to bf16 in every layer. `fp32_bias_dropout_add` adds in the stream's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe import platform
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.platform.protocols import AutogradContext, EngineConfig
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
