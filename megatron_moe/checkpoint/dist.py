"""Reading a step's tensors into the shards of all ranks, each byte on one rank of those that need it.

What one rank alone holds it reads by itself. Of what several data-parallel ranks hold, each reads an equal share, piece
by piece, and they exchange the pieces: what a load takes besides the state is bounded, however large that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.checkpoint.errors import all_gather_object, in_rounds
from megatron_moe.checkpoint.sharded import Shard, elements, share
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.parallel.groups import host_group

PIECE_BYTES = 32 * 2**20
"""What a rank reads or sends at once."""


def opened(step: Path) -> StepReader:
    """Return a reader of a step, whose pickles were read with an allow-list. Collective: all ranks raise or none.

    Raises:
        ConfigError: naming the file and what it wanted to import, or how it is damaged.
    """
    reader, refused = None, set[str]()
    try:
        reader = StepReader(step)
    except ConfigError as error:
        refused = {str(error)}
    if everywhere := _agreed(refused):
        raise ConfigError("; ".join(everywhere))
    assert reader is not None
    return reader


def require_all(
    reader: StepReader,
    shards: Sequence[Shard],
    sources: Mapping[str, str],
    *,
    allow_unread: tuple[str, ...],
    fp32_state: frozenset[str],
) -> dict[str, torch.dtype]:
    """Check that a step has what is asked for, and that some rank asks for all that it has. Collective.

    Args:
        sources: key of a shard -> the key to read it from, an fp32 tensor whose values are then rounded.
        allow_unread: what the keys begin with that nobody need ask for.
        fp32_state: keys of tensors that are fp32 here whatever they were saved as: they are read and widened.

    Returns:
        The dtype of each tensor of `fp32_state` (of any rank) that was saved in another one.

    Raises:
        ConfigError: keys, shapes or dtypes do not match; all of them are listed. The same on every rank.
    """
    saved = reader.index.tensors
    numbers = {key: number for number, key in enumerate(sorted(saved))}
    wanted, lacking = torch.zeros(len(saved), dtype=torch.uint8), set[str]()
    for shard in shards:
        key = sources.get(shard.key, shard.key)
        if key in numbers:
            wanted[numbers[key]] = 1
        else:
            lacking.add(key)
    torch.distributed.all_reduce(wanted, torch.distributed.ReduceOp.MAX, group=host_group())
    unread = [key for key, number in numbers.items() if not (wanted[number] or key.startswith(allow_unread))]
    absent = _agreed(lacking)
    if absent or unread:
        lines = [f"not in the checkpoint: {key}" for key in absent]
        lines += [f"in the checkpoint, but not in the model: {key}" for key in unread]
        raise ConfigError(listing(f"{reader.step}: does not hold the tensors of this model:", lines))
    shapes, casts = set(), set()
    for shard in shards:
        key = sources.get(shard.key, shard.key)
        there, here = saved[key].shape, shard.whole
        if shard.is_padded:  # the first axis may differ
            there, here = there[1:], here[1:]
        if there != here:
            shapes.add(f"{key}: saved as {list(saved[key].shape)}, wanted as {list(shard.whole)}")
        dtype = torch.float32 if shard.key in sources else shard.dtype
        if reader.dtype(key) != dtype and shard.key not in fp32_state:
            casts.add(f"{key}: saved as {reader.dtype(key)}, wanted as {dtype}")
    if found := _agreed(shapes):
        raise ConfigError(listing(f"{reader.step}: tensors of this model have other shapes:", found))
    if found := _agreed(casts):
        head = (
            f"{reader.step}: weights are never cast silently, and these have another dtype (--bf16, --fp16 and "
            "--keep-fp32 decide it):"
        )
        raise ConfigError(listing(head, found))
    rounded = {key for key in fp32_state if reader.dtype(key) != torch.float32}
    return {key: reader.dtype(key) for key in _agreed(rounded)}


@torch.no_grad()
def read(reader: StepReader, shards: Sequence[Shard], sources: Mapping[str, str]) -> None:
    """Read a step into shards. Collective over all ranks.

    What several ranks hold is read first, and the rest in its order: shards may share memory.

    Args:
        sources: see `require_all`.

    Raises:
        ConfigError: on every rank: a part cannot be read, or a number is too large for its dtype.
    """
    reading = _Reading(reader, sources)
    shared: dict[tuple[ProcessGroup, torch.dtype], list[Shard]] = {}
    alone: list[Shard] = []
    for shard in shards:
        if shard.group is None:
            alone.append(shard)
        else:
            shared.setdefault((shard.group, reading.stored_dtype(shard)), []).append(shard)
    failure: Exception | None = None
    sizes = [0]
    for (group, dtype), of_group in shared.items():
        numel = sum(shard.values.numel() for shard in of_group)
        sizes.append(exchanged_numel(numel, group.size(), dtype.itemsize) * dtype.itemsize)
    sent, received = (_memory(max(sizes), platform.device()) for _ in range(2))
    memory = [sent if sent.is_cpu else _memory(max(sizes), "cpu"), sent, received]
    for (group, dtype), of_group in shared.items():
        failure = reading.exchange(of_group, group, [part.view(dtype) for part in memory], failure)
    del sent, received, memory
    if errors := _agreed(set() if failure is None else {str(failure)}):
        raise ConfigError("; ".join(errors[:3])) from failure
    for _ in in_rounds(reading.alone(alone), lambda: 0, reader.step):
        pass
    if found := _agreed({f"{key}: {largest:g}" for key, largest in reading.too_large.items()}):
        head = f"--load {reader.step}: weights are beyond the largest number of their dtype (fp16: 65504); use --bf16 "
        raise ConfigError(listing(f"{head}or fp32:", found))


def _memory(num_bytes: int, device: torch.device | str) -> Tensor:
    return torch.empty(-(-num_bytes // 8), dtype=torch.int64, device=device)


class _Reading:
    """What this rank reads of a step, and does with what others have read.

    too_large: weights with a number that is too large for their dtype, and the largest one.
    """

    def __init__(self, reader: StepReader, sources: Mapping[str, str]) -> None:
        self._reader, self._sources = reader, sources
        self.too_large: dict[str, float] = {}

    def alone(self, shards: Sequence[Shard]) -> Iterator[None]:
        """Read shards that this rank holds alone, piece by piece."""
        sizes = [shard.values.numel() * self.stored_dtype(shard).itemsize for shard in shards]
        memory = _memory(min(max(sizes, default=0), PIECE_BYTES), "cpu")
        for shard in shards:
            place = memory.view(self.stored_dtype(shard))
            numel, length = shard.values.numel(), place.numel()
            for begin in range(0, numel, max(length, 1)):
                for piece in elements([shard], begin, min(begin + length, numel)):
                    values = place[: piece.values.numel()].view(piece.values.shape)
                    self._read(piece, values)
                    self._put(piece, values)
                yield

    def exchange(
        self, shards: Sequence[Shard], group: ProcessGroup, memory: Sequence[Tensor], failure: Exception | None
    ) -> Exception | None:
        """Fill shards that all ranks of a group hold, of which each reads its share. Collective over the group.

        Args:
            memory: for what is read, on the host, sent and received, of the dtype that is stored.
            failure: what went wrong before; this rank then takes part without reading.

        Returns:
            What has gone wrong on this rank: the others do not wait for it.
        """
        numel, ranks = sum(shard.values.numel() for shard in shards), group.size()
        shares = [share(numel, ranks, rank) for rank in range(ranks)]
        length = exchanged_numel(numel, ranks, memory[0].itemsize)
        read_here, sent, received = (part[:length] for part in memory)

        def pieces(rank: int, first: int, values: Tensor) -> Iterator[tuple[Shard, Tensor]]:
            begin, end = shares[rank]
            done = 0
            for piece in elements(shards, begin + first, min(begin + first + length, end)):
                count = piece.values.numel()
                yield piece, values[done : done + count].view(piece.values.shape)
                done += count

        for first in range(0, -(-numel // ranks), length):
            try:
                for piece, place in pieces(group.rank(), first, read_here) if failure is None else ():
                    self._read(piece, place)
            except (ConfigError, OSError) as error:
                failure = error
            if not sent.is_cpu:
                sent.copy_(read_here)
            # Not gathered: gloo would take the memory of all pieces once more.
            for rank, (begin, end) in enumerate(shares):
                count = min(length, end - begin - first)
                if count <= 0:
                    continue
                values = sent if rank == group.rank() else received
                torch.distributed.broadcast(values[:count], torch.distributed.get_global_rank(group, rank), group=group)
                for piece, place in pieces(rank, first, values):
                    self._put(piece, place)
        return failure

    def stored_dtype(self, shard: Shard) -> torch.dtype:
        """Return the dtype in which a step has a shard's tensor."""
        return self._reader.dtype(self._sources.get(shard.key, shard.key))

    def _read(self, shard: Shard, values: Tensor) -> None:
        """Read a shard into host memory of its shape and of the dtype that is stored."""
        key = self._sources.get(shard.key, shard.key)
        if shard.is_padded:
            rows = max(self._reader.index.tensors[key].shape[0] - shard.start[0], 0)
            values[rows:] = 0
            values = values[:rows]
        if values.numel():
            self._reader.read(key, shard.start, tuple(values.shape), values)

    def _put(self, shard: Shard, stored: Tensor) -> None:
        values = stored.to(shard.dtype)
        if shard.dtype != stored.dtype and bool((values.isinf() & stored.isfinite()).any()):
            largest = stored[stored.isfinite()].abs().max().item()
            self.too_large[shard.key] = max(largest, self.too_large.get(shard.key, 0.0))
        shard.values.copy_(values)


def exchanged_numel(numel: int, ranks: int, width: int) -> int:
    """Return how many of its share of `numel` elements, of so many bytes each, a rank sends at once."""
    return max(min(PIECE_BYTES // width, -(-numel // ranks)), 1)


def _agreed(found: set[str]) -> list[str]:
    """Return the union over ranks, sorted, so that all of them raise or none."""
    return sorted(set().union(*all_gather_object(found)))
