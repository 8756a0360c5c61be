"""Reads documents from JSON lines, text files, and folders of both, in units that a worker reads independently.

A unit of a `.jsonl` file is a byte range: the worker takes the lines that begin in it. Lines are not counted while they
are read; for an error, the newlines before the line are counted, so that the message can name its number.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_moe.config.errors import ConfigError

UNIT_BYTES = 1 << 18
_JSONL = (".jsonl", ".json")


@dataclass(frozen=True)
class InputUnit:
    """A unit of work: the lines of one jsonl file that begin in bytes [start, end), or whole text files."""

    paths: tuple[str, ...]
    start: int
    end: int
    is_jsonl: bool

    @property
    def num_bytes(self) -> int:
        """Size of the unit in bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class DocumentLocation:
    """The beginning of a document: a file and a byte offset in it."""

    path: str
    offset: int

    def error(self, problem: str, extra_bytes: int = 0) -> ConfigError:
        """Return the error that names the file and the line (from 1), `extra_bytes` after the document's beginning."""
        return ConfigError(f"{self.path}, line {_line_number(self.path, self.offset + extra_bytes)}: {problem}")


def find_inputs(inputs: tuple[str, ...] | list[str]) -> list[str]:
    """Return the input files in the order given.

    A folder is replaced by the files in it and in its subfolders, sorted, without hidden names; a pattern with `*`, `?`
    or `[` that is no name itself, by what it matches, sorted.

    Raises:
        ConfigError: a path does not exist, a folder has no files, or a file is empty.
    """
    found: list[str] = []
    for item in _matched(inputs):
        if os.path.isdir(item):
            inside = []
            for folder, subfolders, names in os.walk(item):
                subfolders[:] = [name for name in subfolders if not name.startswith(".")]
                inside += [os.path.join(folder, name) for name in names if not name.startswith(".")]
            if not inside:
                raise ConfigError(f"--input {item} is a folder without files")
            found += sorted(inside)
        elif os.path.isfile(item):
            found.append(item)
        else:
            raise ConfigError(f"--input {item} does not exist")
    for path in found:
        if os.path.getsize(path) == 0:
            raise ConfigError(f"{path}, line 1: the file is empty; take it out of --input")
        if path.endswith(".gz"):
            raise ConfigError(f"--input {path} is compressed; give the file that gunzip makes of it")
    return found


def _matched(inputs: tuple[str, ...] | list[str]) -> list[str]:
    found: list[str] = []
    for item in inputs:
        found += [item] if os.path.exists(item) else sorted(glob.glob(item)) or [item]
    return found


def as_texts(value: str | list[str]) -> list[str]:
    """Return the texts of a value: itself, or those of a list, each of which is a sequence of its own."""
    return [value] if isinstance(value, str) else value


def work_units(files: list[str], unit_bytes: int = UNIT_BYTES) -> list[InputUnit]:
    """Return units of about `unit_bytes` in the order of the files: jsonl files are split, text files are grouped."""
    units: list[InputUnit] = []
    texts: list[str] = []
    size = 0

    def close_texts() -> None:
        nonlocal texts, size
        if texts:
            units.append(InputUnit(tuple(texts), 0, size, is_jsonl=False))
        texts, size = [], 0

    for path in files:
        length = os.path.getsize(path)
        if path.endswith(_JSONL):
            close_texts()
            for start in range(0, length, unit_bytes):
                units.append(InputUnit((path,), start, min(start + unit_bytes, length), is_jsonl=True))
        else:
            texts.append(path)
            size += length
            if size >= unit_bytes:
                close_texts()
    close_texts()
    return units


def read_unit(unit: InputUnit, keys: tuple[str, ...]) -> Iterator[tuple[DocumentLocation, list[str | list[str]]]]:
    """Yield (location, one text or list of texts per key) for each document of a unit.

    A text file is one document with the key "text".

    Raises:
        ConfigError: naming file and line, for invalid UTF-8, a line that is not a JSON object, a missing key, a value
            that is neither a text nor a list of texts, or an empty text.
    """
    if unit.is_jsonl:
        for offset, line in _lines_beginning_in(unit):
            location = DocumentLocation(unit.paths[0], offset)
            yield location, _texts_of_line(line, keys, location)
        return
    for path in unit.paths:
        location = DocumentLocation(path, 0)
        with open(path, "rb") as file:
            text = _decode(file.read(), location)
        if keys != ("text",):
            raise ConfigError(
                f"{path} is a text file, whose only key is text; --json-keys {' '.join(keys)} needs .jsonl files"
            )
        yield location, [text]


def _lines_beginning_in(unit: InputUnit) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line without its newline). A line across the unit's start belongs to the unit before."""
    with open(unit.paths[0], "rb") as file:
        offset = unit.start
        if offset > 0:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        while offset < unit.end:
            line = file.readline()
            if not line:
                return
            yield offset, line.rstrip(b"\r\n")
            offset += len(line)


def _texts_of_line(line: bytes, keys: tuple[str, ...], location: DocumentLocation) -> list[str | list[str]]:
    text = _decode(line, location)
    if not text.strip():
        raise location.error("the line is empty")
    try:
        record = json.loads(text)
    except ValueError as error:
        raise location.error(f"no valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise location.error(f"a JSON object is expected, this is a {type(record).__name__}")
    values: list[str | list[str]] = []
    for key in keys:
        if key not in record:
            raise location.error(
                f"key {key!r} is missing (it has: {', '.join(map(repr, record)) or 'no keys'}); see --json-keys"
            )
        value = record[key]
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            raise location.error(f"the value of {key!r} is a {type(value).__name__}, not a text or a list of texts")
        for text in as_texts(value):
            if not text.isascii():
                _refuse_lone_surrogates(text, key, location)
        if not any(as_texts(value)):
            raise location.error(f"the text of {key!r} is empty")
        values.append(value)
    return values


def _refuse_lone_surrogates(value: str, key: str, location: DocumentLocation) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise location.error(
            f"the text of {key!r} contains a lone surrogate, which UTF-8 cannot encode ({error.reason})"
        ) from error


def _decode(content: bytes, location: DocumentLocation) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"invalid UTF-8, byte 0x{content[error.start]:02x} at offset {location.offset + error.start}"
        raise location.error(problem, extra_bytes=error.start) from error


def _line_number(path: str, offset: int) -> int:
    newlines = 0
    with open(path, "rb") as file:
        while offset > 0:
            block = file.read(min(offset, 1 << 22))
            if not block:
                break
            newlines += block.count(b"\n")
            offset -= len(block)
    return newlines + 1
