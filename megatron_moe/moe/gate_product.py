"""The product of a gate, the router's or the shared expert's: few columns, and wider than the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.platform.autocast import unaffected_by_autocast


class _GateProduct(torch.autograd.Function):
    """Keeps the operands as they came, which others keep too; left to itself, autograd would keep a copy of all hidden
    states in fp32."""

    @staticmethod
    @unaffected_by_autocast
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden.to(dtype), weight.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    @unaffected_by_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.matmul(grad, weight.to(grad.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            rows = hidden.flatten(0, -2).to(grad.dtype)
            grad_weight = torch.mm(grad.flatten(0, -2).t(), rows).to(weight.dtype)
        return grad_hidden, grad_weight, None


def gate_product(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden weight^T, computed in `dtype` whatever the operands have and whatever autocast is around.

    Args:
        hidden: [..., H].
        weight: [N, H].
        dtype: fp32 or fp64, the dtype of the product.

    Returns:
        [..., N] in `dtype`. Gradients: summed in `dtype` and rounded once, to the dtypes of `hidden` and `weight`.
    """
    return _GateProduct.apply(hidden, weight, dtype)
