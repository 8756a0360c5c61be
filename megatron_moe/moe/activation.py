"""The experts' activation: SwiGLU times the routing weight, as one step of the graph.

Folding the weight in here, on rows of the expert's width, is cheaper than weighing the outputs on rows of the model's
width, and the second matrix product's output need not be kept for the backward pass. It is the same function: the
second product is linear.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.platform.autocast import unaffected_by_autocast
from megatron_moe.precision.declared import mixes_dtypes


class _WeightedSwiGLU(torch.autograd.Function):
    """Keeps its inputs only; the sigmoid is computed again in the backward pass. All arithmetic in fp32 or wider, also
    under autocast, whose list has the dot product of the backward pass."""

    @staticmethod
    @unaffected_by_autocast
    @mixes_dtypes("rows in the model's dtype are multiplied in place into fp32")
    def forward(ctx: Any, gate_up: Tensor, probs: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, probs)
        wide = torch.promote_types(gate_up.dtype, torch.float32)
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = F.silu(gate.to(wide))
        hidden *= up
        hidden *= probs.unsqueeze(-1)
        return hidden.to(gate_up.dtype)

    @staticmethod
    @unaffected_by_autocast
    @mixes_dtypes("rows in the model's dtype are multiplied in fp32, and rounded once as they are written")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, probs = ctx.saved_tensors
        wide = torch.promote_types(gate_up.dtype, torch.float32)
        gate, up = (half.to(wide) for half in gate_up.chunk(2, dim=-1))
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_wide = grad.to(wide)
        grad_hidden = grad_wide * silu
        grad_probs = torch.linalg.vecdot(grad_hidden, up).to(probs.dtype)
        weighted = grad_wide.mul_(probs.unsqueeze(-1)) if grad_wide is not grad else grad_wide * probs.unsqueeze(-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(weighted, silu, out=silu)
        grad_up.copy_(silu)
        # d silu(g)/dg = s + g s (1 - s) = s (1 + g (1 - s))
        slope = torch.addcmul(sigmoid, gate * sigmoid, 1 - sigmoid)
        grad_gate.copy_(slope.mul_(up).mul_(weighted))
        return grad_gate_up, grad_probs


def weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """silu(gate) * up * prob.

    Args:
        gate_up: [R, 2F], gate first.
        probs: [R], fp32 (or wider), the weight of each row.

    Returns:
        [R, F] in the dtype of `gate_up`, rounded once. Gradients: [R, 2F] in that dtype, [R] in the dtype of `probs`.
    """
    return _WeightedSwiGLU.apply(gate_up, probs)
