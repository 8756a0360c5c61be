"""Finds the input files of preprocessing, divides them into shards, and reads the records of a shard's spans.

A file's name says what it is, in small letters or capitals: `.jsonl`, `.ndjson` and `.json` hold a JSON object a line,
`.parquet` and `.arrow` tables, and any other file is one document. All but tables may be compressed (`.gz`, `.zst`). A
folder that Hugging Face's `datasets` wrote, or that was downloaded from its hub, is read for its data files.

A record is a line, a row, or a whole text. One that is no document is yielded too, with the reason.
"""

from __future__ import annotations

import glob
import gzip
import importlib.util
import io
import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.paths import require_readable
from megatron_moe.io.program import note
from megatron_moe.io.texts import hub_hint

if TYPE_CHECKING:
    import pyarrow

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
    named: list[str] = []
    for item in inputs:
        matched = [] if os.path.exists(item) else matches(item)
        named += matched or [item]
    found: list[str] = []
    for item in named:
        if os.path.isdir(item):
            for path in _files_of_folder(item):
                if os.path.isfile(path):
                    found.append(path)
                    continue
                if not os.path.lexists(path):
                    raise ConfigError(f"--input {path} does not exist, which the dataset's description names")
                what = "no regular file" if os.path.exists(path) else "a link that leads nowhere"
                if refuse_empty:
                    raise ConfigError(f"--input {path} is {what}; take it out, or add --on-bad-line skip")
                note(f"{path} is {what}, and is left out")
        elif os.path.isfile(item):
            found.append(item)
        elif os.path.exists(item):
            raise ConfigError(f"--input {item} is no regular file: texts are read from files, not pipes or devices")
        else:
            raise ConfigError(f"--input {item} does not exist{hub_hint(item, 'dataset')}")
    missing: dict[str, str] = {}  # library -> the first file that needs it
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
        library = _LIBRARIES.get(_suffix(path))
        if library is not None and importlib.util.find_spec(library) is None:
            missing.setdefault(library, path)
    if missing:
        raise ConfigError(
            f"--input {next(iter(missing.values()))}: reading it needs {' and '.join(missing)}; pip install "
            f"{' '.join(missing)} (the extra `data` of this package)"
        )
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


def _files_of_folder(folder: str) -> list[str]:
    """Return the files of a folder, sorted; of one of Hugging Face's its data files."""
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _described(folder, "dataset_dict.json", "splits")
        if len(splits) != 1:
            _refuse_splits(folder, [os.path.join(folder, split) for split in splits])
        folder = os.path.join(folder, splits[0])
    if os.path.isfile(os.path.join(folder, "state.json")) and os.path.isfile(os.path.join(folder, "dataset_info.json")):
        return [os.path.join(folder, entry["filename"]) for entry in _described(folder, "state.json", "_data_files")]
    inside = sorted(_walk(folder, ()))
    if not inside:
        raise ConfigError(f"--input {folder} is a folder without files")
    # A download of the hub's has its attributes, or a card with a header.
    card = Path(folder, "README.md")
    downloaded = Path(folder, ".gitattributes").is_file() and not Path(folder, ".git").is_dir()
    if not downloaded and not (card.is_file() and card.read_bytes().partition(b"\n")[0].strip() == b"---"):
        return inside
    data = [path for path in inside if kind_of(path) != TEXT and os.path.basename(path) not in _DESCRIPTIONS]
    if not data:
        raise ConfigError(f"--input {folder}: a dataset of the hub without .parquet, .jsonl, .json or .arrow files")
    first_of_split: dict[str, str] = {}
    for path in data:
        words = re.split(r"[^a-z]+", os.path.relpath(path, folder).lower())
        names = [_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES]
        first_of_split.setdefault(names[0] if names else "", path)
    if len(first_of_split) > 1:
        _refuse_splits(folder, [f"{name or 'others'}: {path}" for name, path in sorted(first_of_split.items())])
    if len(data) < len(inside):
        note(f"{folder}: {len(data)} data files are read, {len(inside) - len(data)} others are not")
    return data


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


def _refuse_splits(folder: str, lines: list[str]) -> None:
    raise ConfigError(listing(f"--input {folder} has {len(lines)} splits; name the files or the folder of one", lines))


# ---- dividing


