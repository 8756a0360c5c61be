"""Write the files of a native step block by block, without a process group: a data file per layer, then the index.

The format is the engine's torch_dist, which `checkpoint/writer.py` has torch write from a model: each part of a tensor
is an archive of its own in a data file, and `.metadata` says where it is. A tensor may be cut into any blocks, and any
layout loads them.
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
    """A block of a tensor in a data file, as plain values for a journal; offset and length are in bytes."""

    key: str
    start: Shape
    shape: Shape
    file: str
    offset: int
    length: int


class DataFile:
    """A data file `__0_N.distcp` to which blocks are appended."""

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
    """Return the name of data file `number`."""
    return f"__0_{number}.distcp"


def file_order(key: str) -> tuple[bool, int, int]:
    """Return a tensor's sort key: tensors with the same key share a file, and files are in this order.

    Weights come before the optimizer; then what is outside of the layers, each layer, each depth of multi-token
    prediction.
    """
    optimizer = key.startswith("optimizer.")
    found = _LAYER.search(key)
    if found is not None:
        return optimizer, 1 if found.group(1) == "decoder" else 2, int(found.group(2))
    return optimizer, 0, 0


def write_index(
    step: Path, tensors: dict[str, tuple[str, Shape]], parts: Iterable[StoredPart], values: Any
) -> FileEntry:
    """Write `.metadata`, with the same bytes for the same content.

    Args:
        step: the step's folder.
        tensors: dtype (without `torch.`) and shape by key, in order.
        parts: blocks of the tensors.
        values: parts that are no tensors.
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
    """Write the engine's file of plain values, and the one that names its format."""
    content = io.BytesIO()
    torch.save(plain, content)
    return {
        pickles.COMMON: write_bytes(step / pickles.COMMON, content.getvalue()),
        "metadata.json": write_bytes(step / "metadata.json", json.dumps(folder.ENGINE_FORMAT).encode()),
    }


def copy_file(source: Path, target: Path, known: FileEntry) -> FileEntry:
    """Copy a file of a step and check its hash.

    Raises:
        ConfigError: it is not what the step's manifest says.
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
