"""Sequences under context parallelism: how they are split over ranks, gathered, and shifted by some positions.

A sequence is cut into 2 x CP equal chunks, of which rank r has numbers r and 2 x CP - 1 - r. A causal attention then
costs every rank the same: an early chunk attends to little, the late chunk of the same rank to much. It is the engine's
convention, which its rotary tables follow.

Where documents do not see each other, a token's cost is its place in its document, and the sequences of a micro-batch
are cut into blocks that are given to ranks by their cost (`balanced_places`). Such a split is a table `places`
[CP, S / CP], the positions of every rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

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


class Documents(NamedTuple):
    """What a model is given as attention_mask where documents do not see each other.

    All are int64.

    firsts: [B, S / CP], for each of this rank's tokens the place in the whole sequence of the first one that it sees,
        its document's; -1: padding.
    positions: [B, S / CP], what rotates these tokens: their places, in the sequence or in the document.
    places: [CP, S / CP], see the module's docstring; None without context parallelism.
    """

    firsts: Tensor
    positions: Tensor
    places: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor | None, batch: int) -> Documents | None:
        """Take apart what `as_mask` made for `batch` sequences; None stands for sequences of one document."""
        if mask is None:
            return None
        if mask.dtype != torch.int64 or len(mask) < 2 * batch:
            raise ValueError(
                f"an attention_mask is what Documents.as_mask returns for {batch} sequences, int64 [{2 * batch} and CP "
                f"if that is more than 1, tokens], not {mask.dtype} {list(mask.shape)}"
            )
        return cls(mask[:batch], mask[batch : 2 * batch], mask[2 * batch :] if len(mask) > 2 * batch else None)

    def as_mask(self, on_host: Tensor | None = None) -> Tensor:
        """Return all as one tensor, as which the engine hands them on.

        Args:
            on_host: [B + CP, S / CP] or [B, S], firsts and places in the host's memory, for which it then never waits.
        """
        mask = torch.cat(tuple(part for part in self if part is not None))
        if on_host is not None:
            batch = len(self.firsts)
            once(mask, "on host", lambda: HostDocuments(on_host[:batch], on_host[batch:]))
        return mask

    def on_host(self) -> HostDocuments:
        """Return what a host needs to start kernels, for which it waits once a mask if nobody gave it."""
        places = self.firsts[:0] if self.places is None else self.places
        parts = (self.firsts, places)
        return once(self.firsts, "on host", lambda: HostDocuments(*(part.to("cpu", copy=True) for part in parts)))


class HostDocuments(NamedTuple):
    """The firsts and places of `Documents` in the host's memory; no places [0, S] without context parallelism."""

    firsts: Tensor
    places: Tensor


T = TypeVar("T")
_made: dict[StorageWeakRef, tuple[int, dict[Hashable, Any]]] = {}


