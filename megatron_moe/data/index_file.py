"""Reads and verifies an indexed dataset, `PREFIX.bin` and `PREFIX.idx`, with numpy alone.

The engine opens a dataset whose `.bin` is truncated, or whose index points outside of it, and fails at the first bad
document, hours later. `open_index` checks every length, pointer and document first and names the file and the byte
offset of what is wrong. Layout of `.idx`, little endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64
number of sequences n, uint64 number of document marks d, int32[n] lengths (tokens), int64[n] pointers (bytes into
`.bin`), int64[d] document marks (sequence numbers, first 0, last n).
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import require_readable

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
DTYPES: dict[int, numpy.dtype] = {
    1: numpy.dtype("uint8"),
    2: numpy.dtype("int8"),
    3: numpy.dtype("int16"),
    4: numpy.dtype("int32"),
    5: numpy.dtype("int64"),
    8: numpy.dtype("uint16"),
}
MASK = ".mask"
"""The ending of a file that datasets of conversations have: a byte for each token, 1 if it is trained."""
SUFFIXES = (".bin", MASK, ".json", ".idx")
"""Endings of a dataset's files, in the order in which they are put in their places: without .idx none opens."""
SMALL_VOCABULARY = 65_500  # the format's bound for two bytes per token
_CHUNK_TOKENS = 1 << 24
_TEXT_ENDINGS = (".jsonl", ".json", ".txt", ".csv", ".parquet", ".gz", ".zst", ".arrow")


def token_dtype(vocab_size: int) -> numpy.dtype:
    """Return uint16 where every id of the vocabulary is below the format's bound, else int32."""
    return numpy.dtype("uint16") if vocab_size < SMALL_VOCABULARY else numpy.dtype("int32")


@dataclass(frozen=True)
class TokenIndex:
    """An index that has been verified.

    Attributes:
        prefix: path without `.bin` or `.idx`.
        dtype: dtype of the tokens in `.bin`.
        lengths: int32 [n], tokens per sequence.
        documents: int64 [d], sequence numbers at which documents begin, and n.
    """

    prefix: str
    dtype: numpy.dtype
    lengths: numpy.ndarray
    documents: numpy.ndarray

    @property
    def num_tokens(self) -> int:
        """Number of tokens in `.bin`."""
        return int(self.lengths.sum(dtype=numpy.int64))

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.documents) - 1

    def chunks(self) -> Iterator[tuple[int, numpy.ndarray]]:
        """Yield (number of the first token, tokens) for consecutive parts of `.bin`, at most 2^24 tokens each."""
        tokens: numpy.ndarray = numpy.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r")
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            yield start, tokens[start : start + _CHUNK_TOKENS]

    def document_of(self, token_number: int) -> tuple[int, int]:
        """Return (document, offset in the document) of token number `token_number` of `.bin`."""
        ends = numpy.cumsum(self.lengths, dtype=numpy.int64)
        sequence = int(numpy.searchsorted(ends, token_number, side="right"))
        document = int(numpy.searchsorted(self.documents, sequence, side="right")) - 1
        first = int(self.documents[document])
        return document, token_number - (int(ends[first - 1]) if first else 0)


