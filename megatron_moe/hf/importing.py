"""Imports a Hugging Face folder into a model that has been built; every rank reads its part, at any layout.

A rank knows its boxes of the model's tensors, and the mapping says what each block of them is made of; where the two
overlap, the folder's tensors are read, one piece at a time. Weights are NaN before, which shows what is written twice
or not at all. In the end it is checked that the ranks together have every element of the model, and that every tensor
of the folder was used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.checkpoint.errors import all_gather_object, in_rounds
from megatron_moe.checkpoint.sharded import Shard
from megatron_moe.checkpoint.state import TrainState, model_shards
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.config import Import
from megatron_moe.hf.folder import ALLOW
from megatron_moe.hf.mapping import MappedBlock, Mapping
from megatron_moe.hf.tensors import TensorReader
from megatron_moe.hf.weight_check import WeightCheck, refusal
from megatron_moe.model.fully_sharded import local

# What was done with a tensor of the folder: the rows of a table that is united over ranks.
_FLAGS = ("used", "widened", "narrowed", "changed", "rounded before", "suspicious")


class Imported(NamedTuple):
    """Notes on an import, and warnings about what was rounded by it or before it, which checkpoints record."""

    notes: list[str]
    precision_warnings: list[str]


class _Overlap(NamedTuple):
    """The overlap of a block of a tensor with a box of this rank, whose numbers are of the dtype."""

    values: Tensor
    dtype: torch.dtype
    inside_box: tuple[slice, ...]
    inside_block: tuple[slice, ...]


@torch.no_grad()
def fill(run: Run, source: Import, trained: TrainState, report: Callable[[str], None]) -> Imported:
    """Fill the model and the optimizer's fp32 weights. Collective over all ranks.

    Args:
        report: is called on rank 0 with a line on the progress, every few seconds while a large folder is read.

    Raises:
        ConfigError: raised on every rank if one cannot read a tensor, a tensor is not finite, or not all was filled.
    """
    shards = model_shards(trained)
    weights = (local(parameter) for chunk in trained.model for parameter in chunk.parameters())
    for values in (*(shard.values for shard in shards), *weights):
        values.fill_(torch.nan)
    filling = _Filling(run, source, shards)
    total = sum(all_gather_object(filling.total_bytes))
    for done, seconds in in_rounds(filling, lambda: filling.done_bytes, source.folder.path):
        if torch.distributed.get_rank() == 0 and done < total:
            left = seconds * (total - done) / max(done, 1)
            report(f"reading {source.folder.path}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {left:.0f} s left")
    filling.require_coverage(shards, trained)
    # fp32 main weights are copies of the model's, which have been replaced.
    trained.optimizer.reload_model_params()
    head = f"weights from {source.folder.path} ({source.family.name})"
    notes = [f"{head}: {len(filling.names)} tensors, every one used"]
    if widened := filling.flagged("widened"):
        notes.append(f"{_counted(widened)} of {_dtypes(filling, widened)} are in a wider dtype here, exactly")
    if suspicious := filling.flagged("suspicious"):
        notes.append(f"WARNING: {_counted(suspicious)} ({suspicious[0]}, ...) may be damaged, taken as {ALLOW} says")
    warnings = filling.precision_warnings()
    return Imported([*notes, *warnings], warnings)


class _Filling:
    """The work of this rank, which iteration does piece by piece."""

    def __init__(self, run: Run, source: Import, shards: Sequence[Shard]) -> None:
        self.reader = TensorReader(source.folder)
        self.source, self.table = source, source.table
        self.weights = WeightCheck(self.reader, source.table)
        self.allow_suspicious = run.checkpoint.allow_suspicious_weights
        self.run_dtype = run.derived.params_dtype_name
        self.names = [name for name in self.reader.names() if name not in source.dropped]
        self._number = {name: number for number, name in enumerate(self.names)}
        self.flags = torch.zeros(len(_FLAGS), len(self.names), dtype=torch.uint8)
        self.tasks = _tasks(self.table, shards)
        ranks = torch.distributed.get_world_size()
        self.copies = source.copies[torch.distributed.get_rank() :: ranks]
        self.done_bytes = 0
        self.total_bytes = sum(self._bytes(name) for piece, _ in self.tasks for name in piece.hf)
        self.total_bytes += sum(self._bytes(name) for name in self.copies)

    def _bytes(self, name: str) -> int:
        stored = (self.source.folder.tensors[source] for source in self.reader.sources(name))
        return sum(tensor.end - tensor.begin for tensor in stored)

    def __iter__(self) -> Iterator[None]:
        for piece, overlaps in self.tasks:
            self._write(piece, overlaps)
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
        tensor = self.weights.read(name, torch.float32 if dtype == torch.float32 else None)
        self._flag("used", name)
        self.done_bytes += self._bytes(name)
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"{self.source.folder.path}: {name} contains values that are NaN or infinite")
        if doubt := self.weights.doubt(name, tensor):
            if not self.allow_suspicious:
                raise refusal(doubt)
            self._flag("suspicious", name)
        return tensor

    def _flag(self, flag: str, name: str) -> None:
        self.flags[_FLAGS.index(flag), self._number[name]] = 1

    def _write(self, piece: MappedBlock, overlaps: list[_Overlap]) -> None:
        path, dtype, tensors = self.source.folder.path, overlaps[0].dtype, []
        for name in piece.hf:
            tensor = self._read(name, dtype)
            if piece.fp32:
                assert dtype == torch.float32, f"{name} is fp32 state"
                if tensor.dtype != dtype:
                    self._flag("rounded before", name)
            cast = tensor.to(dtype)
            tensors.append(cast)
            if tensor.dtype == dtype:
                continue
            if torch.promote_types(tensor.dtype, dtype) == dtype:
                self._flag("widened", name)
                continue
            self._flag("narrowed", name)
            if not bool(cast.isfinite().all()):
                raise ConfigError(
                    f"{path}: {name} contains {float(tensor.abs().max()):.3g}, more than {dtype} can hold; train with "
                    "--bf16, or in fp32"
                )
            if not torch.equal(cast.to(tensor.dtype), tensor):
                self._flag("changed", name)
        block = piece.transform.to_native(tensors)
        for values, _, inside_box, inside_block in overlaps:
            target = values[inside_box]
            if not bool(target.isnan().all()):
                raise ConfigError(f"{path}: {piece.key} would be written twice, from {piece.hf[0]}")
            target.copy_(block[inside_block])

    def require_coverage(self, shards: Sequence[Shard], trained: TrainState) -> None:
        """Check over all ranks that everything was filled and used. Collective.

        Raises:
            ConfigError: raised on every rank if something was not.
        """
        path, device = self.source.folder.path, platform.device()
        united = self.flags.to(device)
        torch.distributed.all_reduce(united, op=torch.distributed.ReduceOp.MAX)
        self.flags = united.cpu()
        keys = {key: number for number, key in enumerate(self.table.shapes)}
        counts = torch.zeros(len(keys), dtype=torch.int64)
        wrong, unfilled = [], []
        for shard in shards:
            if self.table.shapes.get(shard.key) != shard.whole:
                wrong.append(f"{shard.key} of shape {list(shard.whole)} is not in the table")
            if bool(shard.values.isnan().any()):
                unfilled.append(f"{shard.key} was not filled")
            if shard.is_first and shard.key in keys:
                counts[keys[shard.key]] += shard.values.numel()
        total = counts.to(device)
        torch.distributed.all_reduce(total)
        for key, count in zip(keys, total.tolist()):
            wanted = math.prod(self.table.shapes[key])
            if count != wanted:
                wrong.append(f"the ranks have {count} elements of {key}, which has {wanted}")
        used = set(self.flagged("used"))
        wrong += [f"{name} was not used" for name in self.names if name not in used]
        for chunk in trained.model:
            for name, value in chunk.named_parameters():
                if bool(local(value).isnan().any()):
                    unfilled.append(f"{name} was not filled")
        wrong += unfilled
        everywhere = sorted({line for lines in all_gather_object(wrong[:10]) for line in lines})
        if everywhere:
            raise ConfigError(f"{path}: not all was converted: {'; '.join(everywhere[:10])}")
        # No two experts of a layer may be equal, though ranks of their own may have read them.
        known = self.weights.fingerprints
        united = torch.tensor([known.get(name, -1) for name in self.names], device=platform.device())
        torch.distributed.all_reduce(united, op=torch.distributed.ReduceOp.MAX)
        doubts = self.weights.equal_experts({name: n for name, n in zip(self.names, united.tolist()) if n >= 0})
        for name, doubt in doubts.items():
            if not self.allow_suspicious:
                raise refusal(doubt)
            self._flag("suspicious", name)

    def flagged(self, flag: str) -> list[str]:
        """Return the names that any rank has flagged; `require_coverage` has to be called first."""
        return [name for name, on in zip(self.names, self.flags[_FLAGS.index(flag)].tolist()) if on]

    def precision_warnings(self) -> list[str]:
        """Return warnings about precision that was lost in the import, or before it."""
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


def _tasks(table: Mapping, shards: Sequence[Shard]) -> list[tuple[MappedBlock, list[_Overlap]]]:
    """Return what this rank has to read, in the order of the table."""
    of_key: dict[str, list[Shard]] = {}
    for shard in shards:
        of_key.setdefault(shard.key, []).append(shard)
    tasks = []
    for piece in table.pieces:
        overlaps = []
        for shard in of_key.get(piece.key, ()):
            inside_box, inside_block = [], []
            for start, extent, first, size in zip(
                piece.start, piece.transform.native_shape, shard.start, shard.values.shape, strict=True
            ):
                low, high = max(start, first), min(start + extent, first + size)
                inside_box.append(slice(low - first, high - first))
                inside_block.append(slice(low - start, high - start))
            if all(along.start < along.stop for along in inside_box):
                overlaps.append(_Overlap(shard.values, shard.dtype, tuple(inside_box), tuple(inside_block)))
        if overlaps:
            tasks.append((piece, overlaps))
    return tasks
