"""Reads the header of an untrusted .safetensors file, and writes a file tensor by tensor. Loads no torch.

A file is 8 bytes (the header's length, little endian), the header (JSON: name -> dtype, shape, data_offsets), and the
numbers. A header that is read here has been checked against the file: offsets cover all of it, without overlap or hole,
and every tensor's bytes are those of its shape and dtype. Memory is bounded before anything is parsed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import OF_LFS, is_lfs_pointer
from megatron_moe.io.hashing import SideHasher

LARGEST_HEADER = 16 * 2**20
"""Bytes of a header: 100 000 tensors in one file. Parsed, the worst case takes 30 times that."""
LARGEST_TENSOR = 16 * 2**30
"""Bytes of one tensor; the largest of the supported families takes 2.4 GB."""
MOST_DIMENSIONS = 8

# The format's name of a dtype -> torch's name, and its bytes.
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
CODES = {name: (code, size) for code, (name, size) in DTYPES.items()}

LENGTH = struct.Struct("<Q")
_MOST_AT_ONCE = 1 << 30
"""Bytes per system call, which takes no more than 2 GiB."""


class FileIdentity(NamedTuple):
    """What tells whether a file changed; size in bytes, time of the last change in ns."""

    device: int
    inode: int
    size: int
    changed: int


@dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor: in `file`, the bytes from `begin` to `end`. The dtype is torch's name of it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The content of a header: a file's tensors in the order of their bytes, its metadata, and the file's identity."""

    tensors: dict[str, TensorLocation]
    metadata: dict[str, str]
    identity: FileIdentity
    length: int
    """Bytes of the header."""


class FormatError(ConfigError):
    """An error for a file that is not what its name says. The message names the file."""


@contextmanager
def plain_file(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file and yield its descriptor and status.

    Other files are refused before they are opened: a pipe would block, and a device would act.

    Raises:
        FormatError: the file does not exist, cannot be read, or is not a regular file.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(f"{path} is not a regular file")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a regular file")
        yield descriptor, status
    finally:
        os.close(descriptor)


def identity_of(status: os.stat_result) -> FileIdentity:
    """Return what identifies a file and its content, as far as the file system reports it."""
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_small(path: Path, largest: int, identity: FileIdentity | None = None) -> bytes:
    """Return the content of a file of at most `largest` bytes.

    Raises:
        FormatError: the file is larger, cannot be read, or has another identity.
    """
    with plain_file(path) as (descriptor, status):
        if identity is not None and identity_of(status) != identity:
            raise FormatError(f"{path} changed since it was opened; nothing else may write to the folder")
        if status.st_size > largest:
            raise FormatError(f"{path} has {status.st_size} bytes; at most {largest} are read")
        try:
            data = _read(descriptor, status.st_size, 0)
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error
        if len(data) != status.st_size or os.fstat(descriptor).st_size != status.st_size:
            raise FormatError(f"{path} changed while it was read")
        return data


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object in UTF-8 in which no key is repeated and every number is finite.

    Raises:
        FormatError: the data is something else; the message starts with `where`.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, inner in pairs:
            if key in result:
                raise ValueError(f"the key {shortened(key)} is in it twice")
            result[key] = inner
        return result

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"it holds {text[:40]}, which is no finite number")
        return value

    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=without_duplicates, parse_constant=finite, parse_float=finite
        )
    except RecursionError:
        raise FormatError(f"{where} is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{where} is not UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise FormatError(f"{where} is not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where} is a JSON {type(value).__name__}; an object is expected")
    return value


