"""Bringing matrices together that are spread over ranks, each on one rank, and taking results back.

A block is the part of a weight that is brought together at a time. Data-parallel ranks may each update a part of it, or
all of them the whole; tensor-parallel ranks may each have a part of every matrix. So a block travels twice: within the
data-parallel group to the owner's rank there, which makes the owner's tensor-parallel peers whole in their parts, and
then within the tensor-parallel group. Results go the same way back. Owners are chosen so that all ranks of a round
have about as much to compute, and rounds so that a rank has about `ROUND_NUMEL` elements at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.model.initialize import Split, whole_shape
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
    matrices: Callable[[Tensor], Sequence[Tensor]]
    cost: float
    shares: Sequence[Part | None]
    replicated: bool
    main: Tensor | None
    of_main: Part


class Owner(NamedTuple):
    """The data-parallel and the tensor-parallel rank that compute a block."""

    dp: int
    tp: int


@dataclass
class MatrixExchange:
    """The blocks of weights that are spread over the same groups, in the same order on all their ranks.

    dtype: in which values and results travel.
    """

    blocks: Sequence[MatrixBlock]
    dp: ProcessGroup
    tp: ProcessGroup
    dtype: torch.dtype
    rounds: list[list[tuple[MatrixBlock, Owner]]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        most = ROUND_NUMEL * self.dp.size() * self.tp.size()
        rounds: list[list[MatrixBlock]] = []
        numel = 0
        for block in self.blocks:
            size = math.prod(whole_shape(block.shape, block.split, self.tp.size()))
            if not rounds or numel + size > most:
                rounds.append([])
                numel = 0
            rounds[-1].append(block)
            numel += size
        # Each block goes to the rank that has least to do so far in the round, the most expensive ones first.
        for blocks in rounds:
            load = {Owner(*place): 0.0 for place in product(range(self.dp.size()), range(self.tp.size()))}
            owners: dict[MatrixBlock, Owner] = {}
            for block in sorted(blocks, key=lambda block: -block.cost):
                owner = min(load, key=lambda owner: (load[owner], owner))
                load[owner] += block.cost
                owners[block] = owner
            self.rounds.append([(block, owners[block]) for block in blocks])

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
            at_this_dp, own = [], []
            for block, owner in blocks:
                if owner.dp == self.dp.rank():
                    at_this_dp.append((block, owner))
                    if owner.tp == self.tp.rank():
                        own.append((block, owner))
            parts = [self._empty(block.shape) for block, _ in at_this_dp]
            self._over_dp(blocks, at_this_dp, parts, value, back=False)
            wholes = [self._empty(whole_shape(block.shape, block.split, self.tp.size())) for block, _ in own]
            self._over_tp(at_this_dp, own, parts, wholes, back=False)
            compute([(block, whole) for (block, _), whole in zip(own, wholes)])
            self._over_tp(at_this_dp, own, parts, wholes, back=True)
            del wholes
            self._over_dp(blocks, at_this_dp, parts, place, back=True)

    def _over_dp(
        self,
        blocks: list[tuple[MatrixBlock, Owner]],
        at_this_dp: list[tuple[MatrixBlock, Owner]],
        parts: list[Tensor],
        mine: Callable[[MatrixBlock], Tensor],
        *,
        back: bool,
    ) -> None:
        """Bring what the data-parallel ranks have of blocks to the owners, or results `back` to all that update them.

        parts: the blocks of this data-parallel rank as this tensor-parallel rank has them.
        """
        me = self.dp.rank()
        at_owners: list[list[Tensor]] = [[] for _ in range(self.dp.size())]
        at_sharers: list[list[Tensor]] = [[] for _ in range(self.dp.size())]
        # Of a block that each rank has whole, the owner's copy is enough.
        for block, owner in blocks:
            if block.shares[me] is not None and (back or not block.replicated or owner.dp == me):
                at_owners[owner.dp].append(mine(block))
        for (block, owner), part in zip(at_this_dp, parts):
            for rank, share in enumerate(block.shares):
                if share is not None and (back or not block.replicated or owner.dp == rank):
                    at_sharers[rank].append(share(part))
        if back:
            self._exchange(self.dp, at_sharers, at_owners)
        else:
            self._exchange(self.dp, at_owners, at_sharers)

    def _over_tp(
        self,
        at_this_dp: list[tuple[MatrixBlock, Owner]],
        own: list[tuple[MatrixBlock, Owner]],
        parts: list[Tensor],
        wholes: list[Tensor],
        *,
        back: bool,
    ) -> None:
        """Bring tensor-parallel ranks' parts together in `wholes`, which this rank computes, or results `back`."""
        me, ranks = self.tp.rank(), self.tp.size()
        of_parts: list[list[Tensor]] = [[] for _ in range(ranks)]
        of_wholes: list[list[Tensor]] = [[] for _ in range(ranks)]
        # Of a block that is not split, the owner's copy is enough.
        for (block, owner), part in zip(at_this_dp, parts):
            if back or block.split.axis is not None or owner.tp == me:
                of_parts[owner.tp] += _pieces(part, block.split)
        for (block, _), whole in zip(own, wholes):
            for rank in range(ranks):
                if back or block.split.axis is not None or rank == me:
                    of_wholes[rank] += _pieces(whole, block.split, rank, ranks)
        if back:
            self._exchange(self.tp, of_wholes, of_parts)
        else:
            self._exchange(self.tp, of_parts, of_wholes)

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=platform.device())

    def _exchange(self, group: ProcessGroup, parcels: list[list[Tensor]], places: list[list[Tensor]]) -> None:
        """Send each rank's parcels to it, and put what each rank sends into its places, both in order."""
        if group.size() == 1:
            for piece, place in zip(parcels[0], places[0], strict=True):
                place.copy_(piece.reshape(place.shape))
            return
        sent = [piece.to(platform.device(), self.dtype).reshape(-1) for piece in chain.from_iterable(parcels)]
        flat = torch.cat([self._empty((0,)), *sent])
        sent_sizes, sizes = ([sum(map(Tensor.numel, of_rank)) for of_rank in every] for every in (parcels, places))
        received = all_to_all_rows(flat, sent_sizes, sizes, group)
        begin = 0
        for place in chain.from_iterable(places):
            place.copy_(received[begin : begin + place.numel()].view(place.shape))
            begin += place.numel()


def _pieces(tensor: Tensor, split: Split, rank: int = 0, ranks: int = 1) -> Sequence[Tensor]:
    """Return the pieces of a rank's part that are apart in the whole: in the part itself, or in that of all ranks."""
    if split.axis is None:
        return [tensor]
    return [block.chunk(ranks, split.axis)[rank] for block in tensor.chunk(split.stride, split.axis)]