def open_index(prefix: str, flag: str = "") -> TokenIndex:
    """Open `PREFIX.idx` and check all of it, and the size of `PREFIX.bin`.

    Args:
        flag: the flag that names the prefix, for the message where a file is missing.

    Raises:
        ConfigError: a file is missing, empty, truncated, too long, or inconsistent; the message names the file and,
            where there is one, the byte offset.
    """
    for suffix in (".idx", ".bin"):
        path = prefix + suffix
        require_readable(f"{flag or 'dataset'} {prefix}: file", path)
        if not os.path.isfile(path):
            raise ConfigError(_missing(prefix, path, flag))
        if os.path.getsize(path) == 0:
            raise ConfigError(f"{path} is empty; write the dataset again with megatron-moe prepare")
    path = f"{prefix}.idx"
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
    if header[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"{path}: bad header at offset 0 ({header[:9]!r}); this is no index of an indexed dataset")
    if len(header) < HEADER_BYTES:
        raise ConfigError(f"{path}: header cut short at offset {len(header)} of {HEADER_BYTES}")
    version, code, count, marks = struct.unpack_from("<QBQQ", header, len(MAGIC))
    if version != 1:
        raise ConfigError(f"{path}: version {version} at offset 9; only version 1 is known")
    if code not in DTYPES:
        raise ConfigError(
            f"{path}: dtype code {code} at offset 17 is no integer dtype of the format ({sorted(DTYPES)})"
        )
    if count == 0 or marks < 2:
        raise ConfigError(f"{path}: no documents (offset 18: {count} sequences, offset 26: {marks} document marks)")
    dtype = DTYPES[code]
    lengths_at = HEADER_BYTES
    pointers_at = lengths_at + 4 * count
    documents_at = pointers_at + 8 * count
    expected = documents_at + 8 * marks
    size = os.path.getsize(path)
    # The engine may append one byte per sequence (modes of multimodal data), which are not read here.
    if size not in (expected, expected + count):
        raise ConfigError(
            f"{path}: {size} bytes, but its header ({count} sequences, {marks} document marks) makes {expected}; "
            f"the file is {'cut short' if size < expected else 'too long'} or its header at offset 18 is damaged"
        )
    content = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    lengths = numpy.frombuffer(content, numpy.int32, count, lengths_at)
    pointers = numpy.frombuffer(content, numpy.int64, count, pointers_at)
    documents = numpy.frombuffer(content, numpy.int64, marks, documents_at)
    _check_content(path, dtype, lengths, pointers, documents)
    index = TokenIndex(prefix, dtype, lengths, documents)
    size, expected = os.path.getsize(f"{prefix}.bin"), index.num_tokens * dtype.itemsize
    if size != expected:
        raise ConfigError(
            f"{prefix}.bin: {size} bytes, {'shorter' if size < expected else 'longer'} than the {expected} "
            f"({index.num_tokens} {dtype} tokens) of {path}; copy both files again or run megatron-moe prepare again"
        )
    return index


def _missing(prefix: str, path: str, flag: str) -> str:
    where = f"{flag} {prefix}: " if flag else ""
    hint = "; give the prefix of your .idx and .bin, which megatron-moe prepare --input TEXT makes"
    if prefix.endswith((".bin", ".idx")):
        hint = f"; give the prefix without the ending: {prefix[:-4]}"
    elif os.path.isfile(f"{prefix}_text_document.idx"):
        hint = f"; did you mean {prefix}_text_document?"
    elif prefix.endswith(_TEXT_ENDINGS) or os.path.isfile(prefix):
        stem = os.path.basename(prefix).partition(".")[0]
        return (
            f"{where}is text and not an indexed dataset; make one: megatron-moe prepare --input {prefix} "
            f"--output-prefix {stem} --tokenizer-type ... , then give {flag or 'the flag'} {stem}_text_document"
        )
    elif any(os.path.isfile(f"{word}.idx") for word in prefix.split()):
        hint = "; this is one word with spaces in it: give several without quotes, or as a list"
    elif os.path.isdir(prefix):
        hint = f"; {prefix} is a folder: give the path of a dataset in it, without .bin or .idx"
    return f"{where}data file {path} does not exist{hint}"


def _check_content(
    path: str, dtype: numpy.dtype, lengths: numpy.ndarray, pointers: numpy.ndarray, documents: numpy.ndarray
) -> None:
    """Check an index: lengths are positive, sequences follow one another without gaps, documents are in order."""
    count, marks = len(lengths), len(documents)
    pointers_at = HEADER_BYTES + 4 * count
    documents_at = pointers_at + 8 * count
    starts = (numpy.cumsum(lengths, dtype=numpy.int64) - lengths) * dtype.itemsize
    for i in numpy.flatnonzero(lengths <= 0)[:1]:
        raise ConfigError(
            f"{path}: sequence {i} has length {lengths[i]} at offset {HEADER_BYTES + 4 * i}; it must be positive"
        )
    for i in numpy.flatnonzero(pointers != starts)[:1]:
        raise ConfigError(
            f"{path}: sequence {i} points to byte {pointers[i]} of the .bin file at offset {pointers_at + 8 * i}; "
            f"the lengths before it make {starts[i]}"
        )
    if documents[0] != 0:
        raise ConfigError(
            f"{path}: the first document begins at sequence {documents[0]} at offset {documents_at}; it must be 0"
        )
    for i in numpy.flatnonzero(numpy.diff(documents) < 0)[:1]:
        raise ConfigError(
            f"{path}: document marks fall from {documents[i]} to {documents[i + 1]} at offset "
            f"{documents_at + 8 * (i + 1)}"
        )
    if documents[-1] != count:
        raise ConfigError(
            f"{path}: the last document ends at sequence {documents[-1]} at offset {documents_at + 8 * (marks - 1)}; "
            f"it must be {count}"
        )


