"""Collectives on rows of a tensor, with their backward.

Rows are dimension 0; the other dimensions stay as they are. Rows that differ in number between ranks are exchanged by
`all_to_all_single`, because gloo has no uneven all-gather, but its all-to-all takes uneven splits. In a group of one
rank nothing is sent: the input is returned.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.platform.protocols import AutogradContext


def exchange_rows(rows: Tensor, send_splits: list[int], recv_splits: list[int], group: ProcessGroup) -> Tensor:
    """Return what `all_to_all_rows` returns, outside of the graph."""
    received = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), recv_splits, send_splits, group=group)
    return received


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, rows: Tensor, send_splits: list[int], recv_splits: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.splits, ctx.group = (send_splits, recv_splits), group
        return exchange_rows(rows, send_splits, recv_splits, group)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send_splits, recv_splits = ctx.splits
        return exchange_rows(grad, recv_splits, send_splits, ctx.group), None, None, None


def all_to_all_rows(rows: Tensor, send_splits: list[int], recv_splits: list[int], group: ProcessGroup) -> Tensor:
    """Send `send_splits[r]` rows to each rank r of the group and receive `recv_splits[r]` from it.

    Args:
        rows: [sum(send_splits), ...], ordered by destination.
        send_splits, recv_splits: one row count per rank of the group.
        group: the ranks that exchange.

    Returns:
        [sum(recv_splits), ...], ordered by source. Backward: the same exchange in the other direction.
    """
    if group.size() == 1:
        return rows
    return _AllToAllRows.apply(rows, send_splits, recv_splits, group)


def room_for_rows(num_rows: int, hidden: int, rows: Tensor, weights: Tensor) -> Tensor:
    """Return memory [R, W] for rows of the dtype of `rows`, each with a weight of the dtype of `weights` behind it.

    One exchange then sends both, and weights keep their bits. W is the next multiple of 16 elements: every row begins
    at a multiple of 32 bytes or more, so that NCCL copies in packs of 16 bytes and a kernel moves vectors.
    """
    behind = -(-weights.element_size() // rows.element_size())
    return rows.new_empty((num_rows, -(-(hidden + behind) // 16) * 16))


def weights_behind(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a view [R] of the weights in `room_for_rows`: the last bytes of each row, as `dtype`."""
    return packed.view(dtype).select(1, -1)


def _gather(rows: Tensor, group: ProcessGroup) -> Tensor:
    gathered = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered


def _reduce_scatter_fp32(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks in fp32 (or wider), whatever the rows' dtype, and cast back once."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()
    share = wide.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    dist.reduce_scatter_tensor(share, wide, group=group)
    return share.to(rows.dtype)


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(rows, group)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_fp32(grad, ctx.group), None


def all_gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Return the rows [T, ...] of every rank, ordered by rank: [size x T, ...]. T must be the same on every rank.

    Backward: a reduce-scatter that sums in fp32.
    """
    return rows if group.size() == 1 else _AllGatherRows.apply(rows, group)


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter_fp32(rows, group)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


def reduce_scatter_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [size x T, ...] over the ranks in fp32 and keep this rank's [T, ...]. Backward: an all-gather."""
    return rows if group.size() == 1 else _ReduceScatterRows.apply(rows, group)


class _SharedByRanks(torch.autograd.Function):
    """Identity whose backward sums; the engine's own leaves a non-contiguous gradient as it was."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def shared_by_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return `x`, which every rank has and uses for a part of the work. Backward: the sum of the ranks' gradients."""
    return x if group.size() == 1 else _SharedByRanks.apply(x, group)


def all_reduce_sum(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of `values` over the group as a new tensor without gradient; `values` stays as it is.

    Raises:
        TypeError: `values` are bf16 or fp16, whose sums are rounded at every rank.
    """
    if values.dtype in (torch.bfloat16, torch.float16):
        raise TypeError(f"a sum over ranks in {values.dtype} rounds at every rank; give it fp32, fp64 or integers")
    total = values.detach().clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
