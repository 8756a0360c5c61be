"""The files of a step, written block by block without a process group: one data file per layer, the index at the end.

The engine's torch_dist format, as `checkpoint/writer.py` has torch write it from a model: each part of a tensor is an
archive of its own in a data file, and `.metadata` says where. What a block is, is free: any layout loads any cut.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_moe.checkpoint import folder, index, manifest, pickles
from megatron_moe.checkpoint.pickles import by_itself
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import new_file, write_bytes
from megatron_moe.io.hashing import FileEntry, HashingFile, sha256_of_file

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.")


class StoredPart(NamedTuple):
    """A block of a tensor in a data file; offset and length in bytes. Plain values, for a journal."""

    key: str
    start: Shape
    shape: Shape
    file: str
    offset: int
    length: int


class DataFile:
    """One `__0_N.distcp`: blocks are appended as they come."""

    def __init__(self, file: HashingFile) -> None:
        self._file, self._name = file, file.path.name
        self.parts: list[StoredPart] = []

    def add(self, key: str, start: Shape, block: Tensor) -> None:
        """Write a block of a tensor."""
        offset = self._file.tell()
        torch.save(by_itself(block.contiguous()), cast(IO[bytes], self._file))
        self.parts.append(StoredPart(key, start, tuple(block.shape), self._name, offset, self._file.tell() - offset))

    def add_value(self, key: str, content: bytes) -> StoredPart:
        """Write a value that is no tensor, as it was pickled."""
        part = StoredPart(key, (), (), self._name, self._file.tell(), len(content))
        self._file.write(content)
        return part


def data_name(number: int) -> str:
    """The name of a data file."""
    return f"__0_{number}.distcp"


def place_of(key: str) -> tuple[bool, int, int]:
    """Where a tensor belongs in the canonical cut: tensors of one place share a file, and files are in this order.

    Weights before the optimizer; what stands before the layers, each layer, each depth of further prediction, the end.
    """
    optimizer = key.startswith("optimizer.")
    found = _LAYER.search(key)
    if found is not None:
        return optimizer, 1 if found.group(1) == "decoder" else 2, int(found.group(2))
    return optimizer, 0, 0


def write_index(
    step: Path, tensors: dict[str, tuple[str, Shape]], parts: Iterable[StoredPart], values: Any
) -> FileEntry:
    """Write `.metadata`: the same bytes for the same content.

    Args:
        tensors: dtype (without `torch.`) and shape by key, in order. values: parts that are no tensors.
    """
    chunks: dict[str, list[StoredPart]] = {}
    for part in parts:
        chunks.setdefault(part.key, []).append(part)
    listed: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, (dtype, shape) in tensors.items():
        key = sys.intern(name)  # a pickle's bytes depend on which equal strings are one object
        boxes = [ChunkStorageMetadata(torch.Size(part.start), torch.Size(part.shape)) for part in chunks[name]]
        properties = TensorProperties(getattr(torch, dtype))
        listed[key] = TensorStorageMetadata(properties, torch.Size(shape), boxes)
        for number, part in enumerate(chunks[name]):
            storage[MetadataIndex(key, part.start, number)] = _info(part)
    for part in values:
        key = sys.intern(part.key)
        listed[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _info(part)
    return write_bytes(step / index.NAME, pickle.dumps(Metadata(listed, None, storage), protocol=4))


def _info(part: StoredPart) -> _StorageInfo:
    return _StorageInfo(sys.intern(part.file), part.offset, part.length)


def write_common(step: Path, plain: dict[str, Any]) -> dict[str, FileEntry]:
    """Write what belongs to no tensor: the engine's file of plain values, and the mark of its format."""
    content = io.BytesIO()
    torch.save(plain, content)
    return {
        pickles.COMMON: write_bytes(step / pickles.COMMON, content.getvalue()),
        "metadata.json": write_bytes(step / "metadata.json", json.dumps(folder.ENGINE_FORMAT).encode()),
    }


def copy_file(source: Path, target: Path, known: FileEntry) -> FileEntry:
    """Copy a file of a step onto the disk, hashed.

    Raises:
        ConfigError: it is not what the step's manifest knows.
    """
    with open(source, "rb") as content, new_file(target) as file:
        while block := content.read(1 << 22):
            file.write(block)
    if file.entry() != known:
        raise ConfigError(f"{source}: changed while it was read; nothing was published")
    return known


def seal(root: Path, iteration: int, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Make a folder of checkpoints of the one step in it: manifest, owner's mark, pointer. Returns all of its files.

    Raises:
        OSError: the step does not hold exactly these files.
    """
    step = folder.step_folder(root, iteration)
    (step / manifest.NAME).unlink(missing_ok=True)
    manifest.write(step, iteration, files)
    if defect := manifest.structure_defect(step):
        raise OSError(f"{step}: {defect}")
    result = {f"{step.name}/{name}": entry for name, entry in files.items()}
    path = step / manifest.NAME
    result[f"{step.name}/{path.name}"] = FileEntry(bytes=path.stat().st_size, sha256=sha256_of_file(path))
    result[folder.OWNER] = write_bytes(root / folder.OWNER, b"")
    result[folder.LATEST] = write_bytes(root / folder.LATEST, f"{iteration}\n".encode())
    return result