def read_header(path: Path) -> Header:
    """Return the header of a file after checking it against the file.

    Raises:
        FormatError: something is not as the format says; the message names the file and the tensor.
    """
    with plain_file(path) as (descriptor, status):
        size = status.st_size
        try:
            start = _read(descriptor, LENGTH.size, 0)
            if len(start) < LENGTH.size:
                raise FormatError(f"{path} has {size} bytes; a .safetensors file starts with 8 that give its header's")
            (length,) = LENGTH.unpack(start)
            if length > size - LENGTH.size and is_lfs_pointer(path):
                raise FormatError(f"{path} {OF_LFS}")
            if length > size - LENGTH.size:
                raise FormatError(f"{path}: its header is to have {length} bytes, the file has {size}")
            if length > LARGEST_HEADER:
                raise FormatError(f"{path}: its header has {length} bytes; at most {LARGEST_HEADER} are read")
            data = _read(descriptor, length, LENGTH.size)
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error
        if len(data) != length:
            raise FormatError(f"{path} changed while it was read")
    content = parse_object(data, f"{path}: its header")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: __metadata__ is to map strings to strings")
    numbers = LENGTH.size + length
    tensors = {name: _stored(path, name, entry, numbers, size) for name, entry in content.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    at, before = numbers, "the header"
    for name, stored in ordered.items():
        if stored.begin != at:
            what = "overlaps" if stored.begin < at else "leaves bytes that are nobody's behind"
            raise FormatError(
                f"{path}: tensor {shortened(name)} {what} {before}: it starts at {stored.begin}, not {at}"
            )
        at, before = stored.end, f"tensor {shortened(name)}"
    if at != size:
        raise FormatError(f"{path} has {size - at} bytes behind {before} that are nobody's")
    return Header(ordered, metadata, identity_of(status), length)


def _read(descriptor: int, count: int, offset: int) -> bytes:
    pieces, missing = [], count
    while missing and (piece := os.pread(descriptor, min(missing, _MOST_AT_ONCE), offset)):
        pieces.append(piece)
        missing, offset = missing - len(piece), offset + len(piece)
    return b"".join(pieces)


def shortened(value: object) -> str:
    """Return a value of an untrusted file for a message: on one line, and shortened where it is long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def _stored(path: Path, name: str, entry: object, numbers: int, size: int) -> TensorLocation:
    where = f"{path}: tensor {shortened(name)}"
    if not name or not name.isprintable() or len(name) > 512:
        raise FormatError(f"{where}: a name is 1 to 512 printable characters")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(
            f"{where} is {shortened(entry)}; dtype, shape and data_offsets are expected, and nothing else"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{where} has the dtype {shortened(dtype)}; known are {', '.join(DTYPES)}")
    if not _whole_numbers(shape) or len(shape) > MOST_DIMENSIONS:
        raise FormatError(
            f"{where} has the shape {shortened(shape)}; up to {MOST_DIMENSIONS} whole numbers are expected"
        )
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise FormatError(f"{where} has the data_offsets {shortened(offsets)}; two whole numbers are expected")
    torch_name, item = DTYPES[dtype]
    (begin, end), needed = offsets, math.prod(shape) * item
    if end - begin != needed:
        raise FormatError(f"{where}: {dtype} {shape} takes {needed} bytes, data_offsets {offsets} are {end - begin}")
    if numbers + end > size:
        raise FormatError(f"{where} ends at byte {numbers + end}, the file has {size}: it is cut off, or another")
    if needed > LARGEST_TENSOR:
        raise FormatError(f"{where} has {needed} bytes; at most {LARGEST_TENSOR} are read into memory at once")
    return TensorLocation(path.name, torch_name, tuple(shape), numbers + begin, numbers + end)


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**63 for number in value)


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a tensor in a file; the dtype is torch's name of it."""
    return math.prod(shape) * CODES[dtype][1]


# ---- Writing, in any order, without keeping the tensors in memory.


class StreamedFile:
    """A new .safetensors file that is written tensor by tensor, in any order.

    It is a context manager: the file is complete and on the disk when the block ends, and removed when it ends in an
    error.

    Args:
        path: the file, which must not exist yet.
        layout: every tensor's dtype (torch's name) and shape. The bytes are in this order, unless a tensor would be
            misaligned: then the wider dtypes come first.
        metadata: strings; transformers wants {"format": "pt"}.
    """

    def __init__(
        self,
        path: Path,
        layout: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        content: dict[str, Any] = {}
        if metadata is None or metadata:
            content["__metadata__"] = {"format": "pt"} if metadata is None else dict(metadata)
        order, at, aligned = list(layout.items()), 0, True
        for _, (dtype, shape) in order:
            aligned = aligned and at % CODES[dtype][1] == 0
            at += bytes_of(dtype, shape)
        if not aligned:
            order.sort(key=lambda item: -CODES[item[1][0]][1])
        places, at = dict[str, tuple[int, int]](), 0
        for name, (dtype, shape) in order:
            begin, at = at, at + bytes_of(dtype, shape)
            places[name] = (begin, at)
            content[name] = {"dtype": CODES[dtype][0], "shape": list(shape), "data_offsets": [begin, at]}
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = LENGTH.pack(len(text)) + text
        self.layout: dict[str, TensorLocation] = {}
        for name, (begin, end) in places.items():
            self.layout[name] = TensorLocation(path.name, *layout[name], len(header) + begin, len(header) + end)
        self.bytes = len(header) + at
        self.digests: dict[str, str] = {}
        self._hasher = SideHasher()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.truncate(self._descriptor, self.bytes)
            self._put(memoryview(header), 0)
        except BaseException:
            self._give_up()
            raise

    def write(self, name: str, data: Any) -> str:
        """Write one tensor's bytes, from any object with the buffer protocol, and return their SHA-256.

        Raises:
            ValueError: the file has no such tensor, it is written already, or it has another size.
            OSError: writing failed.
        """
        view = memoryview(data).cast("B")
        stored = self.layout.get(name)
        if stored is None:
            raise ValueError(f"{self.path}: {name} is not in the file")
        if name in self.digests:
            raise ValueError(f"{self.path}: {name} is written already")
        if len(view) != stored.end - stored.begin:
            raise ValueError(f"{self.path}: {name} is {len(view)} bytes, not those of {stored}")
        digest = hashlib.sha256()
        self._hasher.write(view, digest, lambda piece: self._put(piece, stored.begin))
        self.digests[name] = digest.hexdigest()
        return self.digests[name]

    def close(self) -> None:
        """Bring the file to disk; on an error, remove it.

        Raises:
            ValueError: a tensor was not written.
            OSError: writing failed.
        """
        missing = [name for name in self.layout if name not in self.digests]
        try:
            if missing:
                raise ValueError(f"{self.path}: {len(missing)} tensors were not written: {', '.join(missing[:5])}")
            os.fsync(self._descriptor)
        except BaseException:
            self._give_up()
            raise
        self._release()

    def _put(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.pwrite(self._descriptor, view[:_MOST_AT_ONCE], offset)
            view, offset = view[count:], offset + count

    def _release(self) -> None:
        self._hasher.close()
        os.close(self._descriptor)

    def _give_up(self) -> None:
        self._release()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up()
