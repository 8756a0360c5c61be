"""Writes one indexed dataset from sources that follow one another: `.bin`, `.idx` and the sidecar `.json`.

A source is a file of tokens with the lengths of its sequences: a piece of preprocessing, or a dataset that is merged.
Everything is copied block by block, and of the index one source at a time is in memory.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy

from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.data.index_file import DTYPES, FORMAT, MAGIC, Sidecar
from megatron_moe.io.files import free_bytes, new_file, sync, write_bytes
from megatron_moe.io.hashing import FileEntry, HashingFile, blocks_of_file
from megatron_moe.io.texts import size_text

_BLOCK = 4 << 20


@dataclass(frozen=True)
class TokenSource:
    """Tokens in a file, and how they are divided.

    Attributes:
        path: the file of tokens.
        num_bytes: its size.
        sha256: what it has to hash to; None where that is not known.
        num_sequences, num_documents: of its division.
        lengths: returns int32 [num_sequences], tokens of each sequence.
        counts: returns int32 [num_documents], sequences of each document.
    """

    path: Path
    num_bytes: int
    sha256: str | None
    num_sequences: int
    num_documents: int
    lengths: Callable[[], numpy.ndarray]
    counts: Callable[[], numpy.ndarray]


@dataclass(frozen=True)
class TokenizerFacts:
    """What a sidecar says of the tokenizer and of how it was used."""

    tokenizer_type: str
    tokenizer_sha256: str
    vocab_size: int
    eod: int
    append_eod: bool


@dataclass(frozen=True)
class TokenContents:
    """What a sidecar says of the tokens: bounds of the ids, and the records that became no documents by reason."""

    min_id: int
    max_id: int
    rejected: Counter[str] = field(default_factory=Counter)


def write_dataset(
    aside: Path,
    sources: Sequence[TokenSource],
    dtype: numpy.dtype,
    about: tuple[TokenizerFacts, TokenContents] | None,
    *,
    consume: bool = False,
    advance: Callable[[int], object] = lambda _: None,
) -> Sidecar | None:
    """Write `aside` + `.bin`, `.idx` and, where it is known what they are `about`, `.json`; return the sidecar.

    Args:
        aside: path without ending of the files, which are renamed later.
        consume: remove each source's file of tokens when its bytes are on the disk in `.bin`. A call after a kill then
            goes on with the sources that are left.
        advance: called with the number of bytes of each block that was copied.

    Raises:
        ConfigError: there are no documents, or the disk has no room.
        RunFault: a source is not what its hash says.
    """
    if not sum(source.num_documents for source in sources):
        raise ConfigError("no document was found in the input, and a dataset has at least one")
    _require_room(aside.parent, sources, consume)
    bin_entry = _append(Path(f"{aside}.bin"), sources, consume, advance)
    idx_entry = _write_index(Path(f"{aside}.idx"), sources, dtype)
    if about is None:
        return None
    tokenizer, contents = about
    sidecar = Sidecar(
        format=FORMAT,
        tokens=bin_entry["bytes"] // dtype.itemsize,
        documents=sum(source.num_documents for source in sources),
        min_id=contents.min_id,
        max_id=contents.max_id,
        dtype=str(dtype),
        **vars(tokenizer),
        bin_bytes=bin_entry["bytes"],
        bin_sha256=bin_entry["sha256"],
        idx_bytes=idx_entry["bytes"],
        idx_sha256=idx_entry["sha256"],
        rejected=dict(sorted(contents.rejected.items())),
    )
    write_bytes(Path(f"{aside}.json"), sidecar.to_json().encode())
    return sidecar


def renames(aside: Path, prefix: str) -> list[tuple[Path, Path]]:
    """Return each file with its place; the index is last, for a dataset without one does not open."""
    pairs = [(Path(f"{aside}{suffix}"), Path(prefix + suffix)) for suffix in (".bin", ".json", ".idx")]
    return [(source, place) for source, place in pairs if source.exists()]


def _require_room(folder: Path, sources: Sequence[TokenSource], consume: bool) -> None:
    free = free_bytes(folder)
    index = sum(12 * source.num_sequences + 8 * source.num_documents for source in sources)
    left = [source.num_bytes for source in sources if not consume or source.path.exists()]
    needed = index + (max(left, default=0) if consume else sum(left))
    if free is not None and free < needed:
        raise ConfigError(
            f"{folder}: the dataset needs {size_text(needed)} more, {size_text(free)} are free; make room and run the "
            "same command again"
        )


# ---- tokens


def _append(target: Path, sources: Sequence[TokenSource], consume: bool, advance: Callable[[int], object]) -> FileEntry:
    """Write the sources' tokens to `target`, behind those that an earlier call has consumed."""
    digest = hashlib.sha256()
    size = 0
    consumed = consume
    target.touch()
    with open(target, "r+b") as file:
        for source in sources:
            consumed = consumed and not source.path.exists()
            if consumed:
                _hash(source, target, _blocks(file, source.num_bytes), digest, advance)
            else:
                file.seek(size)
                _hash(source, source.path, _written(file, source.path), digest, advance)
            size += source.num_bytes
            if consume and not consumed:
                file.flush()
                sync(target)
                source.path.unlink()
        file.truncate(size)
    sync(target)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _blocks(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    while block := file.read(min(num_bytes, _BLOCK)):
        yield block
        num_bytes -= len(block)


def _written(file: IO[bytes], path: Path) -> Iterator[memoryview]:
    for block in blocks_of_file(path):
        file.write(block)
        yield block


def _hash(
    source: TokenSource,
    path: Path,
    blocks: Iterable[bytes | memoryview],
    whole: hashlib._Hash,
    advance: Callable[[int], object],
) -> None:
    """Add the blocks of a source, which are read from `path`, to the hash of the whole, and check them.

    Raises:
        RunFault: their number or hash is another one.
    """
    digest = hashlib.sha256()
    size = 0
    for block in blocks:
        whole.update(block)
        if source.sha256 is not None:
            digest.update(block)
        size += len(block)
        advance(len(block))
    if size != source.num_bytes or source.sha256 not in (None, digest.hexdigest()):
        raise RunFault(
            f"{path}: the {source.num_bytes} bytes of {source.path} are not what was written; is the disk bad?"
        )


# ---- the index


def _write_index(path: Path, sources: Sequence[TokenSource], dtype: numpy.dtype) -> FileEntry:
    """Write the `.idx` of the format, of which `index_file` has the layout."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    sequences = sum(source.num_sequences for source in sources)
    documents = sum(source.num_documents for source in sources)
    with new_file(path) as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, code, sequences, documents + 1))
        for source in sources:
            if source.num_sequences:
                file.write(source.lengths())
        _write_sums(file, (source.lengths() for source in sources), dtype.itemsize, is_ends=False)
        file.write(numpy.zeros(1, numpy.int64))
        _write_sums(file, (source.counts() for source in sources), 1, is_ends=True)
    return file.entry()


def _write_sums(file: HashingFile, parts: Iterable[numpy.ndarray], factor: int, *, is_ends: bool) -> None:
    """Write the running sum of int32 numbers times `factor` as int64: behind each number, or before it."""
    total = 0
    for part in parts:
        sums = numpy.cumsum(part, dtype=numpy.int64) * factor + total
        if len(sums):
            total = int(sums[-1])
            file.write(sums if is_ends else sums - part.astype(numpy.int64) * factor)
