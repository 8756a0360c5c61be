"""Finds the input files of preprocessing, opens them, and divides them into shards that a worker reads independently.

A file's name says what it is, in small letters or capitals: `.jsonl`, `.ndjson` and `.json` hold a JSON object a line,
`.parquet` and `.arrow` tables, and any other file is one document. All but tables may be compressed (`.gz`, `.zst`). A
folder that Hugging Face's `datasets` wrote, or that was downloaded from its hub, is read for its data files.
"""

from __future__ import annotations

import glob
import gzip
import importlib.util
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.paths import require_readable
from megatron_moe.io.program import note
from megatron_moe.io.texts import hub_hint

SMALLEST_SHARD, LARGEST_SHARD = 1 << 20, 1 << 28
_SHARDS = 256
"""Shards of an input that lets them be neither smaller nor larger than the bounds."""

LINES, TEXT, PARQUET, ARROW = "lines", "text", "parquet", "arrow"
_KINDS = {".jsonl": LINES, ".jsonlines": LINES, ".ndjson": LINES, ".json": LINES, ".parquet": PARQUET, ".arrow": ARROW}
_COMPRESSED = (".gz", ".zst")
_NOT_READ = (".bz2", ".xz", ".lz4", ".7z", ".zip", ".tar", ".tgz")
_TABLES = {".csv": "csv(%r)", ".tsv": "csv(%r, sep='\\t')", ".feather": "feather(%r)", ".orc": "orc(%r)"}
_TABLES |= dict.fromkeys((".xlsx", ".xls", ".ods"), "excel(%r)")
"""Names of tables that are not read -> what reads them, behind pandas.read_."""
_LIBRARIES = {".zst": "zstandard", ".parquet": "pyarrow", ".arrow": "pyarrow"}

_ZSTD_CHUNK = 1 << 14
_LONGEST_WINDOW = 1 << 31

# What datasets and the hub write next to the data.
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SPLIT_NAMES = {"train": "train", "training": "train", "valid": "validation", "validation": "validation"}
_SPLIT_NAMES |= {"val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test"}


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin in bytes [start, end), or a whole file: compressed ones and tables are not cut.

    Size in bytes and time of the last change are those of the plan.
    """

    path: str
    start: int
    end: int
    size: int
    mtime_ns: int

    @property
    def is_whole(self) -> bool:
        """Whether the span is all of its file."""
        return self.start == 0 and self.end == self.size

    def require_unchanged(self) -> None:
        """Refuse a file that is another one than when the work was planned.

        Raises:
            ConfigError: its size or the time of its last change differs.
        """
        about = os.stat(self.path)
        if (about.st_size, about.st_mtime_ns) != (self.size, self.mtime_ns):
            raise ConfigError(f"{self.path} was written to while it was read; wait until it is complete and run again")


Shard = tuple[Span, ...]
"""Consecutive spans that one worker reads."""


def kind_of(path: str) -> str:
    """Return LINES, TEXT, PARQUET or ARROW."""
    return _KINDS.get(_suffix(_uncompressed_name(path)), TEXT)


def is_compressed(path: str) -> bool:
    """Return whether a file's name says that it is compressed."""
    return _suffix(path) in _COMPRESSED


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _uncompressed_name(path: str) -> str:
    return os.path.splitext(path)[0] if is_compressed(path) else path


# ---- finding


