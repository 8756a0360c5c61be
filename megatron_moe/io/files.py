"""Writing files that survive a crash. No torch.

Each way to write has its guarantee:

- `replacing`, `replace_text` and `replace_json` replace one file: its content is on the disk before it is renamed, and
  the folder is synced afterwards. A reader, and a disk after a crash, has the old file or the new one, never a part.
- `publish_files` does the same for several files that belong together. They appear in the order that is given, so the
  last one marks them as complete.
- `new_file`, `write_bytes` and `write_json` write a file in place, onto the disk, and hash it on the way: for a folder
  that nobody reads before it is renamed as a whole (a step of a checkpoint, the output of a conversion).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from megatron_moe.config.paths import require_writable_file
from megatron_moe.io.hashing import FileEntry, HashingFile
from megatron_moe.io.object_storage import ObjectPath

# One file that is replaced.


@contextmanager
def replacing(path: Path, mode: str = "w", *, sole_writer: bool = False, synced: bool = True) -> Iterator[IO[Any]]:
    """Open a file next to `path` for writing; it takes the place of `path` if the block ends well, else it is removed.

    Args:
        mode: "w" for text in UTF-8, or "wb".
        sole_writer: see `written_aside`.
        synced: whether it is put onto the disk; without it, a crash of the machine may leave an empty file.
    """
    with written_aside(path, sole_writer=sole_writer, synced=synced) as aside:
        with open(aside, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())


@contextmanager
def written_aside(path: Path, *, sole_writer: bool = False, synced: bool = True) -> Iterator[Path]:
    """Yield a path next to `path` for a file that replaces it at the end; the block has to put it onto the disk.

    Args:
        sole_writer: a lock ensures that no other process writes `path`. The name aside is then fixed, so that what a
            killed process left there is overwritten by the next one.
        synced: whether the folder is put onto the disk, too.
    """
    aside = path.with_name(f".{path.name}.new" if sole_writer else f".{path.name}.{os.getpid()}.new")
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    if synced:
        sync(path.parent)


def replace_text(path: Path, text: str, *, sole_writer: bool = False, synced: bool = True) -> None:
    """Replace a file by one that holds `text` in UTF-8, an object by one put; arguments are those of `replacing`."""
    if isinstance(path, ObjectPath):
        path.write_text(text)
        return
    with replacing(path, sole_writer=sole_writer, synced=synced) as file:
        file.write(text)


def replace_json(path: Path, value: object, *, sole_writer: bool = False) -> None:
    """Replace a file by one that holds `value` as indented JSON; NaN and infinity become null."""
    text = json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False)
    replace_text(path, f"{text}\n", sole_writer=sole_writer)


def finite(value: object) -> Any:
    """Return `value` with every NaN and infinity replaced by None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


# Several files that belong together.


def publish_files(pairs: Iterable[tuple[Path, Path]], retract: Iterable[Path] = ()) -> None:
    """Put files that were written aside onto the disk, then rename each to its place in the order given.

    Args:
        pairs: (file as it was written, its place), both on one file system.
        retract: files of an earlier set that are removed before the first rename, so that no reader takes a mixture of
            the two sets for a whole one.
    """
    renames = list(pairs)
    for aside, _ in renames:
        sync(aside)
    for path in retract:
        path.unlink(missing_ok=True)
    for aside, path in renames:
        os.replace(aside, path)
    for folder in {path.parent for _, path in renames}:
        sync(folder)


# New files of a folder that is not visible yet.


@contextmanager
def new_file(path: Path) -> Iterator[HashingFile]:
    """Open a file to write and hash, on the disk when the block ends; an OSError's file name is `path`."""
    try:
        file = HashingFile(path)
        try:
            yield file
        finally:
            file.close()
    except OSError as error:
        raise named(error, path) from error


def write_bytes(path: Path, data: bytes) -> FileEntry:
    """Write a file of a folder that is not visible yet, onto the disk."""
    with new_file(path) as file:
        file.write(data)
    return file.entry()


def write_json(path: Path, value: object) -> FileEntry:
    """Write a JSON file of a folder that is not visible yet, onto the disk."""
    return write_bytes(path, canonical_json(value))


def canonical_json(value: object) -> bytes:
    """Return the one form in which JSON is written where it is hashed: sorted keys, an indent of 1, a last newline."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


# Disks and folders.


def sync(path: Path) -> None:
    """Put a file's content, or a folder's entries, onto the disk; an OSError's file name is `path`.

    An object in a store is durable already.
    """
    if isinstance(path, ObjectPath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise named(error, path) from error
    finally:
        os.close(descriptor)


def named(error: OSError, path: Path) -> OSError:
    """Return the error with the name of its file, where the system did not give one."""
    return error if error.filename else OSError(error.errno, error.strerror or str(error), str(path))


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, as far as the system allows; none is no error."""
    if isinstance(folder, ObjectPath):
        folder.remove_files()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def free_bytes(folder: Path) -> int | None:
    """Return the bytes that a user may still write in a folder, made or not; None where the system does not say."""
    if isinstance(folder, ObjectPath):
        return None
    try:
        status = os.statvfs(next(there for there in (folder, *folder.parents) if there.exists()))
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def require_writable(flag: str, name: str | None) -> None:
    """Refuse a file that cannot be written or replaced, before the work whose result goes there; None is no file.

    Raises:
        ConfigError: as `config.paths.require_writable_file` has it.
    """
    if name is None:
        return
    require_writable_file(flag, name)