def label_counts(dataset: Sequence[Mapping[str, Any]], num_samples: int) -> numpy.ndarray:
    """Return how often each id is a label that counts in the first `num_samples` samples of a dataset, int64 [V].

    These are the tokens that an evaluation over those samples predicts; V is the largest such id and 1.

    Args:
        dataset: samples with `labels` int64 [S] and `loss_mask` float [S].
    """
    counts: numpy.ndarray = numpy.zeros(0, dtype=numpy.int64)
    for i in range(num_samples):
        sample = dataset[i]
        new = numpy.bincount(sample["labels"][sample["loss_mask"] > 0].numpy(), minlength=len(counts))
        new[: len(counts)] += counts
        counts = new
    return counts


def label_entropy(counts: numpy.ndarray) -> float:
    """Return the entropy in nats per token of labels with these counts.

    It is -sum_v p_v ln p_v with p_v = count_v / total (Shannon 1948), the lowest loss that a model without context can
    reach.

    Raises:
        ValueError: no label counts.
    """
    total = int(counts.sum())
    if total <= 0:
        raise ValueError("the entropy of no tokens is not defined")
    p = counts[counts > 0] / total
    return float(-(p * numpy.log(p)).sum())


# ---- The sidecar file `PREFIX.json`: what was written, with which tokenizer.
#
# With it, the start of a run detects data of another tokenizer, ids beyond the vocabulary, and files that changed after
# they were written.


FORMAT = 1


@dataclass(frozen=True)
class Sidecar:
    """A description of one indexed dataset: sizes in bytes, hashes in hex, `min_id` and `max_id` inclusive.

    `rejected` has the number of records that became no documents, by reason; `mask_sha256` is of the file of trained
    tokens, and `chat` says by which template, and which turns. The file has them where there are any.
    """

    format: int
    tokens: int
    documents: int
    min_id: int
    max_id: int
    dtype: str
    tokenizer_type: str
    tokenizer_sha256: str
    vocab_size: int
    eod: int
    append_eod: bool
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str
    rejected: dict[str, int] = field(default_factory=dict)
    mask_sha256: str | None = None
    chat: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the content of the file."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value or name not in _OPTIONAL}
        return json.dumps(values, indent=1) + "\n"


_OPTIONAL: dict[str, Any] = {"rejected": {}, "mask_sha256": None, "chat": {}}
"""Facts that a sidecar may lack -> what that means."""


def sidecar_path(prefix: str) -> str:
    """Return the path of a dataset's sidecar, `PREFIX.json`."""
    return f"{prefix}.json"


def read_sidecar(prefix: str) -> Sidecar | None:
    """Return the sidecar of a dataset, None without one; a ConfigError if this version does not read it."""
    path = sidecar_path(prefix)
    if not os.path.exists(path):
        return None
    advice = "write the dataset again, or move the file away to have the data scanned instead"
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); {advice}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ConfigError(f"{path}: format {found!r}, this version reads {FORMAT}; {advice}")
    values = _OPTIONAL | values
    kinds: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "str": (str,),
        "bool": (bool,),
        "str | None": (str, type(None)),
    }
    kinds |= dict.fromkeys(("dict[str, int]", "dict[str, str]"), (dict,))
    for f in dataclasses.fields(Sidecar):
        if f.name not in values:
            raise ConfigError(f"{path}: {f.name} is missing; {advice}")
        if type(values[f.name]) not in kinds[str(f.type)]:
            raise ConfigError(f"{path}: {f.name} is {values[f.name]!r}, which is no {f.type}; {advice}")
    return Sidecar(**{f.name: values[f.name] for f in dataclasses.fields(Sidecar)})