def once(tensor: Tensor, what: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` returns, which is called once for all who ask the same of a tensor's memory.

    All layers ask the same of a micro-batch's documents. It is forgotten with the memory, or with a write to it, and
    may not hold any of it.
    """
    key, version = StorageWeakRef(tensor.untyped_storage()), 0 if tensor.is_inference() else tensor._version
    found = _made.get(key)
    if found is None or found[0] != version:
        for gone in [one for one in _made if one.expired()]:
            del _made[gone]
        found = _made[key] = (version, {})
    if what not in found[1]:
        found[1][what] = make()
    return found[1][what]


MOST_BLOCKS, BALANCED = 64, 1.02
"""Blocks of a rank, at most; fewer where the most work of a rank is this share of the mean."""


def balanced_places(firsts: numpy.ndarray, size: int) -> numpy.ndarray:
    """Return the positions of each rank's tokens, int64 [size, S / size], ascending within a rank.

    The longest attention first, each block goes to the rank with the least so far, until it has its number of blocks.
    With one document that is the split into 2 x size chunks. Blocks get smaller until ranks have equal work.

    Args:
        firsts: int64 [B, S], for each token the position of the first one that it sees; -1: padding, which sees none.
    """
    length = firsts.shape[1]
    place = numpy.arange(length)
    work = numpy.where(firsts < 0, 0, place - firsts + 1).sum(axis=0)
    for blocks in (count for count in range(2, MOST_BLOCKS + 1) if length % (size * count) == 0):
        of_block = work.reshape(size * blocks, -1).sum(axis=1)
        owned, loads = _shared_out(of_block, size)
        if max(loads) * size <= BALANCED * int(of_block.sum()):
            break
    return place.reshape(owned.size, -1)[owned].reshape(size, -1)


def _shared_out(work: numpy.ndarray, size: int) -> tuple[numpy.ndarray, list[int]]:
    """Return the blocks [size, n / size] of each rank, ascending, from the work [n] of each block, and ranks' sums."""
    owned: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for block in numpy.argsort(-work, kind="stable").tolist():
        free = (rank for rank in range(size) if len(owned[rank]) < len(work) // size)
        rank = min(free, key=loads.__getitem__)
        owned[rank].append(block)
        loads[rank] += int(work[block])
    return numpy.sort(numpy.array(owned), axis=1), loads


def in_order(rows: Tensor, size: int, places: Tensor | None = None) -> Tensor:
    """Return the rows [S, ...] of all ranks' parts, as `all_gather_rows` returns them, in the sequence's order."""
    if places is not None:
        return rows.index_select(0, places.flatten().argsort())
    parts = rows.unflatten(0, (size, 2, -1))
    return torch.cat((parts[:, 0], parts[:, 1].flip(0))).flatten(0, 1)


def by_rank(rows: Tensor, size: int, places: Tensor | None = None) -> Tensor:
    """Undo `in_order`: return the rows [S, ...] of a sequence as all ranks' parts one after the other."""
    if places is not None:
        return rows.index_select(0, places.flatten())
    chunks = rows.unflatten(0, (2 * size, -1))
    return torch.stack((chunks[:size], chunks[size:].flip(0)), dim=1).flatten(0, 2)


def all_gather_sequence(rows: Tensor, group: ProcessGroup, places: Tensor | None = None) -> Tensor:
    """Return the whole sequence [S, ...] in its order, from the parts [S / CP, ...] of all ranks.

    Backward: a reduce-scatter that sums in fp32.
    """
    return rows if group.size() == 1 else in_order(all_gather_rows(rows, group), group.size(), places)


def all_gather_split_sequence(
    rows: Tensor, tp_group: ProcessGroup, cp_group: ProcessGroup, places: Tensor | None = None
) -> Tensor:
    """Return the whole sequence [S, ...] in its order, from the parts [S / CP / TP, ...] of all ranks.

    Each TP rank sends its own part to the CP ranks, which may be on other machines; TP ranks then exchange the rest.

    Backward: two reduce-scatters that sum in fp32.
    """
    rows = all_gather_rows(all_gather_rows(rows, cp_group), tp_group)
    parts = rows.unflatten(0, (tp_group.size(), cp_group.size(), -1))
    return in_order(parts.transpose(0, 1).flatten(0, 2), cp_group.size(), places)


def shifted(x: Tensor, by: int, group: ProcessGroup, documents: Documents | None = None) -> Tensor:
    """Return the tensor with x[:, s + by] at position s, and zero where the sequence or document has no such position.

    The engine's own `roll_tensor` sends single columns between neighbours and has no gradient. What is shifted here,
    ids and losses per token, is so small compared to the activations that every rank may gather all of it.

    Args:
        x: [B, S / CP], this rank's part of the sequence, as `context_parallel_slice` returns it.
        by: how far ahead to look, in tokens of the whole sequence; negative looks back.
        group: the context-parallel ranks.
        documents: those of `x`; None: a sequence is one.

    Returns:
        A new tensor like `x`. Backward: the same shift the other way.
    """
    if documents is None:
        return _shifted(x, by, group, None)
    # Numbers of documents are made positive: zero is where there is no position.
    numbers = documents.firsts + 2
    inside = _shifted(numbers, by, group, documents.places) == numbers
    return _shifted(x, by, group, documents.places) * inside


def _shifted(x: Tensor, by: int, group: ProcessGroup, places: Tensor | None) -> Tensor:
    whole = all_gather_sequence(x.t(), group, places).t()
    nothing = whole.new_zeros((whole.shape[0], min(abs(by), whole.shape[1])))
    moved = torch.cat((whole[:, by:], nothing) if by >= 0 else (nothing, whole[:, :by]), dim=1)
    if places is not None:
        return moved[:, places[group.rank()]]
    return context_parallel_slice(moved, group.rank(), group.size()) if group.size() > 1 else moved
