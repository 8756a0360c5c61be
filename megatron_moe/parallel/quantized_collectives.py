"""ZeRO++'s collectives (arXiv 2306.10209) for `fully_shard`: weights gathered, and gradients reduced, as integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.parallel.quantization import Segments


class _Allocating:
    """What every collective of `fully_shard` has: it allocates its own memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedAllGather(_Allocating):
    """A gather of weights as int8 blocks (qwZ). Every rank gets the same bits, also of what it has itself.

    Args:
        segments: returns the parts of a rank's row.
        ranks: size of the group whose gathers are quantised. Another group's, the secondary partition's, sends what
            the forward pass has gathered, as it is.
    """

    def __init__(self, segments: Callable[[], Segments], ranks: int) -> None:
        self._segments, self._ranks = segments, ranks

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather [numel] of every rank into [ranks x numel]."""
        if group.size() != self._ranks:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            return
        segments = self._segments()
        own = segments.pack(input_tensor.view(1, -1), bits=8)
        packed = own.new_empty((group.size(), own.shape[1]))
        self.send(packed, own, group)
        segments.unpack(packed, output_tensor.dtype, 8, into=output_tensor.view(group.size(), -1))

    def send(self, received: Tensor, packed: Tensor, group: ProcessGroup) -> None:
        """Gather everyone's bytes [1, bytes] into [ranks, bytes]."""
        dist.all_gather_into_tensor(received, packed, group=group)


class QuantizedReduceScatter(_Allocating):
    """A sum of gradients that are sent as int8 or int4 blocks and added in fp32 (qgZ).

    With machines, a number is rounded twice: the ranks of a machine exchange and add, then those of equal place on all
    machines. Else once. A rank's own share is rounded like the others'.

    Args:
        segments: returns the parts of a rank's row.
        bits: 8 or 4.
        inside, across: the ranks of this machine, and those of the same place on every machine; None on one machine.
            The group's ranks are numbered machine by machine.
    """

    def __init__(
        self,
        segments: Callable[[], Segments],
        bits: int,
        inside: ProcessGroup | None = None,
        across: ProcessGroup | None = None,
    ) -> None:
        self._segments, self._bits = segments, bits
        self._inside, self._across = inside, across

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add up everyone's row of each rank, [ranks x numel], into the own one, [numel]; both fp32."""
        assert op == dist.ReduceOp.SUM and input_tensor.dtype == torch.float32
        rows = input_tensor.view(group.size(), -1)
        if self._inside is None or self._across is None:
            output_tensor.copy_(self._exchange(rows, group)[0])
            return
        machines, places = self._across.size(), self._inside.size()
        # Row (machine, place) first goes to the rank of that place on this machine, with those of the other machines.
        by_place = rows.view(machines, places, -1).transpose(0, 1)
        output_tensor.copy_(self._exchange(self._exchange(by_place, self._inside), self._across)[0])

    def _exchange(self, rows: Tensor, group: ProcessGroup) -> Tensor:
        """Send an equal share of the rows to each rank, and return the sums of those that all ranks sent here."""
        segments = self._segments()
        packed = segments.pack(rows, self._bits)
        received = torch.empty_like(packed)
        self.send(received, packed, group)
        del packed
        return segments.unpack_sums(received, self._bits, group.size())

    def send(self, received: Tensor, packed: Tensor, group: ProcessGroup) -> None:
        """Exchange bytes [ranks x each, bytes]."""
        dist.all_to_all_single(received, packed, group=group)
