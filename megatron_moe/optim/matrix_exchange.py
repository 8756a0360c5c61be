"""Bringing matrices together that are spread over ranks, each on one rank, and taking results back.

A block is the part of a weight that is brought together at a time. Data-parallel ranks may each update a part of it, or
all of them the whole; tensor-parallel ranks may each have a part of every matrix. So a block travels twice: within the
data-parallel group to the owner's rank there, which makes the owner's tensor-parallel peers whole in their parts, and
then within the tensor-parallel group. Results go the same way back. Owners are chosen so that all ranks of a round
have about as much to compute, and rounds so that a rank has about `ROUND_NUMEL` elements at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.model.initialize import Split
from megatron_moe.model.matrices import whole_shape
from megatron_moe.parallel.collectives import all_to_all_rows

ROUND_NUMEL = 2**25

Part = Callable[[Tensor], Tensor]
"""Returns a part of a contiguous tensor, in the same memory."""


@dataclass(frozen=True, eq=False)
class MatrixBlock:
    """A part of a weight that is brought together.

    shape: of it on each tensor-parallel rank. split: how the whole is split over those ranks. matrices: returns the
    matrices in the whole, [..., n], as views; all but the last axis count the rows. cost: of what the owner computes.
    shares: of each data-parallel rank, what it updates of a tensor of `shape`; None: nothing. replicated: whether each
    of them updates all. main: what this rank updates of the weight; None: nothing. of_main: returns what `main`, or a
    tensor like it, has of the block.
    """

    shape: tuple[int, ...]
    split: Split
    matrices: Callable[[Tensor], list[Tensor]]
    cost: float
    shares: Sequence[Part | None]
    replicated: bool
    main: Tensor | None
    of_main: Part


class Owner(NamedTuple):
    """The data-parallel and the tensor-parallel rank that compute a block."""

    dp: int
    tp: int


@dataclass(frozen=True)
class MatrixExchange:
    """The blocks of weights that are spread over the same groups; built alike on all their ranks.

    Args:
        blocks: in the same order on all ranks of both groups.
        dp, tp: the data-parallel and the tensor-parallel group of these weights.
        dtype: in which values and results travel.
    """

    blocks: Sequence[MatrixBlock]
    dp: ProcessGroup
    tp: ProcessGroup
    dtype: torch.dtype
    rounds: list[list[tuple[MatrixBlock, Owner]]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", list(self._make_rounds()))

    def _make_rounds(self) -> Iterator[list[tuple[MatrixBlock, Owner]]]:
        most = ROUND_NUMEL * self.dp.size() * self.tp.size()
        chosen: list[MatrixBlock] = []
        numel = 0
        for block in self.blocks:
            size = math.prod(whole_shape(block.shape, block.split, self.tp.size()))
            if chosen and numel + size > most:
                yield self._with_owners(chosen)
                chosen, numel = [], 0
            chosen.append(block)
            numel += size
        if chosen:
            yield self._with_owners(chosen)

    def _with_owners(self, blocks: list[MatrixBlock]) -> list[tuple[MatrixBlock, Owner]]:
        """Give each block to the rank that has least to do so far, the most expensive ones first."""
        load = {Owner(dp, tp): 0.0 for dp in range(self.dp.size()) for tp in range(self.tp.size())}
        owners: dict[int, Owner] = {}
        for index in sorted(range(len(blocks)), key=lambda index: -blocks[index].cost):
            owner = min(load, key=lambda owner: (load[owner], owner))
            load[owner] += blocks[index].cost
            owners[index] = owner
        return [(block, owners[index]) for index, block in enumerate(blocks)]

    def run(
        self,
        value: Callable[[MatrixBlock], Tensor],
        compute: Callable[[list[tuple[MatrixBlock, Tensor]]], None],
        place: Callable[[MatrixBlock], Tensor],
    ) -> None:
        """Bring values together, compute, and hand out the results. Collective over both groups.

        Args:
            value: returns what this rank has of a block's values, of any shape.
            compute: replaces the values of whole blocks by results, in place.
            place: returns where to put what this rank updates of a block's results.
        """
        for blocks in self.rounds:
            at_this_dp = [(block, owner) for block, owner in blocks if owner.dp == self.dp.rank()]
            own = [(block, owner) for block, owner in at_this_dp if owner.tp == self.tp.rank()]
            parts = self._collect_over_dp(blocks, at_this_dp, value)
            wholes = self._collect_over_tp(at_this_dp, own, parts)
            compute([(block, whole) for (block, _), whole in zip(own, wholes)])
            parts = self._return_over_tp(at_this_dp, own, wholes)
            del wholes
            self._return_over_dp(blocks, at_this_dp, parts, place)

    def _collect_over_dp(
        self,
        blocks: list[tuple[MatrixBlock, Owner]],
        at_this_dp: list[tuple[MatrixBlock, Owner]],
        value: Callable[[MatrixBlock], Tensor],
    ) -> list[Tensor]:
        """Return the blocks of this data-parallel rank as this tensor-parallel rank has them."""
        me = self.dp.rank()
        parcels: list[list[Tensor]] = [[] for _ in range(self.dp.size())]
        for block, owner in blocks:
            if block.shares[me] is not None and (not block.replicated or owner.dp == me):
                parcels[owner.dp].append(value(block))
        parts = [self._empty(block.shape) for block, _ in at_this_dp]
        places: list[list[Tensor]] = []
        for rank in range(self.dp.size()):
            shares = [
                (block.shares[rank], part)
                for (block, owner), part in zip(at_this_dp, parts)
                if not block.replicated or rank == owner.dp
            ]
            places.append([share(part) for share, part in shares if share is not None])
        self._exchange(self.dp, parcels, places)
        return parts

    def _collect_over_tp(
        self, at_this_dp: list[tuple[MatrixBlock, Owner]], own: list[tuple[MatrixBlock, Owner]], parts: list[Tensor]
    ) -> list[Tensor]:
        """Return the whole blocks that this rank computes."""
        ranks, me = self.tp.size(), self.tp.rank()
        parcels: list[list[Tensor]] = [[] for _ in range(ranks)]
        for (block, owner), part in zip(at_this_dp, parts):
            if block.split.axis is not None or owner.tp == me:
                parcels[owner.tp] += _pieces(part, block.split)
        wholes = [self._empty(whole_shape(block.shape, block.split, ranks)) for block, _ in own]
        places = [
            [
                piece
                for (block, _), whole in zip(own, wholes)
                if block.split.axis is not None or rank == me
                for piece in _pieces_of_rank(whole, block.split, rank, ranks)
            ]
            for rank in range(ranks)
        ]
        self._exchange(self.tp, parcels, places)
        return wholes

    def _return_over_tp(
        self, at_this_dp: list[tuple[MatrixBlock, Owner]], own: list[tuple[MatrixBlock, Owner]], wholes: list[Tensor]
    ) -> list[Tensor]:
        """Return the results of all blocks of this data-parallel rank, as this tensor-parallel rank has them."""
        ranks = self.tp.size()
        parcels = [
            [
                piece
                for (block, _), whole in zip(own, wholes)
                for piece in _pieces_of_rank(whole, block.split, rank, ranks)
            ]
            for rank in range(ranks)
        ]
        parts = [self._empty(block.shape) for block, _ in at_this_dp]
        places: list[list[Tensor]] = [[] for _ in range(ranks)]
        for (block, owner), part in zip(at_this_dp, parts):
            places[owner.tp] += _pieces(part, block.split)
        self._exchange(self.tp, parcels, places)
        return parts

    def _return_over_dp(
        self,
        blocks: list[tuple[MatrixBlock, Owner]],
        at_this_dp: list[tuple[MatrixBlock, Owner]],
        parts: list[Tensor],
        place: Callable[[MatrixBlock], Tensor],
    ) -> None:
        parcels = [
            [share(part) for (block, _), part in zip(at_this_dp, parts) if (share := block.shares[rank]) is not None]
            for rank in range(self.dp.size())
        ]
        places: list[list[Tensor]] = [[] for _ in range(self.dp.size())]
        for block, owner in blocks:
            if block.shares[self.dp.rank()] is not None:
                places[owner.dp].append(place(block))
        self._exchange(self.dp, parcels, places)

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=platform.device())

    def _exchange(self, group: ProcessGroup, parcels: list[list[Tensor]], places: list[list[Tensor]]) -> None:
        """Send each rank's parcels to it, and put what each rank sends into its places, both in order."""
        if group.size() == 1:
            for piece, place in zip(parcels[0], places[0], strict=True):
                place.copy_(piece.reshape(place.shape))
            return
        sent = [piece.to(platform.device(), self.dtype).reshape(-1) for pieces in parcels for piece in pieces]
        flat = torch.cat(sent) if sent else self._empty((0,))
        received = all_to_all_rows(flat, _numels(parcels), _numels(places), group)
        begin = 0
        for place in (place for pieces in places for place in pieces):
            place.copy_(received[begin : begin + place.numel()].view(place.shape))
            begin += place.numel()


def _numels(tensors: list[list[Tensor]]) -> list[int]:
    """Return how many elements are for, or from, each rank."""
    return [sum(tensor.numel() for tensor in of_rank) for of_rank in tensors]


def _pieces(part: Tensor, split: Split) -> Sequence[Tensor]:
    """Return the pieces of a rank's part that are apart in the whole."""
    return [part] if split.axis is None else part.chunk(split.stride, split.axis)


def _pieces_of_rank(whole: Tensor, split: Split, rank: int, ranks: int) -> Sequence[Tensor]:
    """Return the same pieces of that rank's part, in the whole."""
    if split.axis is None:
        return [whole]
    return [block.chunk(ranks, split.axis)[rank] for block in whole.chunk(split.stride, split.axis)]
