"""A Hugging Face folder into a model that is built: every rank reads what it holds, at any layout.

A rank knows its boxes of the model's tensors, and the table says what each block of them is made of; where the two
overlap, the folder's tensors are read, one piece at a time. Weights are NaN before, so that nothing is written twice
and nothing is left; over all ranks every element is held by someone and every tensor of the folder was used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.checkpoint import dist, origin
from megatron_moe.checkpoint.errors import from_all
from megatron_moe.checkpoint.origin import Origin
from megatron_moe.checkpoint.state import Trained, model_state
from megatron_moe.config import derived
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.architecture import settings_of
from megatron_moe.hf.families import Family
from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.mapping import Mapping, Piece, mapping, require_tensors
from megatron_moe.hf.tensors import TensorReader
from megatron_moe.hf.transforms import elements

ROUND_SECONDS = 10.0
"""After so long the ranks tell each other how far they are: none waits in a collective until it times out."""

# What was done with a tensor of the folder, as rows of a table that is joined over ranks.
_FLAGS = ("used", "widened", "narrowed", "changed", "rounded before")


@dataclass(frozen=True)
class Import:
    """A folder that fits the run, as far as its headers and configuration tell."""

    folder: HFFolder
    family: Family
    table: Mapping
    copies: list[str]
    """Names that the folder holds beside the table, equal to others."""
    dropped: list[str]
    notes: list[str]

    @property
    def state(self) -> dict[str, object]:
        """What every step of the training keeps of this, for an export."""
        return {"family": self.family.name, "copies": self.copies, "dropped": self.dropped}

    def origin(self) -> tuple[Origin, list[str]]:
        """The same with the folder's small files, and what to tell. Called where they are written from: on rank 0."""
        sizes = {name: self.folder.stamps[name].size for name in self.folder.companions}
        files, notes = origin.read(sizes, self.folder.companion, self.folder.path)
        return Origin(self.state, files), notes


class Imported(NamedTuple):
    """What to tell about it, and what was rounded on the way or before: recorded for good."""

    notes: list[str]
    precision_warnings: list[str]


def plan_import(run: Run) -> Import:
    """Hold the folder of `--load-hf` against the run; reads headers and allocates nothing.

    Raises:
        ConfigError: the folder is malformed, of a family that is not supported, or does not hold the run's tensors.
    """
    where = f"--load-hf {run.checkpoint.load_hf}"
    folder = HFFolder.open(Path(run.checkpoint.load_hf or ""), "--load-hf")
    told = settings_of(folder, where)
    table = mapping(run, told.family.names)
    reader = TensorReader(folder)
    held = {name: reader.shape(name) for name in reader.names()}
    copies, dropped = require_tensors(table, held, where)
    return Import(folder, told.family, table, copies, dropped, [*folder.notes, *told.notes])


class _Overlap(NamedTuple):
    """Where a block of the model's tensor meets a box of this rank."""

    values: Tensor
    inside_box: tuple[slice, ...]
    inside_block: tuple[slice, ...]


class _Task(NamedTuple):
    piece: Piece
    overlaps: list[_Overlap]


@torch.no_grad()
def fill(run: Run, source: Import, trained: Trained, tell: Callable[[str], None]) -> Imported:
    """Fill the model, and the optimizer's fp32 weights with it. Collective over all ranks.

    Args:
        tell: is given a line now and then on rank 0, while a large folder is read.

    Raises:
        ConfigError: on every rank: some rank cannot read a tensor, one is not finite, or not all was filled.
    """
    started = time.monotonic()
    shards = dist.shards(model_state(trained))
    for values in (*(shard.values for shard in shards), *(p for chunk in trained.model for p in chunk.parameters())):
        values.fill_(torch.nan)
    filling = _Filling(run, source, shards)
    _rounds(filling, source, tell, started)
    filling.require_coverage(shards, trained)
    # fp32 main weights are copies of the model's; those they were made from are gone.
    trained.optimizer.reload_model_params()
    count = len(filling.names)
    notes = [f"weights from {source.folder.path} ({source.family.name}): {count} tensors, every one used"]
    if widened := filling.flagged("widened"):
        notes.append(f"{_counted(widened)} of {_dtypes(filling, widened)} stand in a wider dtype here, exactly")
    warnings = filling.precision_warnings()
    return Imported([*notes, *warnings], warnings)


