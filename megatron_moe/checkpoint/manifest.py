"""The manifest of a step: every file with its size and SHA-256, itself under a digest. No torch.

    {"format": 2, "iteration": 50, "files": {"__0_0.distcp": {"bytes": 123, "sha256": "..."}}, "digest": "..."}

The file is byte-equal to its own canonical form and `digest` is the SHA-256 of that form without `digest`, so every
flipped bit in it is seen. It protects against damage, not malice: who can write a step can write its manifest, which is
why every pickle is read under restriction whatever the manifest says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_moe.io.files import canonical_json, sync, write_bytes
from megatron_moe.io.hashing import FileEntry, blocks_of_file
from megatron_moe.io.object_storage import ObjectPath, StoreError

NAME = "manifest.json"
FORMAT = 2
LARGEST = 256 * 2**20
"""The largest manifest that is read, in bytes: enough for a million files."""

_STEP = re.compile(r"(?:\.iter_(\d{7,})\.saving|iter_(\d{7,}))", re.ASCII)
_KEYS = {"format", "iteration", "files", "digest"}


@dataclass(frozen=True)
class Manifest:
    """The files of a step; names are relative to its folder, with `/` between the parts."""

    iteration: int
    files: dict[str, FileEntry]
    digest: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, the manifest not counted."""
        return sum(entry["bytes"] for entry in self.files.values())


class ManifestError(Exception):
    """A manifest is missing, damaged, or not of this format; the message is the reason in words that follow "it"."""


class OtherFormatError(ManifestError):
    """The step was saved by an earlier or a later version of this code."""


def write(step: Path, iteration: int, files: dict[str, FileEntry]) -> None:
    """Write the manifest of a step that is not visible yet, and flush it and the folder to disk.

    In an object store, this makes the step visible.

    Raises:
        ValueError: an entry is not one that `read` accepts. OSError: it cannot be written.
    """
    for name, entry in files.items():
        if wrong := _wrong_entry(name, entry):
            raise ValueError(f"{step / NAME}: {wrong}")
    content: dict[str, Any] = {"format": FORMAT, "iteration": iteration, "files": files}
    content["digest"] = _digest(content)
    write_bytes(step / NAME, canonical_json(content))
    sync(step)


