"""Paths in an object store, by fsspec: `s3://bucket/run`, `gs://...`, `memory://...`. No torch.

`location` returns a `Path` for what a flag names: pathlib's own for a disk, an `ObjectPath` for a store. Code that uses
the methods of `Path` works with both. What a store lacks (renames, locks, links, fsync) raises TypeError there instead
of touching a disk. An object appears as a whole when its writer is closed, replaces the one of its name, and is
durable then: a put needs neither a file aside nor fsync.

An object that is missing, or there already, is told by Python's own exceptions. Any other error is a StoreError: it
says nothing about the object, so that nobody may take it for damage. Retries and timeouts are the store's library's.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import IO, Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import is_url

BLOCK_BYTES = 16 * 2**20
"""What one request reads of a file that is read from its beginning to its end."""
PART_BYTES = 64 * 2**20
"""What one request writes of a large file: a store takes 10,000 parts of a file, 640 GB."""


class StoreError(OSError, ConfigError):
    """A store did not answer, or refused a request; the file name is the URL."""

    def __init__(self, number: int, reason: str, url: str) -> None:
        OSError.__init__(self, number, reason, url)
        self.fields = frozenset()


def location(given: str) -> Path:
    """Return the path of a flag's value: an `ObjectPath` for a URL, but a file's own path for file://PATH.

    Raises:
        ConfigError: fsspec would read the URL as a pattern, and remove whatever fits it.
    """
    if is_url(given) and set("*?[]") & set(given):
        raise ConfigError(f"{given}: has *, ? or brackets, which make a pattern of a URL; use a name without them")
    if given.startswith("file:/"):
        return Path(given.removeprefix("file:")).resolve()
    return ObjectPath(given) if is_url(given) else Path(given)


class ObjectPath(PosixPath):
    """A path in an object store. A folder is what the names of objects begin with; it needs no mkdir."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)  # pathlib has made one slash of two

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in an object store, and not on a disk")

    @property
    def _store(self) -> Any:
        # A forked process has a connection of its own, the threads of a process share theirs.
        return _file_system(self.parts[0].removesuffix(":"), os.getpid())

    @property
    def _key(self) -> str:
        return str(self._store._strip_protocol(str(self)))

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the store's file system with this path and the arguments."""
        with _errors_of(self):
            return getattr(self._store, method)(self._key, *args, **options)

    # What is there.

    def absolute(self) -> ObjectPath:
        return self

    def resolve(self, strict: bool = False) -> ObjectPath:
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the kind, the size and the time of the last change, all else is 0."""
        found = self._call("info")
        changed = 0 if found["type"] == "directory" else self._call("modified").timestamp()
        return _status(found, int(changed))

    def lstat(self) -> os.stat_result:
        """Return the kind and the size, all else is 0."""
        return _status(self._call("info"))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self._mode() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._mode() == stat.S_IFDIR

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._mode() == stat.S_IFREG

    def _mode(self) -> int | None:
        try:
            return self.lstat().st_mode
        except FileNotFoundError:
            return None

    def iterdir(self) -> Iterator[ObjectPath]:  # type: ignore[override]
        """Yield what is in a folder."""
        names = {str(name).rstrip("/").rpartition("/")[2] for name in self._call("ls", detail=False)}
        yield from (self / name for name in sorted(names - {"", self.name}))

    def walk_files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the name, relative to this folder, of every object below it, with its kind and size."""
        above = len(f"{self._key}/")
        for key, found in sorted(self._call("find", detail=True).items()):
            yield key[above:], _status(found)

    # Reading and writing.

    def open(  # type: ignore[override]
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """Open an object to read or to write it.

        Args:
            buffering: how many bytes a read asks the store for; 0: those that the caller reads, which have to be there:
                the object's size is then not asked for.
        """
        if mode == "wb":
            return _Writer(self)  # type: ignore[return-value]
        if mode == "rb" and buffering == 0:
            return _Reader(self, sys.maxsize)  # type: ignore[return-value]
        raw = _Reader(self, self.lstat().st_size)
        file = io.BufferedReader(raw, BLOCK_BYTES if buffering < 1 else buffering)
        return file if mode == "rb" else io.TextIOWrapper(file, encoding, errors, newline)

    def read_bytes(self) -> bytes:
        return bytes(self._call("cat_file"))

    def write_bytes(self, data: Any) -> int:
        """Put an object, which replaces the one that is there."""
        self._call("pipe_file", bytes(data))
        return len(data)

    def create(self, data: bytes) -> None:
        """Put an object where there is none, in one request if the store can do that (S3 and Google's can).

        Raises:
            FileExistsError: there is one.
        """
        self._call("pipe_file", data, mode="create")

    def write_text(self, data: str, *_: Any, **__: Any) -> int:
        return self.write_bytes(data.encode())

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        """Put an empty object."""
        self.write_bytes(b"")

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: the first object makes its folder."""

    def rename(self, target: ObjectPath) -> ObjectPath:  # type: ignore[override]
        """Copy an object, then remove it: for a while there are both."""
        self._call("cp_file", target._key)
        self.unlink()
        return target

    def copy_files(self, target: ObjectPath) -> None:
        """Copy every object below a folder to another folder, inside the store."""
        for name, _ in self.walk_files():
            (self / name)._call("cp_file", (target / name)._key)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._call("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_files(self) -> None:
        """Remove every object below a folder; none is no error."""
        if self.exists():
            self._call("rm", recursive=True)


class _Reader(io.RawIOBase):
    """An object that is read in ranges, each by a request."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._path, self._size, self._position = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._position + len(view), self._size)
        if end <= self._position:
            return 0
        found = self._path._call("cat_file", start=self._position, end=end)
        view[: len(found)] = found
        self._position += len(found)
        return len(found)


class _Writer(io.RawIOBase):
    """An object that is written in parts and appears when it is closed; after an error it does not."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._is_whole = path, True
        self._file = path._call("open", "wb", block_size=PART_BYTES)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            with _errors_of(self._path):
                for first in range(0, len(view), PART_BYTES):  # it copies what it gets at once
                    self._file.write(view[first : first + PART_BYTES])
        except BaseException:
            self._is_whole = False
            raise
        return len(view)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        with _errors_of(self._path):
            if self._is_whole:
                self._file.close()
            else:
                with suppress(AttributeError):  # a file in memory, which is never put
                    self._file.closed = True  # else it puts the object when Python deletes it
                self._file.discard()

    def __exit__(self, *error: Any) -> None:
        self._is_whole = self._is_whole and error[0] is None
        self.close()

    def __del__(self) -> None:
        self._is_whole = False
        super().__del__()


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raise errors with a number, a reason and the URL, which not all of the stores' libraries do."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from error
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "the object is there already", str(path)) from error
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise StoreError(getattr(error, "errno", None) or errno.EIO, reason, str(path)) from error


def _status(found: dict[str, Any], changed: int = 0) -> os.stat_result:
    kind = stat.S_IFDIR if found["type"] == "directory" else stat.S_IFREG
    return os.stat_result((kind, 0, 0, 0, 0, 0, found["size"] or 0, changed, changed, changed))


@lru_cache
def _file_system(scheme: str, process: int) -> Any:
    """Return fsspec's file system, which remembers no listing: other processes write, too."""
    import fsspec

    return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
