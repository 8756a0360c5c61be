"""The index of a step, `.metadata`: where each part of each tensor is stored. Read under restriction; no torch.

torch writes this file as a pickle, and a pickle runs code when it is read without restriction, as the engine reads it.
Here it is read first, into plain records: an inert stand-in replaces every class that belongs in it, and everything
else is refused. Then every value is checked, so that the engine afterwards reads sizes, offsets and the names of files
that the manifest lists.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_moe.checkpoint.manifest import NAME as MANIFEST
from megatron_moe.io.hashing import FileEntry

NAME = ".metadata"
LARGEST = 2 * 2**30
"""The largest index that is read, in bytes; one of a million tensors is a tenth of it."""
LARGEST_VALUE = 256 * 2**20
"""The largest value other than a tensor that is read, in bytes."""

_DATA = re.compile(r"__\d+_\d+\.distcp", re.ASCII)
_OTHERS = re.compile(
    r"\.metadata|metadata\.json|common\.pt|config\.json|state\.json|rng/rank_\d{5,}\.(pt|safetensors)|hf/[^/]+",
    re.ASCII,
)
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
)


class UntrustedError(ValueError):
    """A step is refused because its files are damaged or harmful."""


@dataclass(frozen=True)
class StoredBytes:
    """The location of a pickled value or of a part of a tensor; offset and length in bytes."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor: its first element, its extent along every axis, and where it is stored."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: StoredBytes


@dataclass(frozen=True)
class Tensor:
    """A whole tensor: its type without `torch.`, its shape, and parts that fill it without overlap."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True)
class StepIndex:
    """Every tensor of a step by its key, and every value that is not a tensor."""

    tensors: dict[str, Tensor]
    values: dict[str, StoredBytes]


def read(
    step: Path, files: Mapping[str, FileEntry], *, listed_in: str = MANIFEST, with_plans: bool = False
) -> StepIndex:
    """Read the index of a step and check it against the files of its manifest.

    Args:
        files: sizes of the files, by name.
        listed_in: what lists them, for messages.
        with_plans: allow the plans of its writers next to the index, as the engine's own writer leaves them there.

    Raises:
        UntrustedError: naming the file and what it holds.
    """
    for name in files:  # some reader might open one that does not belong here
        if not (_DATA.fullmatch(name) or _OTHERS.fullmatch(name)):
            raise UntrustedError(f"{name} is no file of a checkpoint")
    size = files.get(NAME, {"bytes": 0})["bytes"]
    if size == 0 or size > LARGEST:
        raise UntrustedError(f"{NAME} has {size} bytes: between 1 and {LARGEST} are read")
    try:
        with (step / NAME).open("rb") as file:
            data = file.read(size)
        metadata = _Unpickler(io.BytesIO(data), with_plans).load()
        return _checked(metadata, files, listed_in)
    except UntrustedError:
        raise
    except Exception as error:  # whatever a pickle made for it can raise
        raise _damaged(f"{type(error).__name__}: {str(error)[:200]}") from None


class _Fixed(type):
    """The type of the classes below: a pickle can set attributes of a record, but not of its class."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise pickle.UnpicklingError(f"sets {name} of {cls.__name__}")


class _Record(metaclass=_Fixed):
    """A stand-in for an object of torch's checkpoint metadata: its attributes, unchecked, and no function."""


class _Metadata(_Record):
    state_dict_metadata: object
    storage_data: object


class _Bytes(_Record):
    pass


class _Tensor(_Record):
    properties: _Properties
    size: object
    chunks: object


class _Chunk(_Record):
    offsets: object
    sizes: object


class _StorageInfo(_Record):
    relative_path: object
    offset: object
    length: object
    transform_descriptors: object = None


class _Properties(_Record):
    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.dtype, self.layout, _requires_grad, _memory_format, _pinned = state


class _IndexKey(_Record):
    """A key of `storage_data`: equal where tensor and offset are."""

    fqn: object
    offset: object = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IndexKey) and (self.fqn, self.offset) == (other.fqn, other.offset)


class _Path(_Record):
    """The folder that the writer wrote to, which is not used."""

    def __init__(self, *parts: object) -> None:
        pass


