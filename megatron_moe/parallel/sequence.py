"""A sequence moved by some positions, also where context parallelism spreads it over ranks.

The engine's own `roll_tensor` sends single columns between neighbours and knows no gradient. What is moved here, ids
and losses per token, is so small beside the activations that every rank may see all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.parallel.collectives import all_gather_rows

# ---- How context parallelism splits a sequence: 2 x CP equal chunks, of which rank r holds number r and 2 x CP - 1 -
# r.
#
# A causal attention then costs every rank the same: an early chunk attends to little, its late partner to much. It is
# the engine's convention, whose rotary tables follow it.


def chunk_numbers(rank: int, size: int) -> tuple[int, int]:
    """The two chunks of one rank, in the order in which it holds them."""
    return rank, 2 * size - 1 - rank


def context_parallel_slice(tensor: Tensor, rank: int, size: int, dim: int = -1) -> Tensor:
    """The part along `dim`, S long, that one context-parallel rank works on, S / size long.

    Raises:
        ValueError: S is no multiple of 2 x size.
    """
    if tensor.shape[dim] % (2 * size):
        raise ValueError(f"a sequence of {tensor.shape[dim]} has no 2 x CP = {2 * size} equal chunks")
    chunks = tensor.chunk(2 * size, dim=dim)
    return torch.cat([chunks[number] for number in chunk_numbers(rank, size)], dim=dim)


def holder(position: int, length: int, size: int) -> tuple[int, int]:
    """(rank, index in its part) of one position of a sequence of `length` tokens."""
    chunk = length // (2 * size)
    number, offset = divmod(position, chunk)
    return (number, offset) if number < size else (2 * size - 1 - number, chunk + offset)


def in_order(rows: Tensor, size: int) -> Tensor:
    """[S, ...], all ranks' parts one after the other, as `all_gather_rows` leaves them -> in the sequence's order."""
    parts = rows.unflatten(0, (size, 2, -1))
    return torch.cat((parts[:, 0], parts[:, 1].flip(0))).flatten(0, 1)


def by_rank(rows: Tensor, size: int) -> Tensor:
    """`in_order` undone: [S, ...] in the sequence's order -> all ranks' parts one after the other."""
    chunks = rows.unflatten(0, (2 * size, -1))
    return torch.stack((chunks[:size], chunks[size:].flip(0)), dim=1).flatten(0, 2)


def all_gather_sequence(rows: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's [S / CP, ...] -> the whole sequence [S, ...] in its order.

    Backward: a reduce-scatter that sums in fp32.
    """
    return rows if group.size() == 1 else in_order(all_gather_rows(rows, group), group.size())


# ----


def shifted(x: Tensor, by: int, group: ProcessGroup) -> Tensor:
    """The tensor whose position s holds x[:, s + by], and zero where the sequence has no such position.

    Args:
        x: [B, S / CP], this rank's part of the sequence as `sequence_chunks` has it.
        by: how far ahead to look, in tokens of the whole sequence; negative looks back.
        group: the context-parallel ranks.

    Returns:
        A new tensor like `x`. Backward: the same shift the other way.
    """
    whole = all_gather_sequence(x.t(), group).t()
    nothing = whole.new_zeros((whole.shape[0], min(abs(by), whole.shape[1])))
    moved = torch.cat((whole[:, by:], nothing) if by >= 0 else (nothing, whole[:, :by]), dim=1)
    return context_parallel_slice(moved, group.rank(), group.size()) if group.size() > 1 else moved
