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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_moe import platform
from megatron_moe.checkpoint.errors import attempted, gathered, on_rank_zero
from megatron_moe.checkpoint.folder import ENGINE_FORMAT
from megatron_moe.checkpoint.sharded import Shard, written_here
from megatron_moe.checkpoint.step_reader import COMMON, PER_PART, by_itself
from megatron_moe.io.files import write_bytes
from megatron_moe.io.hashing import FileEntry, HashingFile

Buffers = dict[Any, torch.Tensor]
Copy = tuple[torch.Tensor, torch.Tensor]
"""A target and the tensor that is to be copied there."""


@dataclass
class Staged:
    """The tensors of a step that one rank will write; `metadata` and `common` are on rank 0, or of a local step.

    rest: copies that are left to be made, before the training changes their sources. files: those that are written.
    """

    shards: dict[Any, Shard]
    metadata: Metadata | None
    common: bytes | None
    num_bytes: int
    copied: bool
    rest: list[Copy] = field(default_factory=list)
    files: dict[str, HashingFile] = field(default_factory=dict)

    def copy_rest(self) -> None:
        """Make the copies that were left for later; call it in any thread, before the tensors change."""
        if not self.rest:
            return
        with platform.side_stream():
            for target, source in self.rest:
                target.copy_(source, non_blocking=source.is_cuda)
        self.rest = []

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        """Return what an item writes: torch's writer asks its planner, in whose place this stands."""
        shard = self.shards[item.index]
        return by_itself(shard.values.to(shard.dtype))

    @property
    def written_bytes(self) -> int:
        """The bytes that this rank has written so far."""
        return sum(file.tell() for file in list(self.files.values()))


@dataclass
class Written:
    """What a rank has written: where each tensor is stored, and every file with its hash."""

    results: list[WriteResult] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)


def stage(
    shards: Sequence[Shard],
    common: dict[str, Any],
    *,
    buffers: Buffers | None = None,
    steady: Collection[int] = (),
    private: Collection[int] = (),
) -> Staged:
    """Decide which rank writes which part of the shards. Collective; nothing is written.

    Args:
        common: what is no tensor.
        buffers: copy the tensors to host memory, into these where they fit, so that the training may go on while they
            are written; None writes the live tensors. Afterwards it holds the memory that was used: fresh memory would
            cost more than the copying.
        steady: storages, by address, that nothing changes before the optimizer's next update: `Staged.copy_rest` copies
            the tensors in them.
        private: storages that the training does not use, so that they need not be copied.

    Raises:
        SharedError: on every rank: the shards are not the whole tensors, once each.
    """
    own = {MetadataIndex(shard.key, torch.Size(shard.start)): shard for shard in written_here(shards)}
    plans = gathered(*attempted(lambda: _plan(own)), str)
    metadata = on_rank_zero(lambda: _metadata(plans or []))
    rest: list[Copy] = []
    if buffers is not None:
        own, rest = copied(own, buffers, steady, private)
    platform.synchronize()  # what is written or copied from here on is in other threads and on other streams
    # Serialized now: it holds the optimizer's own dictionaries, which the next step changes.
    is_first = torch.distributed.get_rank() == 0
    # An upper bound.
    num_bytes = sum(PER_PART + shard.values.numel() * shard.dtype.itemsize for shard in own.values())
    return Staged(own, metadata, serialized(_plain(common)) if is_first else None, num_bytes, buffers is not None, rest)


def _plan(shards: dict[MetadataIndex, Shard]) -> SavePlan:
    items = []
    for index, shard in shards.items():
        chunk = ChunkStorageMetadata(torch.Size(shard.start), shard.values.shape)
        data = TensorWriteData(chunk, TensorProperties(shard.dtype), torch.Size(shard.whole))
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _metadata(plans: list[SavePlan]) -> Metadata:
    """Return the index of all ranks' plans, once it is sure that they have every element, and each once."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    return planner.create_global_plan(plans)[1]


def staged_alone(shards: Sequence[Shard], common: dict[str, Any], buffers: Buffers, *of: Collection[int]) -> Staged:
    """Return copies of a rank's shards, numbered, that it writes for itself. The arguments are those of `stage`."""
    own, rest = copied(dict(enumerate(shards)), buffers, *of)
    platform.synchronize()
    num_bytes = sum(shard.values.numel() * shard.dtype.itemsize for shard in shards)
    return Staged(own, None, serialized(_plain(common)), num_bytes, True, rest)


Key = TypeVar("Key", MetadataIndex, int)


def copied(
    shards: dict[Key, Shard], buffers: Buffers, steady: Collection[int], private: Collection[int]
) -> tuple[dict[Key, Shard], list[Copy]]:
    """Return the shards with copies in `buffers` of all that is not private, and the copies left for later."""
    copies: dict[Key, Shard] = {}
    used: Buffers = {}
    rest: list[Copy] = []
    for index, shard in shards.items():
        values = shard.values
        at = values.untyped_storage().data_ptr()
        if at not in private:
            kept = buffers.get(index)
            if kept is None or kept.shape != values.shape or kept.dtype != shard.dtype:
                kept = platform.host_memory(values.shape, shard.dtype, pinned=values.is_cuda)
            used[index] = kept
            if at in steady:
                rest.append((kept, values))
            else:
                kept.copy_(values, non_blocking=values.is_cuda)
            values = kept
        copies[index] = replace(shard, values=values)
    buffers.clear()
    buffers.update(used)
    return copies, rest


def write(staged: Staged, folder: Path) -> Written:
    """Write this rank's tensors into the folder, onto the disk. Not collective.

    Raises:
        OSError: the system refused.
    """
    if not staged.shards:
        return Written()
    writer = _HashingWriter(folder, copy_ahead=not staged.copied)
    staged.files = writer.fs.files
    # The writer names a rank's file by the place of its plan.
    plans = [SavePlan([])] * torch.distributed.get_rank()
    plan = writer.prepare_global_plan([*plans, _plan(staged.shards)])[-1]
    with platform.side_stream(), writer.refusals():
        results = writer.write_data(plan, cast(SavePlanner, staged)).value()
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
        file = HashingFile(cast(Path, path))
        self.files[file.path.name] = file
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

    @property
    def checkpoint_id(self) -> Path:
        """The folder as the index has it, where nothing reads it: of pathlib's own type."""
        return Path(*Path(self.path).parts)

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
