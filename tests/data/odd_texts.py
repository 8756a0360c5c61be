"""A folder of files as crawls have them: lines that are no documents, of every kind, between lines that are."""

import gzip
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard

BAD_LINES: dict[bytes, str] = {
    b"": "empty line",
    b"   \t": "empty line",
    b'{"text": ""}': "empty text",
    b'{"text": []}': "empty text",
    b'{"text": ["", ""]}': "empty text",
    b'{"content": "x"}': "missing key",
    b'{"text": "a", "text": "a"}': "repeated key",
    b"{}": "missing key",
    b'{"text": null}': "not a text",
    b'{"text": 5}': "not a text",
    b'{"text": {"a": "b"}}': "not a text",
    b'{"text": ["a", 1]}': "not a text",
    b'["text"]': "not an object",
    b"null": "not an object",
    b'"text"': "not an object",
    b'{"text": "one", }': "invalid JSON",
    b'{"text": "a"} {"text": "b"}': "invalid JSON",
    b"no JSON at all": "invalid JSON",
    b"{'text': 'a'}": "invalid JSON",
    b"[" * 20_000: "invalid JSON",
    b"\0\0\0\0": "invalid JSON",
    b'{"text": "caf\xe9"}': "invalid UTF-8",
    b'{"text": "a \xff b"}': "invalid UTF-8",
    b'{"text": "\\ud800"}': "lone surrogate",
    b'{"text": ["a", "\\udfff"]}': "lone surrogate",
}
"""A line -> the reason for which it is no document."""


def line(text: str | list[str]) -> bytes:
    return json.dumps({"text": text}, ensure_ascii=False).encode()


def packed_by_zstd(content: bytes) -> bytes:
    """Two frames, as tools that compress in parallel write them."""
    half = len(content) // 2
    compress = zstandard.ZstdCompressor().compress
    return compress(content[:half]) + compress(content[half:])


@dataclass
class OddTexts:
    """The files, in the order in which they are read, with what should become of them.

    Attributes:
        documents: the texts that are documents.
        rejected: the others by reason.
    """

    folder: Path
    documents: list[str] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    number: int = 0

    def good(self, count: int, size: int = 40) -> list[bytes]:
        """Lines of documents that are all different."""
        texts = [f"document {self.number + i} é " + "wörd " * ((self.number + i) % size) for i in range(count)]
        self.number += count
        self.documents += texts
        return [line(text) for text in texts]

    def write(self, name: str, content: bytes, rejected: str | None = None) -> None:
        """Write a file; `rejected` is why one record of it is no document."""
        (self.folder / name).write_bytes(content)
        if rejected is not None:
            self.rejected[rejected] += 1

    def clean(self, path: Path) -> Path:
        """Write a file of the clean lines alone."""
        path.write_bytes(b"".join(line(text) + b"\n" for text in self.documents))
        return path


def write_odd_texts(folder: Path, *, large: int = 0) -> OddTexts:
    """Write more than thirty files. With `large`, one of them has as many lines that are documents."""
    folder.mkdir()
    odd = OddTexts(folder)
    for i, (bad, reason) in enumerate(BAD_LINES.items()):
        before, after = odd.good(3), odd.good(2)
        end = b"\r\n" if i % 5 == 1 else b"\n"
        odd.write(f"a{i:02}.jsonl", end.join([*before, bad, *after]) + (end if i % 2 else b""), reason)
    odd.write("b0-bom.jsonl", b"\xef\xbb\xbf" + b"\n".join(odd.good(3)) + b"\n")
    odd.write("b1-cut.jsonl", b"\n".join(odd.good(3)) + b'\n{"text": "cu', "cut line")
    odd.write("b2-empty.jsonl", b"", "empty file")
    odd.write("b3-utf16.jsonl", '{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"), "UTF-16")
    odd.write("b5.jsonl.gz", gzip.compress(b"\n".join([*odd.good(3), b"", *odd.good(2)])), "empty line")
    odd.write("b6-cut.jsonl.gz", gzip.compress(b"\n".join(odd.good(3)) + b"\n")[:-3], "cut file")
    odd.write("b7.json.zst", packed_by_zstd(b"\n".join([*odd.good(60), b"null", *odd.good(2)])), "not an object")
    odd.write("c1-damaged.parquet", b"PAR1 and no more", "damaged file")
    odd.write("c1-in-zstd.txt", zstandard.compress(b"a text"), "other format")
    rows = [json.loads(row)["text"] for row in odd.good(2)]
    pyarrow.parquet.write_table(pyarrow.table({"text": [rows[0], None, rows[1]]}), folder / "c2.parquet")
    odd.rejected["not a text"] += 1
    odd.write("d0.txt", b"\xef\xbb\xbf" + b"a text\r\nof two lines")
    odd.documents.append("a text\r\nof two lines")
    odd.write("d2.txt", b"one\ntwo \xff\n", "invalid UTF-8")
    if large:
        odd.write("e.jsonl", b"\n".join([*odd.good(large, 400), b"", *odd.good(1)]) + b"\n", "empty line")
    return odd