def read(step: Path) -> Manifest:
    """Read the manifest of a step and check it in itself; the files it names are not read.

    Raises:
        ManifestError: it is missing, damaged, not canonical, or of another format. StoreError: its store failed.
    """
    path = step / NAME
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ManifestError(f"its {NAME} is not a plain file")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise ManifestError(f"it has no {NAME}, the mark of a complete step") from None
    except StoreError:
        raise
    except OSError as error:
        raise ManifestError(f"its {NAME} cannot be read ({error.strerror})") from error
    if len(data) > LARGEST:
        raise ManifestError(f"its {NAME} has more than {LARGEST} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"its {NAME} is damaged: it is not JSON ({str(error)[:80]})") from None
    if not isinstance(content, dict):
        raise ManifestError(f"its {NAME} is damaged: it holds no object")
    files, sealed = content.get("files"), canonical_json(content) == data and content.get("digest") == _digest(content)
    # Of format 1: sizes alone; damage cannot turn one format into the other.
    if set(content) == {"files"} and isinstance(files, dict) and all(type(size) is int for size in files.values()):
        raise OtherFormatError("it was saved by an earlier version (format 1, without checksums)")
    if sealed and isinstance(content.get("format"), int) and content["format"] > FORMAT:
        raise OtherFormatError(f"it was saved by a later version (format {content['format']}; this one reads {FORMAT})")
    wrong: str | None = None
    if not sealed:
        wrong = "its digest is not that of its content"
    elif set(content) != _KEYS:
        wrong = f"it holds the keys {sorted(content)[:8]} instead of {sorted(_KEYS)}"
    elif content["format"] != FORMAT or type(content["format"]) is not int:
        wrong = f"its format is {content['format']!r} instead of {FORMAT}"
    elif type(content["iteration"]) is not int or content["iteration"] < 0 or not isinstance(files, dict):
        wrong = f"its iteration is {content['iteration']!r} and its list of files a {type(files).__name__}"
    else:
        wrong = next((found for name, entry in files.items() if (found := _wrong_entry(name, entry))), None)
    if wrong is not None:
        raise ManifestError(f"its {NAME} is damaged: {wrong}")
    return Manifest(content["iteration"], content["files"], content["digest"])


def structure_defect(step: Path) -> str | None:
    """Return what is wrong with the names and sizes of a step's files, in words that follow "it"; None if nothing is.

    The manifest has to be sound and of the iteration that the folder is named for, and the folder has to hold exactly
    the files of the manifest, as plain files of the right sizes. No content is read.
    """
    named = _STEP.fullmatch(step.name)
    if named is None:
        return "its folder is not named iter_ and the iteration"
    try:
        manifest = read(step)
    except ManifestError as error:
        return str(error)
    if manifest.iteration != int(named.group(1) or named.group(2)):
        return f"its {NAME} is that of step {manifest.iteration}"
    return files_defect(step, manifest.files)


def files_defect(step: Path, files: dict[str, FileEntry]) -> str | None:
    """Return how the files of a folder differ from these in names and sizes, its manifest apart; None if they agree."""
    found: dict[str, int] = {}
    try:
        for name, status in _walk(step):
            if not stat.S_ISREG(status.st_mode):
                kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a plain file"
                return f"{name} is {kind}"
            found[name] = status.st_size
    except StoreError:
        raise
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    found.pop(NAME, None)
    for name, entry in files.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != entry["bytes"]:
            return f"{name} has {found[name]} bytes instead of {entry['bytes']}"
    extra = sorted(found.keys() - files.keys())
    return f"{extra[0]} is not one of its files" if extra else None


def content_defect(step: Path, names: Iterable[str], advance: Callable[[int], object] | None = None) -> str | None:
    """Return which of these files does not hold what was saved, the first one, in words that follow "it", or None.

    Args:
        names: files of the manifest.
        advance: called with the number of bytes of each block that was read.
    """
    for outcome in checked_content(step, names):
        if isinstance(outcome, str):
            return outcome
        if advance is not None:
            advance(outcome)
    return None


def checked_content(step: Path, names: Iterable[str]) -> Iterator[int | str]:
    """Hash files block by block: yield the number of bytes of each block, and a defect at the end if there is one."""
    try:
        files = read(step).files
    except ManifestError as error:
        yield str(error)
        return
    for name in names:
        hashed = hashlib.sha256()
        try:
            for block in blocks_of_file(step / name):
                hashed.update(block)
                yield len(block)
        except StoreError:
            raise
        except OSError as error:
            yield f"{name} cannot be read ({error.strerror})"
            return
        if hashed.hexdigest() != files[name]["sha256"]:
            yield f"{name} does not hold what was saved: its SHA-256 is another"
            return


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json({key: value for key, value in content.items() if key != "digest"})).hexdigest()


def _wrong_entry(name: str, entry: object) -> str | None:
    """Return what is wrong with an entry, or None; its name has to be a plain relative path inside the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or ".." in path.parts or name in (".", NAME) or not name.isprintable():
        return f"{name!r} is not the name of a file of a step"
    if not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"}:
        return f"{name} has no size and SHA-256"
    if type(entry["bytes"]) is not int or entry["bytes"] < 0:
        return f"{name} has the size {entry['bytes']!r}"
    if not isinstance(entry["sha256"], str) or not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
        return f"{name} has the SHA-256 {entry['sha256']!r}"
    return None


def _walk(folder: Path, before: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield name and status of everything below a folder that is not a folder itself; links are not followed."""
    if isinstance(folder, ObjectPath):
        yield from folder.walk_files()
        return
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = before + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(folder / entry.name, f"{name}/")
            else:
                yield name, entry.stat(follow_symlinks=False)
