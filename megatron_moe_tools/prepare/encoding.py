"""Turns a shard of the input into a part: files of tokens and lengths, and of the records that are no documents.

This is what a worker process runs, so it imports neither torch nor the engine. A part is a folder. Its documents are
dealt out over as many pieces as `--partitions` says, document i to piece i modulo that number: which partition a piece
belongs to depends on the number of documents before the shard, which is known when all shards are done. For each key
K and piece P there are `K.P.bin` (tokens), `K.P.lengths` (int32, tokens of each sequence) and `K.P.counts` (int32,
sequences of each document).
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.data.index_file import token_dtype
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megatron_moe.io.files import new_file, write_json
from megatron_moe.io.hashing import HashingFile
from megatron_moe_tools.prepare.documents import BadRecord, InputRecord, as_texts, line_number, read_span
from megatron_moe_tools.prepare.inputs import Shard, Span

STOP, SKIP = "stop", "skip"
PART_FACTS, PART_REJECTS = "part.json", "rejects.jsonl"


@dataclass(frozen=True)
class PreprocessOptions:
    """The options of megatron-moe prepare, one field per flag. With `workers` None there is one per core."""

    input: tuple[str, ...]
    output_prefix: str
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int | None = None
    overwrite: bool = False
    train_tokenizer: bool = False
    tokenizer_vocab_size: int = 4096
    tokenizer_model_type: str = "bpe"
    vocab_file: str | None = None
    merge_file: str | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int | None = None
    tiktoken_special_tokens: tuple[str, ...] | None = None
    tokenizer_hf_include_special_tokens: bool = False
    partitions: int = 1
    keep_sequential_samples: bool = False
    log_interval: int | None = None
    on_bad_line: str = STOP
    max_bad_lines: float | None = None

    @property
    def num_pieces(self) -> int:
        """Number of partitions in which the documents are written."""
        return 1 if self.keep_sequential_samples else self.partitions

    @property
    def prefixes(self) -> list[str]:
        """Paths of the datasets without their endings, one per key."""
        return [f"{self.output_prefix}_{key}_document" for key in self.json_keys]


def tokenizer_of(options: PreprocessOptions) -> Tokenizer:
    """Return the tokenizer that the options name.

    Raises:
        ConfigError: a flag is missing, or a file is missing or malformed.
    """
    named = {name: getattr(options, name) for name in TOKENIZER_FIELDS if getattr(options, name) is not None}
    if options.train_tokenizer:
        named["tokenizer_type"] = "SentencePieceTokenizer"
    tokenizer = build_tokenizer(schema.build(named).data, options.vocab_size)
    if options.tokenizer_hf_include_special_tokens:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ConfigError(
                f"--tokenizer-hf-include-special-tokens, --tokenizer-type {tokenizer.name}: only the tokenizer.json of "
                "HuggingFaceTokenizer says which tokens to add to a text; drop the first"
            )
        tokenizer.include_special_tokens = True
    return tokenizer


@dataclass
class DocumentPiece:
    """Every `num_pieces`-th document of a part, for one key, while it is written."""

    tokens: HashingFile
    lengths: HashingFile
    counts: HashingFile
    num_tokens: int = 0
    num_sequences: int = 0
    num_documents: int = 0
    min_id: int = 1 << 62
    max_id: int = -1

    def add(self, sequences: list[list[int]], dtype: numpy.dtype) -> None:
        """Append a document."""
        ids = numpy.array(sequences[0] if len(sequences) == 1 else list(chain(*sequences)), dtype=dtype)
        self.tokens.write(ids)
        self.lengths.write(numpy.array([len(ids) for ids in sequences], dtype=numpy.int32))
        self.counts.write(numpy.array([len(sequences)], dtype=numpy.int32))
        self.num_tokens += len(ids)
        self.num_sequences += len(sequences)
        self.num_documents += 1
        self.min_id, self.max_id = min(self.min_id, int(ids.min())), max(self.max_id, int(ids.max()))

    def facts(self) -> dict[str, Any]:
        """Return what part.json says of the piece."""
        numbers = ("num_tokens", "num_sequences", "num_documents", "min_id", "max_id")
        return {"sha256": self.tokens.entry()["sha256"], **{name: getattr(self, name) for name in numbers}}


@dataclass
class Counts:
    """Records of a part: those read of each span, and those that are no documents by reason."""

    records: list[int] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)


class Encoder:
    """The tokenizer and the options that turn a shard into a part; each worker has a copy of both."""

    def __init__(self, options: PreprocessOptions, tokenizer: Tokenizer) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def write_part(self, shard: Shard, folder: Path) -> None:
        """Write the part of a shard into a folder that exists, onto the disk.

        Raises:
            ConfigError: a record is no document and `--on-bad-line` is stop, or a file changed while it was read.
        """
        counts = Counts()
        with ExitStack() as stack:

            def file(name: str) -> HashingFile:
                return stack.enter_context(new_file(folder / name))

            keys = range(len(self.options.json_keys))
            names = [[f"{key}.{piece}" for piece in range(self.options.num_pieces)] for key in keys]
            pieces = [
                [DocumentPiece(file(f"{name}.bin"), file(f"{name}.lengths"), file(f"{name}.counts")) for name in row]
                for row in names
            ]
            rejects = file(PART_REJECTS)
            for number, span in enumerate(shard):
                self._encode(span, number, pieces, rejects, counts)
        documents = sum(piece.num_documents for piece in pieces[0])
        assert documents + counts.rejected.total() == sum(counts.records), "a record is neither accepted nor rejected"
        facts = {
            "documents": documents,
            "records": counts.records,
            "rejected": counts.rejected,
            "rejects": rejects.entry(),
            "pieces": [[piece.facts() for piece in row] for row in pieces],
        }
        write_json(folder / PART_FACTS, facts)

    def _encode(
        self, span: Span, number: int, pieces: list[list[DocumentPiece]], rejects: HashingFile, counts: Counts
    ) -> None:
        """Write the documents of one span, the part's number `number`."""
        span.require_unchanged()
        counts.records.append(0)
        written = sum(piece.num_documents for piece in pieces[0])
        for record in read_span(span, self.options.json_keys):
            counts.records[-1] += 1
            documents = bad = None
            try:
                documents = self._documents(record)
            except BadRecord as error:
                bad = error
            if documents is None:
                assert bad is not None
                if self.options.on_bad_line == STOP:
                    raise stopped_at(span, record, bad)
                counts.rejected[bad.reason] += 1
                rejects.write(_reject(number, record, bad))
                continue
            for row, document in zip(pieces, documents):
                row[written % len(row)].add(document, self.dtype)
            written += 1
        span.require_unchanged()

    def _documents(self, record: InputRecord) -> list[list[list[int]]]:
        """Return the sequences of ids of a record's document, for each key.

        A text without tokens gives no sequence, and the last sequence ends with `eod`.
        """
        if record.bad is not None:
            raise record.bad
        documents = []
        for value in record.values:
            try:
                document = [ids for text in as_texts(value) if (ids := self.tokenizer.tokenize(text))]
            except ConfigError as error:
                raise BadRecord("refused by the tokenizer", str(error)) from None
            if not document:
                raise BadRecord("no tokens", "the text gives no tokens")
            if self.options.append_eod:
                document[-1] = [*document[-1], self.tokenizer.eod]
            documents.append(document)
        return documents


def stopped_at(span: Span, record: InputRecord, bad: BadRecord) -> ConfigError:
    """Return the error that ends the work at a record which is no document."""
    if record.offset is None:
        place = f"row {record.number}"
    else:
        place = f"line {line_number(span, record)}"
    return ConfigError(f"{span.path}, {place}: {bad.problem} (--on-bad-line skip leaves it out)")


def _reject(span_number: int, record: InputRecord, bad: BadRecord) -> bytes:
    """Return the line of a record in the part's rejects: its line is counted in the span."""
    facts = {
        "span": span_number,
        "line": record.number + bad.lines_before,
        "offset": record.offset,
        "reason": bad.reason,
        "problem": bad.problem,
        "excerpt": record.excerpt(),
    }
    return (json.dumps(facts) + "\n").encode()
