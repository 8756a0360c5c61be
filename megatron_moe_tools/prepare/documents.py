"""Reads the records of a span: the lines of a JSON lines file, the rows of a table, or a file that is one text.

A record that is no document is yielded too, with the reason: what to do with it is decided elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_moe_tools.prepare.inputs import ARROW, LINES, TEXT, Span, damage, is_compressed, kind_of, opened

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
_EXCERPT = 80
"""Characters of a record in a report."""
_ROWS = 1024
_ONE_A_LINE = "; one object a line is read: `jq -c '.[]'` makes that of a list, `jq -c .` of objects over many lines"
_CHAT_KEYS = {"messages", "conversations", "conversation", "prompt", "completion", "response", "instruction"}
_OF_A_CHAT = (
    "chat templates are not applied here: write each conversation as one text first, with "
    "tokenizer.apply_chat_template(messages, tokenize=False) of transformers"
)


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
        values: one text or list of texts per key; empty where the record is `bad`.
    """

    number: int
    offset: int | None
    content: bytes
    values: list[str | list[str]]
    bad: BadRecord | None = None

    def excerpt(self) -> str:
        """Return the beginning of the record."""
        if self.values and not self.content:
            return as_texts(self.values[0])[0][:_EXCERPT]
        return self.content[: 4 * _EXCERPT].decode("utf-8", errors="backslashreplace")[:_EXCERPT]


def as_texts(value: str | list[str]) -> list[str]:
    """Return the texts of a value: itself, or those of a list, each of which is a sequence of its own."""
    return [value] if isinstance(value, str) else value


def read_span(span: Span, keys: tuple[str, ...]) -> Iterator[InputRecord]:
    """Yield the records of a span, good and bad. A text file is one document with the key "text".

    Bad are empty and cut files, damaged compression, files of other formats, UTF-16, invalid UTF-8, lines that are no
    JSON object, missing and repeated keys, values that are neither a text nor a list of texts, and empty texts.
    """
    kind = kind_of(span.path)
    if span.size == 0:
        yield InputRecord(1, 0, b"", [], BadRecord("empty file", "the file is empty"))
    elif kind not in (LINES, TEXT):
        yield from _rows(span, keys)
    elif (other := _other_format(span.path, kind)) is not None:
        if span.start == 0:
            yield InputRecord(1, 0, b"", [], other)
    elif kind == TEXT:
        yield _whole_text(span.path)
    else:
        yield from _lines(span, keys)


def line_number(span: Span, record: InputRecord) -> int:
    """Return the number of a record's line in its file, from 1, where the record knows it in its span."""
    number = record.number + (record.bad.lines_before if record.bad is not None else 0)
    left = span.start
    if left > 0:
        with open(span.path, "rb") as file:
            while left > 0:
                block = file.read(min(left, 1 << 22))
                number += block.count(b"\n")
                left -= len(block)
            # The line that reaches into the span belongs to the one before.
            file.seek(span.start - 1)
            number += file.read(1) != b"\n"
    return number


# ---- texts and lines


def _other_format(path: str, kind: str) -> BadRecord | None:
    """Return what is wrong with a file that is compressed or a table against its name, or in UTF-16 or UTF-32.

    The latter begin with a mark, or have zeros in their first bytes.
    """
    try:
        with opened(path) as file:
            first = file.read(4)
    except Exception as error:
        if damage(error) is None:
            raise
        return None
    for begin, (name, suffix) in _FORMATS.items():
        # A text may begin with letters.
        if first.startswith(begin) and (kind == LINES or not begin.isalnum()):
            advice = f"unpack it, or let its name end in {suffix}" if suffix else "unpack it"
            if is_compressed(path):
                advice = "it was packed twice; unpack it"
            return BadRecord("other format", f"the content is {name}; {advice}")
    if first in (b"\xff\xfe\0\0", b"\0\0\xfe\xff") or first.count(0) == 3:
        name = "UTF-32"
    elif first[:2] in (b"\xff\xfe", b"\xfe\xff") or first.count(0) == 2:
        name = "UTF-16"
    else:
        return None
    return BadRecord(name, f"the file is {name}; convert it: iconv -f {name} -t UTF-8")


def _whole_text(path: str) -> InputRecord:
    content = b""
    try:
        with opened(path) as file:
            content = file.read()
        text = _decoded(content.removeprefix(_BOM), content.startswith(_BOM) * len(_BOM), whole_file=True)
        if not text:
            raise BadRecord("empty text", "the text is empty")
        return InputRecord(1, 0, content, [text])
    except BadRecord as bad:
        return InputRecord(1, 0, content, [], bad)
    except Exception as error:
        return InputRecord(1, 0, content, [], _damaged(error))


