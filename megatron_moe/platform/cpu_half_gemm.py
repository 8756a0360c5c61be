"""Matrix products in bf16 and fp16 on processors that have no instructions for them.

On these, torch's half-precision product is emulated and two to ten times as slow as the fp32 one. Casting the operands,
multiplying in fp32 and rounding the result once gives the same numbers to fp32 rounding (a half-precision product adds
in fp32 anyhow), and the casts are cheap next to the product. Tensors kept for the backward pass stay in half precision.

The processor's instructions decide, unless MEGATRON_MOE_CPU_HALF_PRODUCTS is set (`env_vars.py`).

A processor that has the instructions multiplies in oneDNN, which generates code for each shape and keeps it. The groups
of an MoE layer have other numbers of rows in every step, so `grouped_product` multiplies a few numbers of rows for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.platform import env_vars, hardware
from megatron_moe.platform.numerics import unaffected_by_autocast, without_autocast
from megatron_moe.platform.protocols import AutogradContext

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
    way = env_vars.chosen[env_vars.HALF_PRODUCTS]
    return way == "fp32" or (way == "auto" and not _has_instructions(operand.dtype))


@functools.cache
def _has_instructions(dtype: torch.dtype) -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _INSTRUCTIONS[dtype])


class _Linear(torch.autograd.Function):
    @staticmethod
    @unaffected_by_autocast
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x.float(), weight.float().t()).to(x.dtype)

    @staticmethod
    @unaffected_by_autocast
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
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


# ---- Products of groups of rows.
#
# In fp32 each group has copies of its own, so that those of all rows and matrices are never there together. Natively,
# oneDNN keeps up to 1,024 products and torch as many descriptions of them, a quarter of a megabyte each, for shapes of
# which most do not come again; spread over the heap they cost as much again, and making them takes a fifth of a small
# model's step. A group is therefore multiplied as numbers of rows that come again: with a matrix in
# pieces, each a power of two; a sum over rows, which is rounded once, as one piece that is filled up. What fills it up
# changes nothing: a row of a product depends on no other row, and a sum over rows gets zeros added.

_FEWEST_ROWS = 8


def padded_rows(rows: int) -> int:
    """Return the number of rows as which the sum over so many is computed: at most half more, or 7.

    Below 32 it is a multiple of 8, and there are two such numbers from a power of two to the next above.
    """
    step = max(_FEWEST_ROWS, 1 << max(0, (rows - 1).bit_length() - 2))
    return -(-rows // step) * step


def pieces_of_rows(rows: int) -> list[int]:
    """Return the numbers of rows as which so many are multiplied with a matrix: at most two, both powers of two.

    It is one where that is at most a third more, or 7; a second piece may be more than what is left.
    """
    above = _power_of_two_for(rows)
    if above == _FEWEST_ROWS or 4 * rows >= 3 * above:
        return [above]
    return [above // 2, _power_of_two_for(rows - above // 2)]


def _power_of_two_for(rows: int) -> int:
    return max(_FEWEST_ROWS, 1 << (rows - 1).bit_length())


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Return what `torch.nn.functional.grouped_mm` returns, by the faster way on the operands' device.

    Args:
        left, right: [R, K] and [e, K, N], a matrix for each group of rows; or [N, R] and [R, K], a sum over the rows of
            each group.
        offsets: [e] int32, the end of each group's rows, of which the last is R.

    Returns:
        [R, N] or [e, N, K], in the dtype of both operands, rounded once.
    """
    if not hardware.on_cpu(left):
        return F.grouped_mm(left, right, offs=offsets)
    in_fp32 = multiply_in_fp32(left)
    if not multiplies_group_by_group(left):
        if in_fp32:
            return F.grouped_mm(left.float(), right.float(), offs=offsets).to(left.dtype)
        return F.grouped_mm(left, right, offs=offsets)
    if right.dim() == 2:
        sums = left.new_zeros((offsets.shape[0], left.shape[0], right.shape[1]))
        for group, product in products_over_rows(left, right, offsets):
            sums[group] = product
        return sums
    products = left.new_empty((left.shape[0], right.shape[-1]))
    with without_autocast(left.device.type):
        for (start, end), matrix in zip(_groups(offsets), right.unbind(0)):
            if start < end and in_fp32:  # from fp32 copies of one group after the other
                products[start:end] = torch.mm(left[start:end].float(), matrix.float())
            elif start < end:
                # With the rows behind it, whose products those of their own groups overwrite afterwards.
                for piece in pieces_of_rows(end - start):
                    behind = start + piece
                    if behind <= left.shape[0]:
                        torch.mm(left[start:behind], matrix, out=products[start:behind])
                    else:
                        filled = F.pad(left[start:end], (0, 0, 0, behind - end))
                        products[start:end] = torch.mm(filled, matrix)[: end - start]
                    start = behind
    return products


def multiplies_group_by_group(operand: Tensor) -> bool:
    """Return whether `grouped_product` multiplies one group after the other, in half precision on a CPU.

    A compiler, an audit, a plan or a count of what the host waits for looks at operations one by one, and at torch's
    form, as with the kernels in C.
    """
    if operand.dtype not in _INSTRUCTIONS or operand.is_meta or not hardware.on_cpu(operand):
        return False
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return not modes and not torch.compiler.is_compiling()


def products_over_rows(left: Tensor, right: Tensor, offsets: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each group that has rows, and its left right [N, K] in the operands' dtype, rounded once.

    Args:
        left, right: [N, R] and [R, K].
        offsets: see `grouped_product`.
    """
    rows, in_fp32 = left.t(), multiply_in_fp32(left)
    for group, (start, end) in enumerate(_groups(offsets)):
        one, other = rows[start:end], right[start:end]
        if start < end:
            with without_autocast(left.device.type):
                if in_fp32:
                    product = torch.mm(one.float().t(), other.float()).to(left.dtype)
                else:
                    product = torch.mm(_padded(one).t(), _padded(other))
            yield group, product


def _groups(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip([0, *ends], ends))


def _padded(rows: Tensor) -> Tensor:
    """Return rows [R, K] with zeros behind them, [padded_rows(R), K]."""
    return F.pad(rows, (0, 0, 0, padded_rows(rows.shape[0]) - rows.shape[0]))
