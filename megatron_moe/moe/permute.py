"""Moving rows between token order and expert order, with gathers both ways.

A permutation is kept as two index tables: `source` says which row each copy comes from, `slots` says where the copies
of a row went. Copying is a gather by `source`, and its gradient a gather by `slots` with a sum over the copies;
summing copies is the same pair the other way round. So no backward ever scatters: the result is deterministic on every
device, and nothing waits for atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe import platform


def gather_and_sum(rows: Tensor, slots: Tensor, partial: bool) -> Tensor:
    """rows [R, ...], slots [T, C] -> [T, ...]: the sum of each token's copies, in fp32 or wider, cast back once."""
    if partial:
        rows = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])  # slot R: a copy that is not here
    if slots.shape[1] == 1:
        return rows.index_select(0, slots.squeeze(1))
    if rows.dim() == 2 and not rows.is_cuda and not platform.has_cuda():
        # On a CPU the bag kernel reads each row once, adds in fp32 and builds no [T, C, H] tensor.
        return F.embedding_bag(slots, rows, mode="sum")
    copies = rows.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    return copies.sum(dim=1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, slots: Tensor, partial: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.partial = partial
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return gather_and_sum(grad, slots, ctx.partial), None, None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, slots: Tensor, partial: bool) -> Tensor:
        ctx.save_for_backward(source)
        return gather_and_sum(rows, slots, partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        return grad.index_select(0, source), None, None, None


def copy_rows(rows: Tensor, source: Tensor, slots: Tensor, partial: bool = False) -> Tensor:
    """Copies [R, ...] of rows [T, ...]: copy r is row `source[r]`.

    Args:
        rows: [T, ...].
        source: [R] int64.
        slots: [T, C] int64, where row t's copies stand. Every copy stands in exactly one slot.
        partial: some slots hold R, for a copy that is not among these.

    Backward: row t's gradient is the sum of its copies' gradients, added in fp32.
    """
    return _CopyRows.apply(rows, source, slots, partial)


def sum_copies(rows: Tensor, source: Tensor, slots: Tensor, partial: bool = False) -> Tensor:
    """The sums [T, ...] of each token's rows among [R, ...]: `copy_rows` walked the other way, with the same tables.

    Backward: each row's gradient is a copy of its token's gradient.
    """
    return _SumCopies.apply(rows, source, slots, partial)


def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation that undoes `order` ([R] int64)."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse
