"""Writing tensors in the engine's dist_checkpointing format: plan a step's tensors, write and hash them, finish.

The engine's torch_dist format is written by torch's own writer in this process, one file per rank. The engine forks
writers and starts a manager process even for a synchronous save, which costs seconds and waits for ever when a writer
is killed. Other values go into `common.pt`, which both engine releases read (0.19 keeps it inside a tensor
file, which 0.16 cannot read), so steps travel between them.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_moe import platform
from megatron_moe.checkpoint.folder import ENGINE_FORMAT
from megatron_moe.checkpoint.optimizer import Buffers, Copy, Gathered
from megatron_moe.checkpoint.step_reader import COMMON, PER_PART, by_itself
from megatron_moe.engine.dist_checkpointing import save_planner
from megatron_moe.io.files import write_bytes
from megatron_moe.io.hashing import FileEntry, HashingFile


@dataclass
class Staged:
    """The tensors of a step that one rank will write; `metadata` and `common` are on rank 0.

    copied: whether they are copies, which the training does not change once `copy_rest` has been called.
    """

    plan: SavePlan
    data: Data
    metadata: Metadata | None
    common: bytes | None
    num_bytes: int
    copied: bool
    rest: list[Copy] = field(default_factory=list)

    def copy_rest(self) -> None:
        """Make the copies that were left for later; call it in any thread, before the tensors change."""
        if not self.rest:
            return
        with platform.side_stream():
            for target, source in self.rest:
                target.copy_(source, non_blocking=source.is_cuda)
        self.rest = []


@dataclass
class Written:
    """What a rank has written: where each tensor is stored, and every file with its hash."""

    results: list[WriteResult] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)


class Data:
    """The tensors of a plan for torch's writer: the live ones, or copies of them in host memory.

    It stands in for the planner, of which torch's writer calls `resolve_data`. Buffers of the copies are kept from save
    to save: fresh memory would cost more than the copying.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._copies: dict[Any, torch.Tensor | io.BytesIO] | None = None

    def copy(self, items: list[WriteItem], buffers: Buffers, gathered: Gathered, steady: Collection[int]) -> list[Copy]:
        """Copy everything that is not private to the step into `buffers`; return the copies to be made later.

        These are the ones of `steady` storages. Afterwards `buffers` holds the memory that was used.
        """
        self._copies = {}
        used: dict[Any, torch.Tensor] = {}
        rest: list[Copy] = []
        for item in items:
            value = self._planner.resolve_data(item)
            if isinstance(value, torch.Tensor) and (at := value.untyped_storage().data_ptr()) not in gathered.private:
                key, value = (item.index.fqn, item.index.offset), value.detach()
                kept = buffers.get(key)
                if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                    kept = platform.host_memory(value.shape, value.dtype, pinned=value.is_cuda)
                used[key] = kept
                if at in steady:
                    rest.append((used[key], value))
                else:
                    used[key].copy_(value, non_blocking=value.is_cuda)
                value = used[key]
            self._copies[item.index] = value
        platform.synchronize()
        buffers.clear()
        buffers.update(used)
        return rest

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor or the bytes that an item of the plan writes."""
        value = self._planner.resolve_data(write_item) if self._copies is None else self._copies[write_item.index]
        return by_itself(value) if isinstance(value, torch.Tensor) else value


def stage(
    state: dict[str, Any],
    folder: Path,
    *,
    gathered: Gathered,
    buffers: Buffers | None = None,
    steady: Collection[int] = (),
) -> Staged:
    """Decide which rank writes which part of a sharded state dict. Collective; nothing is written.

    Args:
        gathered: the storages that the training does not use, and those that are not filled on this rank.
        buffers: copy the tensors to host memory, into these where they fit, so that the training may go on while they
            are written; None writes the live tensors.
        steady: storages, by address, that nothing changes before the optimizer's next update: `Staged.copy_rest` copies
            the tensors in them.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: the state cannot be saved; on every rank.
    """
    planner, tensors, common = save_planner(state)
    writer = _HashingWriter(folder)
    ranks = _DistWrapper(None, True, 0)
    metadata: Metadata | None = None

    def local_plan() -> SavePlan:
        planner.set_up_planner(tensors, writer.storage_meta(), ranks.is_coordinator)
        plan = planner.create_local_plan()
        # Which rank writes what is the engine's choice, and it may have copied memory that is still to be filled.
        for item in plan.items:
            value, name = planner.resolve_data(item), item.index.fqn
            if not isinstance(value, torch.Tensor) or not value.numel():
                continue
            at = value.untyped_storage().data_ptr()
            if at in gathered.absent:
                raise RuntimeError(f"{name} would be written by a rank that does not have it")
            filled = at in gathered.private or at in steady
            if gathered.rest and name.startswith("optimizer.") and not filled:
                raise RuntimeError(f"{name} would be written before it is gathered")
        return plan

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(ranks.reduce_scatter("plan", local_plan, global_plan))
    data, rest = Data(planner), gathered.rest
    if buffers is not None:
        rest = rest + data.copy(plan.items, buffers, gathered, steady)
    # Serialized now: it holds the optimizer's own dictionaries, which the next step changes.
    shared = serialized(_plain(common)) if ranks.is_coordinator else None
    num_bytes = 0  # an upper bound
    for item in plan.items:
        value = data.resolve_data(item)
        num_bytes += PER_PART + (value.nbytes if isinstance(value, torch.Tensor) else value.getbuffer().nbytes)
    return Staged(plan, data, metadata, shared, num_bytes, buffers is not None, rest)


def write(staged: Staged, folder: Path) -> Written:
    """Write this rank's tensors into the folder, onto the disk. Not collective.

    Raises:
        OSError: the system refused.
    """
    if not staged.plan.items:
        return Written()
    writer = _HashingWriter(folder, copy_ahead=not staged.copied)
    with writer.refusals():
        results = writer.write_data(staged.plan, cast(SavePlanner, staged.data)).value()
    return Written(results, writer.fs.entries())


def finish(staged: Staged, folder: Path, written: list[Written]) -> dict[str, FileEntry]:
    """Write the files that belong to no rank, on rank 0 at the end; return every rank's files and these.

    Raises:
        OSError: the system refused.
    """
    assert staged.metadata is not None and staged.common is not None, "they are on rank 0"
    writer = _HashingWriter(folder)
    with writer.refusals():
        writer.finish(staged.metadata, [part.results for part in written])
    files = writer.fs.entries()
    files[COMMON] = write_bytes(folder / COMMON, staged.common)
    files["metadata.json"] = write_bytes(folder / "metadata.json", json.dumps(ENGINE_FORMAT).encode())
    for part in written:
        files.update(part.files)
    return files


class _HashingFileSystem(FileSystem):
    """A file system for torch's writer that hashes new files while they are written."""

    def __init__(self) -> None:
        self.files: dict[str, HashingFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", "a step is only written here"
        file = HashingFile(Path(path))
        self.files[Path(path).name] = file
        try:
            yield cast(io.IOBase, file)
        finally:
            file.close()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)

    def entries(self) -> dict[str, FileEntry]:
        return {name: file.entry() for name, file in self.files.items()}


class _HashingWriter(FileSystemWriter):
    """A writer of torch's, with one file per rank, on a file system that hashes.

    copy_ahead: on a GPU, tensors are copied to the host while others are written.
    """

    fs: _HashingFileSystem

    def __init__(self, folder: Path, *, copy_ahead: bool = False) -> None:
        ahead: dict[str, Any] = {} if copy_ahead else {"per_thread_copy_ahead": 0}
        # Its files sync themselves, and know then which of them failed.
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=1, **ahead)
        self.fs = _HashingFileSystem()

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Raise the error of the system, and not the one that torch's archive makes of it."""
        try:
            yield
        except Exception:
            for file in self.fs.files.values():
                if file.error is not None:
                    raise OSError(file.error.errno, file.error.strerror, str(file.path)) from None
            raise


def serialized(value: dict[str, Any]) -> bytes:
    """Return what torch.save writes."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def _plain(value: object) -> Any:
    """Return equal values made anew: pickle's bytes depend on which equal strings and tuples are one object."""
    if isinstance(value, dict):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(part) for part in value)
    return sys.intern(value) if type(value) is str else value
