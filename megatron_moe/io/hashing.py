"""SHA-256 of files: of one that exists, and of one while it is written. No torch."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, cast

from megatron_moe.io.object_storage import BLOCK_BYTES, ObjectPath

_LARGE = 1 << 20
"""Bytes from which a piece is hashed in a thread of its own while it is written: below, starting it costs more."""
_BLOCK = 4 << 20


class FileEntry(TypedDict):
    """The size of a file in bytes and its SHA-256 in lower-case hexadecimal."""

    bytes: int
    sha256: str


def blocks_of_file(path: str | Path) -> Iterator[memoryview]:
    """Yield the content of a file block by block; a block is valid until the next one is asked for."""
    path = Path(path) if isinstance(path, str) else path
    in_store = isinstance(path, ObjectPath)
    buffer = memoryview(bytearray(BLOCK_BYTES if in_store else _BLOCK))
    with path.open("rb", buffering=BLOCK_BYTES if in_store else 0) as file:
        while count := cast(Any, file).readinto(buffer):
            yield buffer[:count]


def sha256_of_file(path: str | Path, advance: Callable[[int], object] | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal; `advance` is called with the bytes of each block that was read."""
    hashed = hashlib.sha256()
    for block in blocks_of_file(path):
        hashed.update(block)
        if advance is not None:
            advance(len(block))
    return hashed.hexdigest()


class SideHasher:
    """A hasher that hashes large pieces in a thread of its own while the caller writes them, and small ones at once."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def write(self, piece: memoryview, digest: Any, put: Callable[[memoryview], object]) -> None:
        """Add a piece to a digest of hashlib and write it by `put`. Both are done when this returns or raises."""
        if len(piece) < _LARGE:
            digest.update(piece)
            put(piece)
            return
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="sha256")
        hashed = self._thread.submit(digest.update, piece)
        try:
            put(piece)
        finally:
            hashed.result()  # the caller may change the bytes when this returns

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


class HashingFile:
    """A new binary file that is hashed while it is written, with the methods that torch's writers call.

    A checkpoint's file is not read before its folder is renamed, so it is written in place; and to hash it afterwards
    would read it from the disk a second time. Other files are replaced by `files.replacing`. An object appears in its
    store when it is closed, if all of it was written.

    Attributes:
        error: the first error of the system. torch reports an error of its own instead.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._hasher = SideHasher()
        self._file = io.BufferedWriter(path.open("wb", buffering=0), _LARGE)

    def write(self, data: Any) -> int:
        """Append bytes, or any object with the buffer protocol, and return their number."""
        view = memoryview(data).cast("B")
        try:
            self._hasher.write(view, self._digest, self._file.write)
        except OSError as error:
            self.error = self.error or error
            raise
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._bytes

    def flush(self) -> None:
        """Do nothing: torch asks for it after every tensor, and many small writes are slow. `close` writes the rest."""

    def sync(self) -> None:
        """Put everything onto the disk."""
        try:
            self._file.flush()
            if not isinstance(self.path, ObjectPath):
                os.fsync(self._file.fileno())
        except OSError as error:
            self.error = self.error or error
            raise

    def close(self) -> None:
        """Put everything onto the disk and close the file; a second call does nothing."""
        self._hasher.close()
        if self._file.closed:
            return
        try:
            if self.error is None:
                self.sync()
        finally:
            try:
                self._file.close()
            except OSError as error:  # what could not be written is tried once more by Python
                if self.error is None:
                    self.error = error
                    raise

    def entry(self) -> FileEntry:
        """Return the size and the hash of what was written."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}