def _damaged(error: Exception) -> BadRecord:
    """Return the reason of a file whose compression is cut or wrong; other errors are raised."""
    reason = damage(error)
    if reason is None:
        raise error
    return BadRecord(reason, f"the file is {reason.split()[0]} ({error})")


def _lines(span: Span, keys: tuple[str, ...]) -> Iterator[InputRecord]:
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
            yield _record_of_line(line, number, offset, keys, decode)
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


def _record_of_line(
    line: bytes, number: int, offset: int, keys: tuple[str, ...], decode: Callable[[str], Any]
) -> InputRecord:
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
                raise BadRecord("cut line", f"the file ends within the line, no valid JSON ({error})") from None
            advice = _ONE_A_LINE if text.strip() in ("[", "{") else ""
            raise BadRecord("invalid JSON", f"no valid JSON ({error}){advice}") from None
        if not isinstance(found, dict):
            advice = _ONE_A_LINE if isinstance(found, list) else ""
            problem = f"a JSON object is expected, this is a {type(found).__name__}{advice}"
            raise BadRecord("not an object", problem)
        return InputRecord(number, offset, content, _values(found, keys))
    except BadRecord as bad:
        return InputRecord(number, offset, content, [], bad)


def _decoded(content: bytes, offset: int, *, whole_file: bool = False) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        problem = f"invalid UTF-8, byte 0x{content[at]:02x} at offset {offset + at}"
        raise BadRecord("invalid UTF-8", problem, content.count(b"\n", 0, at) if whole_file else 0) from None


def _values(record: dict[str, Any], keys: tuple[str, ...]) -> list[str | list[str]]:
    values: list[str | list[str]] = []
    for key in keys:
        if key not in record:
            raise _missing(key, record)
        value = record[key]
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            advice = f"; {_OF_A_CHAT}" if key in _CHAT_KEYS else ""
            what = f"is a {type(value).__name__}, not a text or a list of texts"
            raise BadRecord("not a text", f"the value of {key!r} {what}{advice}")
        for text in as_texts(value):
            if not text.isascii():
                _refuse_lone_surrogates(text, key)
        if not any(as_texts(value)):
            raise BadRecord("empty text", f"the text of {key!r} is empty")
        values.append(value)
    return values


def _missing(key: str, there: Iterable[str]) -> BadRecord:
    there = list(there)
    names = ", ".join(map(repr, there)) or "no keys"
    advice = _OF_A_CHAT if _CHAT_KEYS.intersection(there) else "see --json-keys"
    return BadRecord("missing key", f"key {key!r} is missing (it has: {names}); {advice}")


def _refuse_lone_surrogates(value: str, key: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"the text of {key!r} contains a lone surrogate, which UTF-8 cannot encode ({error.reason})"
        raise BadRecord("lone surrogate", problem) from None


# ---- tables


def _rows(span: Span, keys: tuple[str, ...]) -> Iterator[InputRecord]:
    import pyarrow

    number = 0
    try:
        with closing(_batches(span.path, keys)) as batches:
            for batch, there in batches:
                columns = {key: _column(batch, key) for key in keys if key in batch.schema.names}
                for row in range(batch.num_rows):
                    number += 1
                    values = {key: column[row] for key, column in columns.items()}
                    yield _record_of_row(values, there, number, keys)
    except (pyarrow.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the system; the library's own have no number
            raise
        problem = f"the file is damaged ({str(error).splitlines()[0]})"
        yield InputRecord(number + 1, None, b"", [], BadRecord("damaged file", problem))
        return
    if number == 0:
        yield InputRecord(1, None, b"", [], BadRecord("empty file", "the table has no rows"))


def _batches(path: str, keys: tuple[str, ...]) -> Generator[tuple[Any, list[str]], None, None]:
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


def _column(batch: Any, key: str) -> list[Any]:
    """Return the values of a column; one that Python has not, such as a text that is no UTF-8, is the error instead."""
    if batch.schema.names.count(key) > 1:
        return [ValueError("there are several columns of that name")] * batch.num_rows
    column = batch.column(key)
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        return [_cell(value) for value in column]


def _cell(value: Any) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError) as error:  # UnicodeDecodeError, and times that Python's cannot be
        return error


def _record_of_row(row: dict[str, Any], there: list[str], number: int, keys: tuple[str, ...]) -> InputRecord:
    try:
        for key in keys:
            if key not in row:
                raise _missing(key, there)
        for key, value in row.items():
            if isinstance(value, UnicodeDecodeError):
                raise BadRecord("invalid UTF-8", f"the text of {key!r} has invalid UTF-8")
            if isinstance(value, Exception):
                raise BadRecord("not a text", f"the value of {key!r} is not a text: {value}")
        return InputRecord(number, None, b"", _values(row, keys))
    except BadRecord as bad:
        return InputRecord(number, None, repr(row)[: 4 * _EXCERPT].encode("utf-8", "backslashreplace"), [], bad)
