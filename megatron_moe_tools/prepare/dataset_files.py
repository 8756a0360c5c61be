"""Puts parts of tokens together as the files of an indexed dataset; `data/index_file.py` describes its index."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy

from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.data.index_file import DTYPES, FORMAT, MAGIC, MASK, SUFFIXES, Sidecar
from megatron_moe.io.files import free_bytes, new_file, sync, write_bytes
from megatron_moe.io.hashing import FileEntry, blocks_of_file
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
        counts: returns integers [num_documents], sequences of each document.
        mask: the file that has a byte for each token, 1 if it is trained, and its hash; None: there is none.
    """

    path: Path
    num_bytes: int
    sha256: str | None
    num_sequences: int
    num_documents: int
    lengths: Callable[[], numpy.ndarray]
    counts: Callable[[], numpy.ndarray]
    mask: tuple[Path, str | None] | None = None


def write_dataset(
    aside: Path,
    sources: Sequence[TokenSource],
    dtype: numpy.dtype,
    about: dict[str, Any] | None,
    *,
    consume: bool = False,
) -> None:
    """Write `aside` + `.bin`, `.idx`, `.mask` where the sources have one, and `.json` where they are known `about`.

    Args:
        aside: path without ending of the files, which are renamed later.
        about: what the sidecar says of the tokenizer, of the bounds of the ids and of rejected records.
        consume: remove each source's file of tokens when its bytes are on the disk in `.bin`. A call after a kill then
            goes on with the sources that are left.

    Raises:
        ConfigError: there are no documents, or the disk has no room.
        RunFault: a source is not what its hash says.
    """
    sequences = documents = needed = 0
    for source in sources:
        sequences += source.num_sequences
        documents += source.num_documents
        if not consume:
            needed += source.num_bytes
        elif source.path.exists():
            needed = max(needed, source.num_bytes)
    if not documents:
        raise ConfigError("no document was found in the input, and a dataset has at least one")
    needed += 12 * sequences + 8 * documents
    free = free_bytes(aside.parent)
    if free is not None and free < needed:
        raise ConfigError(
            f"{aside.parent}: the dataset needs {size_text(needed)} more, {size_text(free)} are free; make room and "
            "run the same command again"
        )
    tokens, mask, masks = _append(Path(f"{aside}.bin"), sources, consume), None, []
    for source in sources:
        if source.mask is not None:
            path, sha256 = source.mask
            masks.append(replace(source, path=path, sha256=sha256, num_bytes=source.num_bytes // dtype.itemsize))
    if masks:
        mask = _append(Path(f"{aside}{MASK}"), masks, consume)["sha256"]
    # The index's format is described in `index_file`.
    codes = {known: code for code, known in DTYPES.items()}
    with new_file(Path(f"{aside}.idx")) as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, codes[dtype], sequences, documents + 1))
        with_tokens = [source for source in sources if source.num_sequences]
        for source in with_tokens:
            file.write(source.lengths())
        total = 0  # where each sequence begins, in bytes
        for source in with_tokens:
            sizes = source.lengths().astype(numpy.int64) * dtype.itemsize
            file.write(numpy.cumsum(sizes) - sizes + total)
            total += int(sizes.sum())
        file.write(numpy.zeros(1, numpy.int64))
        total = 0  # the sequences up to each document's end
        for source in sources:
            if source.num_documents:
                counts = source.counts()
                file.write(numpy.cumsum(counts, dtype=numpy.int64) + total)
                total += int(counts.sum())
    if about is None:
        return
    index = file.entry()
    sidecar = Sidecar(
        format=FORMAT,
        tokens=tokens["bytes"] // dtype.itemsize,
        documents=documents,
        dtype=str(dtype),
        bin_bytes=tokens["bytes"],
        bin_sha256=tokens["sha256"],
        idx_bytes=index["bytes"],
        idx_sha256=index["sha256"],
        mask_sha256=mask,
        **about,
    )
    write_bytes(Path(f"{aside}.json"), sidecar.to_json().encode())


def renames(aside: Path, prefix: str) -> list[tuple[Path, Path]]:
    """Return each file with its place; the index is last, for a dataset without one does not open."""
    found = []
    for suffix in SUFFIXES:
        source = Path(f"{aside}{suffix}")
        if source.exists():
            found.append((source, Path(prefix + suffix)))
    return found


def _append(target: Path, sources: Sequence[TokenSource], consume: bool) -> FileEntry:
    """Write the sources' tokens to `target`, behind those that an earlier call has consumed.

    Raises:
        RunFault: a source has another number of bytes or another hash.
    """
    whole = hashlib.sha256()
    size = 0
    consumed = consume
    target.touch()
    with open(target, "r+b") as file:
        for source in sources:
            consumed = consumed and not source.path.exists()
            file.seek(size)
            digest = hashlib.sha256()
            found = 0
            for block in _blocks(file, source.num_bytes) if consumed else blocks_of_file(source.path):
                if not consumed:
                    file.write(block)
                whole.update(block)
                if source.sha256 is not None:
                    digest.update(block)
                found += len(block)
            if found != source.num_bytes or source.sha256 not in (None, digest.hexdigest()):
                raise RunFault(
                    f"{target if consumed else source.path}: the {source.num_bytes} bytes of {source.path} are not "
                    "what was written; is the disk bad?"
                )
            size += found
            if consume and not consumed:
                file.flush()
                sync(target)
                source.path.unlink()
        file.truncate(size)
    sync(target)
    return {"bytes": size, "sha256": whole.hexdigest()}


def _blocks(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    while block := file.read(min(num_bytes, _BLOCK)):
        yield block
        num_bytes -= len(block)
