"""Writes one indexed dataset to temporary files: `.bin`, `.idx` and the sidecar `.json`."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy

from megatron_moe.data.index_file import FORMAT, Sidecar, sidecar_path
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.hashing import sha256_of_file

if TYPE_CHECKING:
    from megatron_moe.data.datasets import IndexedDatasetBuilder


@dataclass
class Partition:
    """Documents that wait for their turn: a file of their tokens, and the lengths of the sequences of each."""

    file: IO[bytes]
    lengths: list[numpy.ndarray] = field(default_factory=list)


@dataclass
class DatasetWriter:
    """A dataset that is being written to temporary files: the engine's builder, and what the sidecar will say.

    Args:
        prefix: path without `.bin` of the finished dataset.
        aside: the same of the temporary files.
        dtype: dtype of the tokens in `.bin`.
        partitions: document i belongs to partition i modulo this number, and the partitions follow one another, as with
            Megatron-LM's --partitions.
    """

    prefix: str
    aside: str
    dtype: numpy.dtype
    partitions: int = 1
    tokens: int = 0
    documents: int = 0
    min_id: int = 1 << 62
    max_id: int = -1
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    @cached_property
    def builder(self) -> IndexedDatasetBuilder:
        """The engine's builder, made for the first unit: importing the engine takes seconds while the workers run."""
        from megatron_moe.data.datasets import dataset_builder

        return dataset_builder(f"{self.aside}.bin", self.dtype)

    @cached_property
    def waiting(self) -> list[Partition]:
        """The partitions that are collected until all documents are there; the first one is written at once."""
        return [Partition(open(f"{self.aside}.{i}", "wb+")) for i in range(1, self.partitions)]

    def add(self, content: bytes, lengths: numpy.ndarray, sequences: numpy.ndarray) -> None:
        """Append documents.

        Args:
            content: the token bytes of all.
            lengths: int32, tokens of each sequence.
            sequences: int32 [documents], the number of sequences of each.
        """
        ids = numpy.frombuffer(content, dtype=self.dtype)
        if len(ids) == 0:
            return
        self.min_id, self.max_id = min(self.min_id, int(ids.min())), max(self.max_id, int(ids.max()))
        self.tokens += len(ids)
        start = first = 0
        for count in sequences.tolist():
            part = lengths[first : first + count]
            end = start + int(part.sum())
            number = self.documents % self.partitions
            if number == 0:
                self._write(ids[start:end], part)
            else:
                self.waiting[number - 1].file.write(ids[start:end].tobytes())
                self.waiting[number - 1].lengths.append(part)
            self.documents += 1
            start, first = end, first + count

    def _write(self, ids: numpy.ndarray, lengths: numpy.ndarray) -> None:
        self.digest.update(ids.tobytes())
        self.builder.add_document(ids, lengths.tolist())

    def finish(self, tokenizer: Tokenizer, append_eod: bool) -> Sidecar:
        """Write the index and the sidecar aside."""
        for partition in self.waiting:
            partition.file.seek(0)
            for lengths in partition.lengths:
                self._write(numpy.fromfile(partition.file, self.dtype, int(lengths.sum())), lengths)
        self.builder.finalize(f"{self.aside}.idx")
        sidecar = Sidecar(
            format=FORMAT,
            tokens=self.tokens,
            documents=self.documents,
            min_id=self.min_id,
            max_id=self.max_id,
            dtype=str(self.dtype),
            tokenizer_type=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            append_eod=append_eod,
            bin_bytes=os.path.getsize(f"{self.aside}.bin"),
            bin_sha256=self.digest.hexdigest(),
            idx_bytes=os.path.getsize(f"{self.aside}.idx"),
            idx_sha256=sha256_of_file(f"{self.aside}.idx"),
        )
        if sidecar.bin_bytes != self.tokens * self.dtype.itemsize:
            raise OSError(
                f"{self.aside}.bin has {sidecar.bin_bytes} bytes after {self.tokens} {self.dtype} tokens: is "
                "the disk full?"
            )
        Path(sidecar_path(self.aside)).write_text(sidecar.to_json(), encoding="utf-8")
        return sidecar

    def close(self) -> None:
        """Close the files, that of tokens too, which `finish` has done unless an error came first."""
        files = [self.builder.data_file] if "builder" in vars(self) else []
        if "waiting" in vars(self):
            files += [partition.file for partition in self.waiting]
        for file in files:
            with suppress(OSError):  # of a full disk, which the error before it has named
                file.close()

    def renames(self) -> list[tuple[Path, Path]]:
        """Return each file with its place; the index is last, for a dataset without one does not open."""
        return [(Path(self.aside + suffix), Path(self.prefix + suffix)) for suffix in (".bin", ".json", ".idx")]