def find_inputs(inputs: tuple[str, ...] | list[str], *, refuse_empty: bool = True) -> list[str]:
    """Return the input files in the order given.

    A folder is replaced by the files in it and in its subfolders, sorted, without hidden names; one of Hugging Face's
    by its data files; a pattern with `*`, `?` or `[` that is no name itself, by what it matches, sorted.

    Args:
        refuse_empty: refuse files in a folder that are empty or no files, such as broken links; otherwise the first
            are kept, and the second left out with a note.

    Raises:
        ConfigError: a path does not exist, a folder has no files or several splits, a file is of a kind that is not
            read, or needs a library that is missing.
    """
    found: list[str] = []
    for item in _matched(inputs):
        if os.path.isdir(item):
            found += _regular(_files_of_folder(item), refuse_empty)
        elif os.path.isfile(item):
            found.append(item)
        elif os.path.exists(item):
            raise ConfigError(
                f"--input {item} is no regular file: texts are read from files, not from pipes or devices"
            )
        else:
            raise ConfigError(f"--input {item} does not exist{hub_hint(item, 'dataset')}")
    for path in found:
        require_readable("--input", path)
        if refuse_empty and os.path.getsize(path) == 0:
            raise ConfigError(f"{path}, line 1: the file is empty; take it out of --input, or add --on-bad-line skip")
        name = _uncompressed_name(path)
        if _suffix(name) in _NOT_READ or (name != path and kind_of(path) in (PARQUET, ARROW)):
            raise ConfigError(f"--input {path}: is not read; .gz and .zst of JSON lines and of texts are, so unpack it")
        if (read := _TABLES.get(_suffix(name))) is not None:
            lines = f"{os.path.splitext(os.path.basename(name))[0]}.jsonl"
            raise ConfigError(
                f"--input {path}: is a table that is not read, and would be one document; make JSON lines of it: "
                f"pandas.read_{read % path}.to_json({lines!r}, orient='records', lines=True)"
            )
    _require_libraries(found)
    return found


def _matched(inputs: tuple[str, ...] | list[str]) -> list[str]:
    found: list[str] = []
    for item in inputs:
        found += [item] if os.path.exists(item) else matches(item) or [item]
    return found


def matches(pattern: str) -> list[str]:
    """Return what a pattern of `--input` matches, sorted.

    Raises:
        ConfigError: it has `**`, which shells read in different ways, and Python as a walk through every loop of links.
    """
    if "**" in pattern:
        raise ConfigError(
            f"--input {pattern}: ** is not read; give the folder, which is read with its subfolders, or a * for each "
            "level, e.g. 'data/*/*.jsonl'"
        )
    return sorted(glob.glob(pattern))


def _regular(paths: list[str], refuse: bool) -> list[str]:
    """Return the paths that are files or links to one; the others of a folder are refused, or left out with a note."""
    found = []
    for path in paths:
        if os.path.isfile(path):
            found.append(path)
            continue
        if not os.path.lexists(path):
            raise ConfigError(f"--input {path} does not exist, which the dataset's description names")
        what = "a link that leads nowhere" if os.path.islink(path) and not os.path.exists(path) else "no regular file"
        if refuse:
            raise ConfigError(f"--input {path} is {what}; take it out, or add --on-bad-line skip")
        note(f"{path} is {what}, and is left out")
    return found


def _files_of_folder(folder: str) -> list[str]:
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _described(folder, "dataset_dict.json", "splits")
        if len(splits) != 1:
            _refuse_splits(folder, [os.path.join(folder, split) for split in splits])
        folder = os.path.join(folder, splits[0])
    if os.path.isfile(os.path.join(folder, "state.json")) and os.path.isfile(os.path.join(folder, "dataset_info.json")):
        return [os.path.join(folder, entry["filename"]) for entry in _described(folder, "state.json", "_data_files")]
    inside = list(_walk(folder, ()))
    if not inside:
        raise ConfigError(f"--input {folder} is a folder without files")
    return _data_files(folder, sorted(inside)) if _is_from_hub(folder) else sorted(inside)


def _walk(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """Yield what is in a folder and in its subfolders and is no folder.

    Links to folders are followed, but not to one that the link is in.
    """
    above = (*above, os.path.realpath(folder))
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        if not os.path.isdir(path):
            yield path
        elif os.path.realpath(path) not in above:
            yield from _walk(path, above)


def _described(folder: str, name: str, key: str) -> list[Any]:
    """Return a list that one of the descriptions of `datasets` has."""
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not what save_to_disk of datasets writes ({error!r})") from error
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{path}: {key} is empty; save the dataset again")
    return found


def _is_from_hub(folder: str) -> bool:
    """Return whether a folder is a download of a dataset: it has the hub's attributes, or a card with a header."""
    if os.path.isfile(os.path.join(folder, ".gitattributes")) and not os.path.isdir(os.path.join(folder, ".git")):
        return True
    card = os.path.join(folder, "README.md")
    if not os.path.isfile(card):
        return False
    with open(card, "rb") as file:
        return file.readline().strip() == b"---"


def _data_files(folder: str, inside: list[str]) -> list[str]:
    data = [path for path in inside if kind_of(path) != TEXT and os.path.basename(path) not in _DESCRIPTIONS]
    if not data:
        raise ConfigError(f"--input {folder}: a dataset of the hub without .parquet, .jsonl, .json or .arrow files")
    splits: dict[str, list[str]] = {}
    for path in data:
        words = re.split(r"[^a-z]+", os.path.relpath(path, folder).lower())
        splits.setdefault(next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), ""), []).append(path)
    if len(splits) > 1:
        _refuse_splits(folder, [f"{name or 'others'}: {paths[0]}" for name, paths in sorted(splits.items())])
    if len(data) < len(inside):
        note(f"{folder}: {len(data)} data files are read, {len(inside) - len(data)} others are not")
    return data


