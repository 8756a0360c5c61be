"""The weighted SwiGLU in Triton: one pass over the rows forward, one backward."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.choice import blocks_of, launch, power_of_2


@triton.jit
def swiglu(gate, up, prob):
    return gate / (1.0 + tl.exp(-gate)) * up * prob


@triton.jit
def swiglu_gradients(grad, gate, up, prob):
    """Return the gradients of gate and up, and the terms of the weight's."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    weighted = grad * prob
    # d silu(g)/dg = s + g s (1 - s)
    return (sigmoid + silu * (1.0 - sigmoid)) * up * weighted, silu * weighted, grad * silu * up


@triton.jit
def _forward(gate_up, probs, hidden, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    prob = tl.load(probs + row)
    value = swiglu(gate, up, prob)
    tl.store(hidden + row * width + column, value.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, gate_up, probs, grad_gate_up, grad_probs, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
        wide = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        grad_gate, grad_up, of_prob = swiglu_gradients(wide, gate, up, prob)
        total += of_prob
        kind = grad_gate_up.dtype.element_ty
        tl.store(grad_gate_up + row * 2 * width + column, grad_gate.to(kind), mask=inside)
        tl.store(grad_gate_up + (row * 2 + 1) * width + column, grad_up.to(kind), mask=inside)
    tl.store(grad_probs + row, tl.sum(total, axis=0))


def weighted_swiglu_forward(gate_up: Tensor, probs: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    hidden = gate_up.new_empty((rows, width))
    block = min(power_of_2(width), 1024)
    launch(_forward, (rows, blocks_of(width, block)), gate_up, probs, hidden, width, BLOCK=block)
    return hidden


def weighted_swiglu_backward(grad: Tensor, gate_up: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = grad.shape
    grad_gate_up, grad_probs = torch.empty_like(gate_up), torch.empty_like(probs)
    block = min(power_of_2(width), 1024)
    launch(_backward, (rows,), grad.contiguous(), gate_up, probs, grad_gate_up, grad_probs, width, BLOCK=block)
    return grad_gate_up, grad_probs
