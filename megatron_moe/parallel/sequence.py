"""Sequences under context parallelism: how they are split over ranks, gathered, and shifted by some positions.

A sequence is cut into 2 x CP equal chunks, of which rank r has numbers r and 2 x CP - 1 - r. A causal attention then
costs every rank the same: an early chunk attends to little, the late chunk of the same rank to much. It is the engine's
convention, which its rotary tables follow.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.parallel.collectives import all_gather_rows


def chunk_numbers(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of one rank's chunks, in the order in which it has them."""
    return rank, 2 * size - 1 - rank


def context_parallel_slice(tensor: Tensor, rank: int, size: int, dim: int = -1) -> Tensor:
    """Return the part along `dim`, S long, that one context-parallel rank works on, S / size long.

    Raises:
        ValueError: S is no multiple of 2 x size.
    """
    if tensor.shape[dim] % (2 * size):
        raise ValueError(f"a sequence of {tensor.shape[dim]} has no 2 x CP = {2 * size} equal chunks")
    chunks = tensor.chunk(2 * size, dim=dim)
    return torch.cat([chunks[number] for number in chunk_numbers(rank, size)], dim=dim)


def holder(position: int, length: int, size: int) -> tuple[int, int]:
    """Return (rank, index in its part) of one position of a sequence of `length` tokens."""
    chunk = length // (2 * size)
    number, offset = divmod(position, chunk)
    return (number, offset) if number < size else (2 * size - 1 - number, chunk + offset)


def in_order(rows: Tensor, size: int) -> Tensor:
    """Return the rows [S, ...] of all ranks' parts, as `all_gather_rows` returns them, in the sequence's order."""
    parts = rows.unflatten(0, (size, 2, -1))
    return torch.cat((parts[:, 0], parts[:, 1].flip(0))).flatten(0, 1)


def by_rank(rows: Tensor, size: int) -> Tensor:
    """Undo `in_order`: return the rows [S, ...] of a sequence as all ranks' parts one after the other."""
    chunks = rows.unflatten(0, (2 * size, -1))
    return torch.stack((chunks[:size], chunks[size:].flip(0)), dim=1).flatten(0, 2)


def all_gather_sequence(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Return the whole sequence [S, ...] in its order, from the parts [S / CP, ...] of all ranks.

    Backward: a reduce-scatter that sums in fp32.
    """
    return rows if group.size() == 1 else in_order(all_gather_rows(rows, group), group.size())


def all_gather_split_sequence(rows: Tensor, tp_group: ProcessGroup, cp_group: ProcessGroup) -> Tensor:
    """Return the whole sequence [S, ...] in its order, from the parts [S / CP / TP, ...] of all ranks.

    Each TP rank sends its own part to the CP ranks, which may be on other machines; TP ranks then exchange the rest.

    Backward: two reduce-scatters that sum in fp32.
    """
    rows = all_gather_rows(all_gather_rows(rows, cp_group), tp_group)
    parts = rows.unflatten(0, (tp_group.size(), cp_group.size(), -1))
    return in_order(parts.transpose(0, 1).flatten(0, 2), cp_group.size())


def shifted(x: Tensor, by: int, group: ProcessGroup) -> Tensor:
    """Return the tensor with x[:, s + by] at position s, and zero where the sequence has no such position.

    The engine's own `roll_tensor` sends single columns between neighbours and has no gradient. What is shifted here,
    ids and losses per token, is so small compared to the activations that every rank may gather all of it.

    Args:
        x: [B, S / CP], this rank's part of the sequence, as `context_parallel_slice` returns it.
        by: how far ahead to look, in tokens of the whole sequence; negative looks back.
        group: the context-parallel ranks.

    Returns:
        A new tensor like `x`. Backward: the same shift the other way.
    """
    whole = all_gather_sequence(x.t(), group).t()
    nothing = whole.new_zeros((whole.shape[0], min(abs(by), whole.shape[1])))
    moved = torch.cat((whole[:, by:], nothing) if by >= 0 else (nothing, whole[:, :by]), dim=1)
    return context_parallel_slice(moved, group.rank(), group.size()) if group.size() > 1 else moved
