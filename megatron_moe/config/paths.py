"""Whether a path can be read or written, found before the work whose result goes there. Opens and creates nothing."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from megatron_moe.config.errors import ConfigError, MissingPackage

_LFS = b"version https://git-lfs"
_URL = re.compile(r"[a-z][a-z0-9+.-]*:/", re.ASCII)  # of two slashes, pathlib makes one
MOST_BYTES_OF_SETTINGS = 16 * 2**20
"""Settings are some kilobytes; a device such as /dev/zero never ends."""


def is_url(given: str) -> bool:
    """Return whether a flag names a place in an object store, such as s3://BUCKET/NAME, and not one on a disk."""
    return _URL.match(given) is not None


def require_on_disk(flag: str, given: str) -> None:
    """Refuse a URL where only a path on a disk can be read.

    Raises:
        ConfigError: naming the flag.
    """
    if is_url(given):
        raise ConfigError(f"{flag} {given}: is read from a disk only; copy it to one, and name the copy")


def require_store(flag: str, given: str) -> None:
    """Refuse a URL of a store that fsspec does not know, or whose package is not installed.

    Raises:
        ConfigError: with the command that installs the package.
    """
    from fsspec.registry import get_filesystem_class, known_implementations

    scheme = given.partition("://")[0]
    try:
        get_filesystem_class(scheme)
    except ValueError:
        raise ConfigError(
            f"{flag} {given}: there is no object store {scheme}://; use s3://, gs:// or abfs://"
        ) from None
    except ImportError:
        package = known_implementations[scheme]["class"].partition(".")[0]
        raise MissingPackage(f"{flag} {given}: needs a package that is not installed; pip install {package}") from None


def read_settings(flag: str, path: str, kind: str) -> str:
    """Return the text of a file of settings, without a byte order mark.

    Args:
        kind: of the file, for messages: "YAML", "JSON".

    Raises:
        ConfigError: the file cannot be read, is too large, or is not text in UTF-8.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES_OF_SETTINGS + 1)
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be read ({error.strerror}); give the path of a {kind} file"
        ) from error
    if len(content) > MOST_BYTES_OF_SETTINGS:
        raise ConfigError(f"{flag} {path}: has more than {MOST_BYTES_OF_SETTINGS >> 20} MiB; give a {kind} file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{flag} {path}: is not text in UTF-8 (byte {error.start}); give the path of a {kind} file"
        ) from error


def require_readable(flag: str, given: str) -> None:
    """Refuse a file or folder that this user may not read, or whose name the system does not take.

    One that does not exist passes: what would be there instead is said by its reader.

    Raises:
        ConfigError: the message names the flag.
    """
    require_on_disk(flag, given)
    try:
        found = os.stat(given)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ConfigError(f"{flag} {given}: cannot be read ({error.strerror}); name another path") from None
    needed = os.R_OK | os.X_OK if stat.S_ISDIR(found.st_mode) else os.R_OK
    if not os.access(given, needed):
        raise ConfigError(f"{flag} {given}: you may not read it; get the permission, or name another path")
    if stat.S_ISREG(found.st_mode) and is_lfs_pointer(given):
        raise ConfigError(f"{flag} {given}: {OF_LFS}")


OF_LFS = "is a pointer of Git LFS and not the file itself; fetch it by `git lfs pull` where it comes from"


def is_lfs_pointer(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is what a clone without Git LFS has in a large file's place."""
    with open(path, "rb") as file:
        return file.read(len(_LFS)) == _LFS


def require_writable_file(flag: str, given: str, *, in_new_folder: bool = False) -> None:
    """Refuse a path at which no file can be written, or replaced.

    Args:
        in_new_folder: whether its folder is made if it does not exist.

    Raises:
        ConfigError: the message names the flag and what is in the way.
    """
    path = Path(_absolute(flag, given))
    if given == "-":
        raise ConfigError(f"{flag} -: nothing is written to the standard output; name a file")
    if given.endswith(("/", "/.", "/..")) or given in (".", ".."):
        raise ConfigError(f"{flag} {given}: is a folder; name a file in it")
    mode = _mode(flag, given, path)
    if mode is not None and stat.S_ISDIR(mode):
        raise ConfigError(f"{flag} {given}: is a folder; name a file in it")
    if mode is not None and not stat.S_ISREG(mode):
        raise ConfigError(f"{flag} {given}: is no ordinary file, and cannot be replaced by one; name another one")
    if mode is not None and not os.access(path, os.W_OK):
        raise ConfigError(f"{flag} {given}: is there and may not be written to; name another file")
    parent_mode = None if in_new_folder else _mode(flag, given, path.parent)
    if not in_new_folder and (parent_mode is None or not stat.S_ISDIR(parent_mode)):
        raise ConfigError(f"{flag} {given}: its folder does not exist; create it, or name a folder that exists")
    _require_room_for(flag, given, path.parent)


def require_writable_folder(flag: str, given: str) -> None:
    """Refuse a path that is no folder to write in, and where none can be made, by a ConfigError with the flag."""
    require_on_disk(flag, given)
    path = Path(_absolute(flag, given))
    if path == path.parent:
        raise ConfigError(f"{flag} {given}: is the root of all folders, as an unset variable makes it; name a folder")
    if given == "-":
        raise ConfigError(f"{flag} -: nothing is written to the standard output; name a folder")
    mode = _mode(flag, given, path)
    if mode is not None and not stat.S_ISDIR(mode):
        raise ConfigError(f"{flag} {given}: is a file; name a folder")
    _require_room_for(flag, given, path)


def _absolute(flag: str, given: str) -> str:
    try:
        return os.path.abspath(given)
    except OSError as error:
        raise ConfigError(f"{flag} {given}: the current folder was removed; change to one that exists") from error


def _mode(flag: str, given: str, path: Path) -> int | None:
    """Return what is at the end of the path's links; None where nothing is."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise ConfigError(
                f"{flag} {given}: is a link to {os.readlink(path)}, which does not exist; remove the link, or name "
                "where to write"
            ) from None
        return None
    except NotADirectoryError:
        existing = next(one for one in path.parents if one.exists())
        raise ConfigError(f"{flag} {given}: {existing} is a file; name a folder") from None
    except OSError as error:
        raise ConfigError(f"{flag} {given}: cannot be used ({error.strerror}); name another path") from None


def _require_room_for(flag: str, given: str, folder: Path) -> None:
    """Require a folder, or the nearest one above it that exists, in which this user may write."""
    existing = next(path for path in (folder, *folder.parents) if _mode(flag, given, path) is not None)
    if not existing.is_dir():
        raise ConfigError(f"{flag} {given}: {existing} is a file; name a folder")
    # The superuser may write everywhere, says the system, also where there are no files.
    if not os.access(existing, os.W_OK | os.X_OK) or existing.parts[1:2] in (("proc",), ("sys",)):
        raise ConfigError(f"{flag} {given}: {existing} is not writable; name a folder that is")
