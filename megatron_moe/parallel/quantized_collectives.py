"""ZeRO++'s collectives (arXiv 2306.10209) for `fully_shard`: weights gathered, and gradients reduced, as integers.

Numbers are sent as integers in blocks with a scale each. A block of 256 numbers has the scale max |x| / L, with L = 127
for int8 and 7 for int4 (two to a byte), and each number becomes the nearest multiple of it: off by at most half a
scale, max |x| / (2 L) of its block. Scales are fp32, so a number takes 1.016 bytes in int8 and 0.516 in int4.

What is not finite stays so: a NaN or an infinity makes its whole block non-finite, and the step is not applied. Blocks
whose largest number is below L x 2^-149 become zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

BLOCK = 256
_LARGEST = {8: 127.0, 4: 7.0}


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that so many numbers take, scales included; the last block is filled up."""
    return -(-count // BLOCK) * (BLOCK * bits // 8 + 4)


@torch.no_grad()
def quantize(values: Tensor, bits: int) -> Tensor:
    """Return rows of numbers [rows, count] in any floating dtype as bytes [rows, packed_bytes(count, bits)], uint8."""
    rows, count = values.shape
    blocks = -(-count // BLOCK)
    wide = values.float()
    if count % BLOCK:
        wide = torch.nn.functional.pad(wide, (0, blocks * BLOCK - count))
    wide = wide.reshape(rows, blocks, BLOCK)
    scales = torch.linalg.vector_norm(wide, ord=torch.inf, dim=-1, keepdim=True) / _LARGEST[bits]
    steps = wide / torch.where(scales > 0, scales, 1.0)
    whole = steps.nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-_LARGEST[bits], _LARGEST[bits]).to(torch.int8)
    stored = whole.view(torch.uint8)
    if bits == 4:
        stored = (stored[..., 0::2] & 15) | (stored[..., 1::2] << 4)
    return torch.cat([stored.reshape(rows, -1), scales.reshape(rows, blocks).contiguous().view(torch.uint8)], dim=1)


@torch.no_grad()
def dequantize(packed: Tensor, count: int, bits: int, into: Tensor | None = None) -> Tensor:
    """Return the numbers [rows, count] of what `quantize` returned: fp32, or in `into`, rounded to its dtype."""
    rows, blocks = packed.shape[0], -(-count // BLOCK)
    stored, scales = packed.split([blocks * BLOCK * bits // 8, blocks * 4], dim=1)
    if bits == 4:
        pairs = stored.reshape(rows, blocks, BLOCK // 2).view(torch.int8)
        # A shift to the left and back extends the sign of the lower half.
        whole = torch.stack([(pairs << 4) >> 4, pairs >> 4], dim=-1).view(rows, blocks, BLOCK)
    else:
        whole = stored.reshape(rows, blocks, BLOCK).view(torch.int8)
    steps = scales.contiguous().view(torch.float32).view(rows, blocks, 1)
    found = packed.new_empty((rows, count), dtype=torch.float32) if into is None else into
    full = count // BLOCK
    if full:
        torch.mul(whole[:, :full], steps[:, :full], out=found[:, : full * BLOCK].unflatten(1, (full, BLOCK)))
    if count % BLOCK:
        found[:, full * BLOCK :] = (whole[:, -1] * steps[:, -1])[:, : count % BLOCK]
    return found


@dataclass(frozen=True)
class Segments:
    """The parts of each rank's row of numbers: those that are quantised, and those that are sent as they are.

    Attributes:
        lengths: of the parts, in their order; together a row.
        quantized: whether each of them is. Blocks do not reach over a part's end.
    """

    lengths: tuple[int, ...]
    quantized: tuple[bool, ...]

    def sizes(self, itemsize: int, bits: int) -> list[int]:
        """Return the bytes of each part of a row; `itemsize` of a number that is sent as it is."""
        return [
            packed_bytes(length, bits) if mine else length * itemsize
            for length, mine in zip(self.lengths, self.quantized)
        ]

    def pack(self, rows: Tensor, bits: int) -> Tensor:
        """Return rows [..., sum(lengths)] as bytes [rows, bytes], uint8, part by part."""
        parts = (part.reshape(-1, part.shape[-1]) for part in rows.split(self.lengths, dim=-1))
        packed = []
        for part, mine in zip(parts, self.quantized):
            packed.append(quantize(part, bits) if mine else part.contiguous().view(torch.uint8))
        return torch.cat(packed, dim=1)

    def unpack(self, packed: Tensor, dtype: torch.dtype, bits: int, into: Tensor | None = None) -> Tensor:
        """Return rows again, in `dtype`: what was not quantised has its bits."""
        rows = packed.new_empty((packed.shape[0], sum(self.lengths)), dtype=dtype) if into is None else into
        received = packed.split(self.sizes(dtype.itemsize, bits), dim=1)
        for part, found, mine in zip(rows.split(self.lengths, dim=1), received, self.quantized):
            if mine:
                dequantize(found, part.shape[1], bits, into=part)
            else:
                part.copy_(found.contiguous().view(dtype))
        return rows

    def unpack_sums(self, packed: Tensor, bits: int, ranks: int) -> Tensor:
        """Return the sums over ranks, fp32 [each, sum(lengths)], of what was packed of fp32 rows [ranks x each, ...].

        One part of all rows is in memory as fp32 at a time.
        """
        sums = packed.new_empty((packed.shape[0] // ranks, sum(self.lengths)), dtype=torch.float32)
        received = packed.split(self.sizes(4, bits), dim=1)
        for part, found, mine in zip(sums.split(self.lengths, dim=1), received, self.quantized):
            wide = dequantize(found, part.shape[1], bits) if mine else found.contiguous().view(torch.float32)
            part.copy_(wide.view(ranks, *part.shape).sum(dim=0))
        return sums


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
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: object,
        async_op: bool = False,
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