def _refuse_splits(folder: str, lines: list[str]) -> None:
    raise ConfigError(listing(f"--input {folder} has {len(lines)} splits; name the files or the folder of one", lines))


def _require_libraries(files: list[str]) -> None:
    needed: dict[str, str] = {}
    for path in files:
        library = _LIBRARIES.get(_suffix(path))
        if library is not None:
            needed.setdefault(library, path)
    missing = [library for library in needed if importlib.util.find_spec(library) is None]
    if missing:
        raise ConfigError(
            f"--input {needed[missing[0]]}: reading it needs {' and '.join(missing)}; pip install {' '.join(missing)} "
            "(the extra `data` of this package)"
        )


# ---- dividing


def plan_shards(files: list[str], shard_bytes: int | None = None) -> list[Shard]:
    """Return the shards in the order of the files.

    A file of JSON lines is cut at multiples of `shard_bytes`; files that are smaller are collected until they have
    as many bytes. Without `shard_bytes`, it depends on the size of the input alone.
    """
    about = [(path, os.stat(path)) for path in files]
    size = shard_bytes or _shard_bytes(sum(status.st_size for _, status in about))
    shards: list[Shard] = []
    small: list[Span] = []
    collected = 0
    for path, status in about:
        whole = Span(path, 0, status.st_size, status.st_size, status.st_mtime_ns)
        if status.st_size < size:
            small.append(whole)
            collected += whole.size
        if small and (collected >= size or status.st_size >= size):
            shards.append(tuple(small))
            small, collected = [], 0
        if status.st_size < size:
            continue
        step = size if kind_of(path) == LINES and not is_compressed(path) else status.st_size
        for start in range(0, status.st_size, step):
            end = min(start + step, status.st_size)
            shards.append((Span(path, start, end, status.st_size, status.st_mtime_ns),))
    return [*shards, tuple(small)] if small else shards


def _shard_bytes(total: int) -> int:
    """Return a power of two, so that the cuts stay where they are while an input grows by a little."""
    return min(max(1 << (total // _SHARDS).bit_length(), SMALLEST_SHARD), LARGEST_SHARD)


# ---- opening


def opened(path: str) -> IO[bytes]:
    """Open a file of lines or of one text, decompressed."""
    if _suffix(path) == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if _suffix(path) == ".zst":
        return io.BufferedReader(_ZstdFile(path))
    return open(path, "rb")


def damage(error: Exception) -> str | None:
    """Return what is wrong with a compressed file whose reading raised an error; None for errors of other kinds."""
    if isinstance(error, EOFError):
        return "cut file"
    if isinstance(error, gzip.BadGzipFile) or type(error).__module__.partition(".")[0] in ("zlib", "zstandard"):
        return "damaged file"
    return None


class _ZstdFile(io.RawIOBase):
    """A reader of all frames of a .zst file. The library's own does not notice that a file is cut.

    Raises:
        EOFError: the file ends within a frame.
    """

    def __init__(self, path: str) -> None:
        import zstandard

        self._file = io.FileIO(path)
        self._frame: Callable[[], Any] = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj
        self._blocks = self._decompressed()
        self._rest = memoryview(b"")

    def _decompressed(self) -> Iterator[bytes]:
        chunk = self._file.read(_ZSTD_CHUNK)
        while chunk:
            frame = self._frame()
            while True:
                yield frame.decompress(chunk)
                if frame.eof:
                    break
                chunk = self._file.read(_ZSTD_CHUNK)
                if not chunk:
                    raise EOFError("the file ends within a frame")
            chunk = frame.unused_data or self._file.read(_ZSTD_CHUNK)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