def plan_shards(files: list[str], shard_bytes: int | None = None) -> list[Shard]:
    """Return the shards in the order of the files.

    A file of JSON lines is cut at multiples of `shard_bytes`; files that are smaller are collected until they have
    as many bytes. Without `shard_bytes`, it depends on the size of the input alone.
    """
    wholes = []
    for path in files:
        status = os.stat(path)
        wholes.append(Span(path, 0, status.st_size, status.st_size, status.st_mtime_ns))
    if shard_bytes is None:
        # A power of two, so that the cuts stay where they are while an input grows by a little.
        shard_bytes = 1 << (sum(whole.size for whole in wholes) // _SHARDS).bit_length()
        shard_bytes = min(max(shard_bytes, SMALLEST_SHARD), LARGEST_SHARD)
    shards: list[Shard] = []
    small: list[Span] = []
    collected = 0
    for whole in wholes:
        if whole.size < shard_bytes:
            small.append(whole)
            collected += whole.size
        if small and (collected >= shard_bytes or whole.size >= shard_bytes):
            shards.append(tuple(small))
            small, collected = [], 0
        if whole.size < shard_bytes:
            continue
        can_be_cut = kind_of(whole.path) == LINES and not is_compressed(whole.path)
        step = shard_bytes if can_be_cut else whole.size
        for start in range(0, whole.size, step):
            shards.append((replace(whole, start=start, end=min(start + step, whole.size)),))
    if small:
        shards.append(tuple(small))
    return shards


# ---- opening


def opened(path: str) -> IO[bytes]:
    """Open a file of lines or of one text, decompressed."""
    if _suffix(path) == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if _suffix(path) == ".zst":
        return io.BufferedReader(_ZstdFile(path))
    return open(path, "rb")


class _ZstdFile(io.RawIOBase):
    """A reader of all frames of a .zst file. The library's own does not notice that a file is cut.

    Raises:
        EOFError: the file ends within a frame.
    """

    def __init__(self, path: str) -> None:
        self._file = io.FileIO(path)
        self._blocks = self._decompressed()
        self._rest = memoryview(b"")

    def _decompressed(self) -> Iterator[bytes]:
        import zstandard

        decompressor = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW)
        chunk = self._file.read(_ZSTD_CHUNK)
        while chunk:
            frame = decompressor.decompressobj()
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


_BOM = b"\xef\xbb\xbf"
_FORMATS = {
    b"\x1f\x8b": ("gzip", ".gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", ".zst"),
    b"\xfd7zX": ("xz", ""),
    b"PK\x03\x04": ("zip", ""),
    b"BZh": ("bzip2", ""),
    b"PAR1": ("Parquet", ".parquet"),
    b"ARRO": ("Arrow", ".arrow"),
}
"""How files begin whose name should say what they are -> format, and the end of a name with which it is read."""
EXCERPT = 80
"""Characters of a record in a report."""
_ROWS = 1024
_ONE_A_LINE = "; one object a line is read: `jq -c '.[]'` makes that of a list, `jq -c .` of objects over many lines"
_CHAT_KEYS = {"messages", "conversations", "conversation", "prompt", "completion", "response", "instruction"}
_OF_A_CHAT = "conversations are read with --chat-template"


class BadRecord(Exception):
    """Why a record is no document.

    Attributes:
        reason: one of a few names, by which records are counted.
        problem: a sentence for a message.
        lines_before: lines of the record before the place of the problem, where it is a text of many lines.
    """

    def __init__(self, reason: str, problem: str, lines_before: int = 0) -> None:
        super().__init__(reason, problem, lines_before)
        self.reason, self.problem, self.lines_before = reason, problem, lines_before


@dataclass(frozen=True)
class InputRecord:
    """A line, a row, or a text.

    Attributes:
        number: which record of its span it is, from 1.
        offset: the byte of the (decompressed) file at which it begins; None for a row.
        content: what was read; of a row only where it is bad.
        values: what `Take` made of it, for texts one text or list of texts per key; empty where the record is `bad`.
    """

    number: int
    offset: int | None
    content: bytes
    values: list[Any]
    bad: BadRecord | None = None


Take = Callable[[dict[str, Any], tuple[str, ...], Iterable[str]], list[Any]]
"""Makes values of a record, its keys that are read, and the names of all that the line or table has."""


def as_texts(value: str | list[str]) -> list[str]:
    """Return the texts of a value: itself, or those of a list, each of which is a sequence of its own."""
    return [value] if isinstance(value, str) else value


def read_span(span: Span, keys: tuple[str, ...], take: Take | None = None) -> Iterator[InputRecord]:
    """Yield the records of a span, good and bad. A text file is one document with the key "text".

    Args:
        take: what makes values of a record; None: one text or list of texts per key.

    Bad are empty and cut files, damaged compression, files of other formats, UTF-16, invalid UTF-8, lines that are no
    JSON object, missing and repeated keys, values that are neither a text nor a list of texts, and empty texts.
    """
    kind, take = kind_of(span.path), take or _values
    if span.size == 0:
        yield InputRecord(1, 0, b"", [], BadRecord("empty file", "the file is empty"))
    elif kind not in (LINES, TEXT):
        yield from _rows(span, keys, take)
    elif (other := _other_format(span.path, kind)) is not None:
        if span.start == 0:
            yield InputRecord(1, 0, b"", [], other)
    elif kind == LINES:
        yield from _lines(span, keys, take)
    else:
        content, bad = b"", None
        values: list[str | list[str]] = []
        try:
            with opened(span.path) as file:
                content = file.read()
            text = _decoded(content.removeprefix(_BOM), content.startswith(_BOM) * len(_BOM), whole_file=True)
            if not text:
                raise BadRecord("empty text", "the text is empty")
            values = [text]
        except BadRecord as error:
            bad = error
        except Exception as error:
            bad = _damaged(error)
        yield InputRecord(1, 0, content, values, bad)


