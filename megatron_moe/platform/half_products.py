"""Matrix products in bf16 and fp16 on processors that have no instructions for them.

On these, torch's half-precision product is emulated and two to ten times as slow as the fp32 one. Casting the operands,
multiplying in fp32 and rounding the result once gives the same numbers to fp32 rounding (a half-precision product adds
in fp32 anyhow), and the casts are cheap next to the product. Tensors kept for the backward pass stay in half precision.

The processor's instructions decide, unless MEGATRON_MOE_CPU_HALF_PRODUCTS is set (`switches.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_moe.platform import hardware, switches
from megatron_moe.platform.isolation import unaffected_by_autocast

# Any of these makes torch's own product of that dtype fast. x86 names first, then those of 64-bit Arm.
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def multiply_in_fp32(operand: Tensor) -> bool:
    """Return whether products with this tensor are computed in fp32.

    They are if the tensor is in half precision, a CPU (or an imagined one) multiplies it, and
    MEGATRON_MOE_CPU_HALF_PRODUCTS is fp32, or is auto on a processor without the instructions.
    """
    if operand.dtype not in _INSTRUCTIONS or not hardware.on_cpu(operand):
        return False
    way = switches.half_products()
    return way == "fp32" or (way == "auto" and not _has_instructions(operand.dtype))


@functools.cache
def _has_instructions(dtype: torch.dtype) -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _INSTRUCTIONS[dtype])


class _Linear(torch.autograd.Function):
    @staticmethod
    @unaffected_by_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x.float(), weight.float().t()).to(x.dtype)

    @staticmethod
    @unaffected_by_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide = grad.float()
        grad_x = torch.matmul(wide, weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.matmul(wide.flatten(0, -2).t(), x.float().flatten(0, -2)).to(weight.dtype)
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T, [..., in] and [out, in] -> [..., out] in x's dtype, by the faster way on x's device."""
    if multiply_in_fp32(x):
        return _Linear.apply(x, weight)
    return torch.nn.functional.linear(x, weight)