def _rounds(filling: _Filling, source: Import, tell: Callable[[str], None], started: float) -> None:
    """Do all of this rank's work; every few seconds the ranks tell each other how it goes."""
    rank, steps = torch.distributed.get_rank(), iter(filling)
    total = sum(from_all(filling.total_bytes))
    while True:
        until, error, finished = time.monotonic() + ROUND_SECONDS, None, True
        cause: Exception | None = None
        try:
            for _ in steps:
                if time.monotonic() > until:
                    finished = False
                    break
        except (ConfigError, OSError) as refused:
            error = str(refused)
        except Exception as failed:
            error, cause = f"{source.folder.path}: {type(failed).__name__}: {failed}", failed
        everyone = from_all((filling.done_bytes, error, finished))
        errors = sorted({found for _, found, _ in everyone if found is not None})
        if errors:
            raise ConfigError("; ".join(errors[:3])) from cause
        done, seconds = sum(count for count, _, _ in everyone), time.monotonic() - started
        if all(complete for _, _, complete in everyone):
            return
        if rank == 0:
            left = seconds * (total - done) / max(done, 1)
            tell(f"reading {source.folder.path}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {left:.0f} s left")


class _Filling:
    """This rank's part of the work. Iterating does it, piece by piece."""

    def __init__(self, run: Run, source: Import, shards: Sequence[dist.Shard]) -> None:
        self.reader = TensorReader(source.folder)
        self.source, self.table = source, source.table
        self.run_dtype = derived.params_dtype_name(run)
        self.names = [name for name in self.reader.names() if name not in source.dropped]
        self._number = {name: number for number, name in enumerate(self.names)}
        self.flags = torch.zeros(len(_FLAGS), len(self.names), dtype=torch.uint8)
        self.tasks = _tasks(self.table, shards)
        ranks = torch.distributed.get_world_size()
        self.copies = source.copies[torch.distributed.get_rank() :: ranks]
        self.done_bytes = 0
        self.total_bytes = sum(self._bytes(name) for task in self.tasks for name in task.piece.hf)
        self.total_bytes += sum(self._bytes(name) for name in self.copies)

    def _bytes(self, name: str) -> int:
        stored = (self.source.folder.tensors[source] for source in self.reader.sources(name))
        return sum(tensor.end - tensor.begin for tensor in stored)

    def __iter__(self) -> Iterator[None]:
        for task in self.tasks:
            self._write(task)
            yield
        for name in self.copies:
            other = self.table.copies[name]
            if not torch.equal(self._read(name), self._read(other)):
                raise ConfigError(
                    f"{self.source.folder.path}: {name} differs from {other}: the model has one tensor for both, so "
                    "that one of them would be lost"
                )
            yield

    def _read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        # Weights in fp8 times their scales are rounded to bfloat16, or not at all where they go into fp32.
        tensor = self.reader.read(name, torch.float32 if dtype == torch.float32 else None)
        self._flag("used", name)
        self.done_bytes += self._bytes(name)
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"{self.source.folder.path}: {name} holds values that are NaN or infinite")
        return tensor

    def _flag(self, flag: str, name: str) -> None:
        self.flags[_FLAGS.index(flag), self._number[name]] = 1

    def _write(self, task: _Task) -> None:
        piece, dtype = task.piece, task.overlaps[0].values.dtype
        block = piece.transform.to_native([self._cast(name, dtype, piece.fp32) for name in piece.hf])
        for values, inside_box, inside_block in task.overlaps:
            target = values[inside_box]
            if not bool(target.isnan().all()):
                raise ConfigError(f"{self.source.folder.path}: {piece.key} would be written twice, from {piece.hf[0]}")
            target.copy_(block[inside_block])

    def _cast(self, name: str, dtype: torch.dtype, fp32: bool) -> Tensor:
        tensor = self._read(name, dtype)
        if fp32:
            assert dtype == torch.float32, f"{name} is fp32 state"
            if tensor.dtype != dtype:
                self._flag("rounded before", name)
        if tensor.dtype == dtype:
            return tensor
        cast = tensor.to(dtype)
        if torch.promote_types(tensor.dtype, dtype) == dtype:
            self._flag("widened", name)
            return cast
        self._flag("narrowed", name)
        if not bool(cast.isfinite().all()):
            raise ConfigError(
                f"{self.source.folder.path}: {name} holds {float(tensor.abs().max()):.3g}, more than {dtype} can hold; "
                "train with --bf16, or in fp32"
            )
        if not torch.equal(cast.to(tensor.dtype), tensor):
            self._flag("changed", name)
        return cast

    def require_coverage(self, shards: Sequence[dist.Shard], trained: Trained) -> None:
        """Nothing left over anywhere. Collective.

        Raises:
            ConfigError: on every rank.
        """
        path, device = self.source.folder.path, platform.device()
        joined = self.flags.to(device)
        torch.distributed.all_reduce(joined, op=torch.distributed.ReduceOp.MAX)
        self.flags = joined.cpu()
        keys = {key: number for number, key in enumerate(self.table.shapes)}
        counts = torch.zeros(len(keys), dtype=torch.int64)
        wrong = [
            f"{shard.key} of shape {list(shard.whole)} is not in the table"
            for shard in shards
            if self.table.shapes.get(shard.key) != shard.whole
        ]
        for shard in shards:
            if shard.is_main and shard.key in keys:
                counts[keys[shard.key]] += shard.values.numel()
        held = counts.to(device)
        torch.distributed.all_reduce(held)
        wrong += [
            f"the ranks hold {count} elements of {key}, which has {elements(self.table.shapes[key])}"
            for key, count in zip(keys, held.tolist())
            if count != elements(self.table.shapes[key])
        ]
        used = set(self.flagged("used"))
        wrong += [f"nothing was made of {name}" for name in self.names if name not in used]
        wrong += [f"{shard.key} was not filled" for shard in shards if bool(shard.values.isnan().any())]
        parameters = ((name, value) for chunk in trained.model for name, value in chunk.named_parameters())
        wrong += [f"{name} was not filled" for name, value in parameters if bool(value.isnan().any())]
        everywhere = sorted({line for lines in from_all(wrong[:10]) for line in lines})
        if everywhere:
            raise ConfigError(f"{path}: not all was converted: {'; '.join(everywhere[:10])}")

    def flagged(self, flag: str) -> list[str]:
        """Names that any rank has flagged, once `require_coverage` has joined them."""
        return [name for name, on in zip(self.names, self.flags[_FLAGS.index(flag)].tolist()) if on]

    def precision_warnings(self) -> list[str]:
        """What was lost on the way, and what had been lost before."""
        path, found = self.source.folder.path, []
        if narrowed := self.flagged("narrowed"):
            found.append(
                f"PRECISION WARNING: {_counted(narrowed)} of {path} of {_dtypes(self, narrowed)} were rounded to "
                f"{self.run_dtype}, of which {len(self.flagged('changed'))} were changed by it; a run without --bf16 "
                "and --fp16, or --keep-fp32, keeps every digit"
            )
        if before := self.flagged("rounded before"):
            found.append(
                f"PRECISION WARNING: {_counted(before)} of {path} ({before[0]}, ...), must be torch.float32 and is "
                f"{_dtypes(self, before)}: rounded before it was saved; loaded as it is and kept in fp32 from now on"
            )
        return found


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _dtypes(filling: _Filling, names: Sequence[str]) -> str:
    return " and ".join(sorted({str(filling.reader.dtype(name)).removeprefix("torch.") for name in names}))


def _tasks(table: Mapping, shards: Sequence[dist.Shard]) -> list[_Task]:
    """What this rank has to read, in the order of the table."""
    of_key: dict[str, list[dist.Shard]] = {}
    for shard in shards:
        of_key.setdefault(shard.key, []).append(shard)
    tasks = []
    for piece in table.pieces:
        found = [_overlap(piece, shard) for shard in of_key.get(piece.key, ())]
        overlaps = [overlap for overlap in found if overlap is not None]
        if overlaps:
            tasks.append(_Task(piece, overlaps))
    return tasks


def _overlap(piece: Piece, shard: dist.Shard) -> _Overlap | None:
    inside_box, inside_block = [], []
    for start, extent, first, size in zip(
        piece.start, piece.transform.native_shape, shard.start, shard.values.shape, strict=True
    ):
        low, high = max(start, first), min(start + extent, first + size)
        if low >= high:
            return None
        inside_box.append(slice(low - first, high - first))
        inside_block.append(slice(low - start, high - start))
    return _Overlap(shard.values, tuple(inside_box), tuple(inside_block))