def stopped_at(span: Span, record: InputRecord, bad: BadRecord) -> ConfigError:
    """Return the error that ends the work at a record which is no document: it names the line in the file."""
    place = f"row {record.number}"
    if record.offset is not None:
        number, left = record.number + bad.lines_before, span.start
        if left > 0:
            with open(span.path, "rb") as file:
                while left > 0:
                    block = file.read(min(left, 1 << 22))
                    number += block.count(b"\n")
                    left -= len(block)
                # The line that reaches into the span belongs to the one before.
                file.seek(span.start - 1)
                number += file.read(1) != b"\n"
        place = f"line {number}"
    return ConfigError(f"{span.path}, {place}: {bad.problem} (--on-bad-line skip leaves it out)")


# ---- texts and lines


def _other_format(path: str, kind: str) -> BadRecord | None:
    """Return what is wrong with a file that is compressed or a table against its name, or in UTF-16 or UTF-32.

    The latter begin with a mark, or have zeros in their first bytes.
    """
    try:
        with opened(path) as file:
            first = file.read(4)
    except Exception as error:
        _damaged(error)  # which raises what is not damage; whoever reads on reports that
        return None
    for begin, (name, suffix) in _FORMATS.items():
        # A text may begin with letters.
        if first.startswith(begin) and (kind == LINES or not begin.isalnum()):
            advice = "unpack it"
            if is_compressed(path):
                advice = "it was packed twice; unpack it"
            elif suffix:
                advice += f", or let its name end in {suffix}"
            return BadRecord("other format", f"the content is {name}; {advice}")
    if first in (b"\xff\xfe\0\0", b"\0\0\xfe\xff") or first.count(0) == 3:
        name = "UTF-32"
    elif first[:2] in (b"\xff\xfe", b"\xfe\xff") or first.count(0) == 2:
        name = "UTF-16"
    else:
        return None
    return BadRecord(name, f"the file is {name}; convert it: iconv -f {name} -t UTF-8")


def _damaged(error: Exception) -> BadRecord:
    """Return the reason of a file whose compression is cut or wrong; other errors are raised."""
    if isinstance(error, EOFError):
        reason = "cut file"
    elif isinstance(error, gzip.BadGzipFile) or type(error).__module__.partition(".")[0] in ("zlib", "zstandard"):
        reason = "damaged file"
    else:
        raise error
    return BadRecord(reason, f"the file is {reason.split()[0]} ({error})")


def _lines(span: Span, keys: tuple[str, ...], take: Take) -> Iterator[InputRecord]:
    """Yield the lines that begin in a span. A line across its start belongs to the span before."""
    number = 0
    decode = json.JSONDecoder(object_pairs_hook=partial(_object, keys)).decode
    with opened(span.path) as file:
        offset = span.start
        if offset > 0:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        # The length of a compressed file is not known: it is read to its end.
        while offset < span.end or is_compressed(span.path):
            number += 1
            try:
                line = file.readline()
            except Exception as error:
                yield InputRecord(number, offset, b"", [], _damaged(error))
                return
            if not line:
                if offset == 0:
                    yield InputRecord(number, 0, b"", [], BadRecord("empty file", "the file is empty"))
                return
            content = line.rstrip(b"\r\n")
            begins = len(_BOM) if offset == 0 and line.startswith(_BOM) else 0
            try:
                text = _decoded(content[begins:], offset + begins)
                if not text.strip():
                    raise BadRecord("empty line", "the line is empty")
                try:
                    found = decode(text)
                except (ValueError, RecursionError) as error:
                    if not line.endswith(b"\n"):
                        problem = f"the file ends within the line, no valid JSON ({error})"
                        raise BadRecord("cut line", problem) from None
                    advice = _ONE_A_LINE if text.strip() in ("[", "{") else ""
                    raise BadRecord("invalid JSON", f"no valid JSON ({error}){advice}") from None
                if not isinstance(found, dict):
                    advice = _ONE_A_LINE if isinstance(found, list) else ""
                    problem = f"a JSON object is expected, this is a {type(found).__name__}{advice}"
                    raise BadRecord("not an object", problem)
                record = InputRecord(number, offset, content, take(found, keys, found))
            except BadRecord as bad:
                record = InputRecord(number, offset, content, [], bad)
            yield record
            offset += len(line)


