"""Files that are on the disk when a function returns, and what to say when the disk refuses. No torch."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint.manifest import Entry
from megatron_moe.config.errors import RunFault

_BESIDE = 1 << 20
"""Bytes from which a piece is hashed in a thread of its own while it is written: below, starting it costs more."""


class SaveError(RunFault):
    """A step could not be saved. What was there before is as it was; the same on every rank."""


class HashingFile:
    """A new binary file that is hashed while it is written; what torch's writers need of a file, and no more.

    error: the first refusal of the system. torch reports an error of its own in its place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._beside: ThreadPoolExecutor | None = None
        self._file = io.BufferedWriter(io.FileIO(path, "wb"), _BESIDE)

    def write(self, data: Any) -> int:
        """Append bytes or anything that shows them."""
        view = memoryview(data).cast("B")
        try:
            if len(view) < _BESIDE:
                self._digest.update(view)
                self._file.write(view)
            else:
                self._beside = self._beside or ThreadPoolExecutor(1, thread_name_prefix="sha256")
                hashed = self._beside.submit(self._digest.update, view)
                try:
                    self._file.write(view)
                finally:
                    hashed.result()  # the caller may change the bytes when this returns
        except OSError as error:
            self.error = self.error or error
            raise
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._bytes

    def flush(self) -> None:
        """Nothing: torch asks for it behind every tensor, and many small writes are slow. `close` keeps the promise."""

    def sync(self) -> None:
        """Put everything onto the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.error = self.error or error
            raise

    def close(self) -> None:
        """Put everything onto the disk and close; nothing more after the first time."""
        if self._beside is not None:
            self._beside.shutdown()
        if self._file.closed:
            return
        try:
            if self.error is None:
                self.sync()
        finally:
            try:
                self._file.close()
            except OSError:  # what could not be written is tried once more by Python
                if self.error is None:
                    raise

    def entry(self) -> Entry:
        """Size and hash of what was written."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


@contextmanager
def new_file(path: Path) -> Iterator[HashingFile]:
    """A file to write and hash; it is on the disk when the block ends.

    Raises:
        OSError: the system refused; its file name is `path`.
    """
    try:
        file = HashingFile(path)
        try:
            yield file
        finally:
            file.close()
    except OSError as error:
        raise named(error, path) from error


def write_bytes(path: Path, data: bytes) -> Entry:
    """Write a file of a step that is not visible yet, onto the disk."""
    with new_file(path) as file:
        file.write(data)
    return file.entry()


def write_json(path: Path, value: Any) -> Entry:
    """Write a JSON file of a step that is not visible yet, onto the disk."""
    return write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def replace_text(path: Path, text: str) -> None:
    """Replace a file at once: a reader, and a disk after a crash, has the old text or the new."""
    temporary = path.with_name(f".{path.name}.new")
    write_bytes(temporary, text.encode())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries onto the disk: a file whose name is lost is lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise named(error, folder) from error
    finally:
        os.close(descriptor)


def named(error: OSError, path: Path) -> OSError:
    """The same error with the file it is about, where the system did not say."""
    return error if error.filename else OSError(error.errno, error.strerror or str(error), str(path))


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user may still write where `folder` is; None where the file system does not say."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def refusal(error: OSError, root: Path, needed_bytes: int) -> str:
    """What to tell about an error while saving: what, where, and for a full disk how much is needed and free."""
    where = f" ({error.filename})" if error.filename else ""
    text = f"{error.strerror or error}{where}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        text += f"; {room(root, needed_bytes)}"
    return text


def room(root: Path, needed_bytes: int) -> str:
    """How much a step takes and how much there is, for a message."""
    free = free_bytes(root)
    there = "the file system does not say how much is free" if free is None else f"{size(free)} are free"
    return f"the step takes {size(needed_bytes)}, {there} at {root}"


def size(number: int, *, exact: bool = True) -> str:
    """Bytes for a person, and the exact number: 1.5 GB (1500000000 bytes)."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}" + (f" ({number} bytes)" if exact else "")
    return f"{number} bytes"