_TORCH = "torch.distributed.checkpoint"
_STAND_INS: dict[tuple[str, str], Any] = {
    (f"{_TORCH}.metadata", "Metadata"): _Metadata,
    (f"{_TORCH}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_TORCH}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_TORCH}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_TORCH}.metadata", "StorageMeta"): _Record,
    (f"{_TORCH}.metadata", "TensorProperties"): _Properties,
    (f"{_TORCH}.metadata", "MetadataIndex"): _IndexKey,
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"): int,
    (f"{_TORCH}.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _Path,
    ("pathlib._local", "PosixPath"): _Path,
    **{("torch", name): name for name in _DTYPES},
}
"""What belongs in an index, by module and name, and what it is read as. Builtin types cannot be changed either."""
_STAND_INS_OF_PLANS: dict[tuple[str, str], Any] = {
    (f"{_TORCH}.planner", "SavePlan"): _Record,
    (f"{_TORCH}.planner", "WriteItem"): _Record,
    (f"{_TORCH}.planner", "TensorWriteData"): _Record,
    (f"{_TORCH}.planner", "BytesIOWriteData"): _Record,
    (f"{_TORCH}.planner", "WriteItemType"): int,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler of stand-ins for the classes of torch's checkpoint metadata, and of nothing else."""

    def __init__(self, file: io.BytesIO, with_plans: bool) -> None:
        super().__init__(file)
        self._with_plans = with_plans

    def find_class(self, module: str, name: str) -> Any:
        _require_known(module, name, self._with_plans)
        return _STAND_INS.get((module, name)) or _STAND_INS_OF_PLANS[module, name]


def _require_known(module: str, name: str, with_plans: bool) -> None:
    key = (module, name)
    if key not in _STAND_INS and not (with_plans and key in _STAND_INS_OF_PLANS):
        raise UntrustedError(f"{NAME} refers to {module}.{name}, which has no place in a checkpoint")


def _checked(metadata: object, files: Mapping[str, FileEntry], listed_in: str) -> StepIndex:
    if not isinstance(metadata, _Metadata):
        raise _damaged("it holds no metadata")
    kinds, storage = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(kinds, dict) or not isinstance(storage, dict):
        raise _damaged("it lists no tensors")
    places: dict[tuple[str, tuple[int, ...] | None], StoredBytes] = {}
    for key, info in storage.items():
        _require(isinstance(key, _IndexKey) and isinstance(key.fqn, str), "a key is none")
        places[key.fqn, key.offset] = _place(key.fqn, info, files, listed_in)
    tensors: dict[str, Tensor] = {}
    values: dict[str, StoredBytes] = {}
    for key, kind in kinds.items():
        _require(isinstance(key, str), "a key is no text")
        if isinstance(kind, _Bytes):
            values[key] = places.pop((key, None))
            _require(values[key].length <= LARGEST_VALUE, f"{key} has {values[key].length} bytes")
        else:
            tensors[key] = _tensor(key, kind, places)
    _require(not places, f"{next(iter(places), '')} has a location, but is not listed")
    used = {place.file for place in values.values()} | {
        part.place.file for tensor in tensors.values() for part in tensor.parts
    }
    for name in files:
        unused = _DATA.fullmatch(name) and name not in used and files[name]["bytes"] > 0
        _require(not unused, f"it does not know {name}, which {listed_in} lists")
    return StepIndex(tensors, values)


def _tensor(key: str, kind: object, places: dict[tuple[str, tuple[int, ...] | None], StoredBytes]) -> Tensor:
    if not isinstance(kind, _Tensor):
        raise _damaged(f"{key} is a {type(kind).__name__}")
    dtype, layout, shape = kind.properties.dtype, kind.properties.layout, _sizes(key, kind.size)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _damaged(f"{key} has the type {dtype!r}")
    _require(layout == "torch.strided", f"{key} has the layout {layout!r}")
    if not isinstance(kind.chunks, list):
        raise _damaged(f"{key} has no parts")
    parts = []
    for chunk in kind.chunks:
        start, extent = _sizes(key, chunk.offsets), _sizes(key, chunk.sizes)
        inside = len(start) == len(extent) == len(shape) and all(
            first + count <= size for first, count, size in zip(start, extent, shape)
        )
        _require(inside, f"a part of {key} is outside of it")
        _require((key, start) in places, f"the part {start} of {key} has no location")
        parts.append(TensorPart(start, extent, places.pop((key, start))))
    filled = sum(math.prod(part.shape) for part in parts)
    _require(filled == math.prod(shape), f"the parts of {key} hold {filled} elements of {math.prod(shape)}")
    _require(not overlap(parts), f"parts of {key} overlap, so that others are missing")
    return Tensor(dtype, shape, tuple(parts))


def overlap(parts: list[TensorPart]) -> bool:
    """Return whether two boxes share an element, by a sweep along the first axis over the boxes that it is in."""
    inside: list[TensorPart] = []
    for part in sorted((part for part in parts if math.prod(part.shape)), key=lambda part: part.start):
        if part.start:
            inside = [other for other in inside if other.start[0] + other.shape[0] > part.start[0]]
        for other in inside:
            boxes = zip(part.start, part.shape, other.start, other.shape)
            if all(a < b + n and b < a + m for a, m, b, n in boxes):
                return True
        inside.append(part)
    return False


def _place(key: str, info: object, files: Mapping[str, FileEntry], listed_in: str) -> StoredBytes:
    if not isinstance(info, _StorageInfo):
        raise _damaged(f"{key} has no location")
    name, offset, length = info.relative_path, info.offset, info.length
    if not isinstance(name, str) or not _DATA.fullmatch(name):
        raise _damaged(f"{key} is stored in {str(name)[:80]!r}")
    _require(name in files, f"{key} is stored in {name}, which {listed_in} does not list")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise _damaged(f"{key} has no place")
    size = files[name]["bytes"]
    _require(offset + length <= size, f"{key} ends at byte {offset + length} of {name}, which has {size}")
    _require(not info.transform_descriptors, f"{key} is stored transformed")
    return StoredBytes(name, offset, length)


def _sizes(key: str, sizes: object) -> tuple[int, ...]:
    if isinstance(sizes, tuple) and len(sizes) < 32 and all(type(size) is int and size >= 0 for size in sizes):
        return sizes
    raise _damaged(f"{key} has the sizes {str(sizes)[:80]}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _damaged(otherwise)


def _damaged(why: str) -> UntrustedError:
    return UntrustedError(f"{NAME} is damaged or harmful: {why}")