def _object(keys: tuple[str, ...], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, in which none of the keys that are read is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        for key in keys:
            if names.count(key) > 1:
                raise BadRecord("repeated key", f"key {key!r} is given {names.count(key)} times; keep one of them")
    return found


def _decoded(content: bytes, offset: int, *, whole_file: bool = False) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        problem = f"invalid UTF-8, byte 0x{content[at]:02x} at offset {offset + at}"
        raise BadRecord("invalid UTF-8", problem, content.count(b"\n", 0, at) if whole_file else 0) from None


def _values(record: dict[str, Any], keys: tuple[str, ...], there: Iterable[str]) -> list[str | list[str]]:
    """Return the texts of a record; `there` names all that the line or table has."""
    values: list[str | list[str]] = []
    for key in keys:
        if key not in record:
            names = ", ".join(map(repr, there)) or "no keys"
            advice = _OF_A_CHAT if _CHAT_KEYS.intersection(there) else "see --json-keys"
            raise BadRecord("missing key", f"key {key!r} is missing (it has: {names}); {advice}")
        value = record[key]
        if isinstance(value, UnicodeDecodeError):
            raise BadRecord("invalid UTF-8", f"the text of {key!r} has invalid UTF-8")
        if isinstance(value, Exception):
            raise BadRecord("not a text", f"the value of {key!r} is not a text: {value}")
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            advice = f"; {_OF_A_CHAT}" if key in _CHAT_KEYS else ""
            what = f"is a {type(value).__name__}, not a text or a list of texts"
            raise BadRecord("not a text", f"the value of {key!r} {what}{advice}")
        try:
            for text in as_texts(value):
                if not text.isascii():
                    text.encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"the text of {key!r} contains a lone surrogate, which UTF-8 cannot encode ({error.reason})"
            raise BadRecord("lone surrogate", problem) from None
        if not any(as_texts(value)):
            raise BadRecord("empty text", f"the text of {key!r} is empty")
        values.append(value)
    return values


# ---- tables


def _rows(span: Span, keys: tuple[str, ...], take: Take) -> Iterator[InputRecord]:
    import pyarrow

    number = 0
    try:
        with closing(_batches(span.path, keys)) as batches:
            for batch, there in batches:
                columns = {key: _column(batch, key) for key in keys if key in batch.schema.names}
                for row in range(batch.num_rows):
                    number += 1
                    values = {key: column[row] for key, column in columns.items()}
                    try:
                        record = InputRecord(number, None, b"", take(values, keys, there))
                    except BadRecord as bad:
                        shown = repr(values)[: 4 * EXCERPT].encode("utf-8", "backslashreplace")
                        record = InputRecord(number, None, shown, [], bad)
                    yield record
    except (pyarrow.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the system; the library's own have no number
            raise
        problem = f"the file is damaged ({str(error).splitlines()[0]})"
        yield InputRecord(number + 1, None, b"", [], BadRecord("damaged file", problem))
        return
    if number == 0:
        yield InputRecord(1, None, b"", [], BadRecord("empty file", "the table has no rows"))


def _batches(path: str, keys: tuple[str, ...]) -> Generator[tuple[pyarrow.RecordBatch, list[str]], None, None]:
    """Yield the rows of a table, a batch after the other, with the columns that are needed; and the names of all."""
    import pyarrow

    if kind_of(path) == ARROW:
        with pyarrow.memory_map(path) as file:
            # datasets writes streams; a file with a footer begins with the format's name.
            if file.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(file)
                for i in range(reader.num_record_batches):
                    yield reader.get_batch(i), reader.schema.names
            else:
                file.seek(0)
                for batch in pyarrow.ipc.open_stream(file):
                    yield batch, batch.schema.names
        return
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        # A table without any of the keys is read for its rows.
        names = table.schema_arrow.names
        needed = [key for key in keys if key in names] or names[:1]
        for batch in table.iter_batches(_ROWS, columns=needed):
            yield batch, names


def _without_none(value: object) -> object:
    """Return a value without the keys that a table's row lacks, but other rows have."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return list(map(_without_none, value))
    return value


def _column(batch: pyarrow.RecordBatch, key: str) -> list[Any]:
    """Return the values of a column; one that Python has not, such as a text that is no UTF-8, is the error instead."""
    if batch.schema.names.count(key) > 1:
        return [ValueError("there are several columns of that name")] * batch.num_rows
    column = batch.column(key)
    try:
        return list(map(_without_none, column.to_pylist()))
    except (ValueError, OverflowError):
        values: list[Any] = []
        for value in column:
            try:
                values.append(_without_none(value.as_py()))
            except (ValueError, OverflowError) as error:  # UnicodeDecodeError, and times that Python's cannot be
                values.append(error)
        return values
