"""Turns a shard of the input into a part: files of tokens and lengths, and of the records that are no documents.

This is what a worker process runs, so it imports neither torch nor the engine. A part is a folder. Its documents are
dealt out over as many pieces as `--partitions` says, document i to piece i modulo that number: which partition a piece
belongs to depends on the number of documents before the shard, which is known when all shards are done. For each key
K and piece P there are `K.P.bin` (tokens), `K.P.lengths` (int32, tokens of each sequence) and `K.P.counts` (int32,
sequences of each document).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.data.index_file import token_dtype
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megatron_moe.io.files import new_file, publish_files, write_json
from megatron_moe.io.hashing import HashingFile
from megatron_moe_tools.prepare.inputs import BadRecord, InputRecord, Shard, Span, as_texts, line_number, read_span
from megatron_moe_tools.prepare.output import PART_FACTS, PART_REJECTS, worker_lock

STOP, SKIP = "stop", "skip"


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

    @property
    def rejects(self) -> str:
        """Path of the file that lists the records that became no documents."""
        return f"{self.output_prefix}_rejects.jsonl"

    @property
    def outputs(self) -> list[str]:
        """Paths of all files that are written."""
        found = []
        for prefix in self.prefixes:
            found += [prefix + suffix for suffix in (".bin", ".idx", ".json")]
        return [*found, self.rejects]


def tokenizer_of(options: PreprocessOptions) -> Tokenizer:
    """Return the tokenizer that the options name.

    Raises:
        ConfigError: a flag is missing, or a file is missing or malformed.
    """
    named = {}
    for name in TOKENIZER_FIELDS:
        if (value := getattr(options, name)) is not None:
            named[name] = value
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
        return {
            "sha256": self.tokens.entry()["sha256"],
            "num_tokens": self.num_tokens,
            "num_sequences": self.num_sequences,
            "num_documents": self.num_documents,
            "min_id": self.min_id,
            "max_id": self.max_id,
        }


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
        written, records, rejected = 0, [0] * len(shard), Counter[str]()
        with ExitStack() as stack:
            pieces: list[list[DocumentPiece]] = []
            for key in range(len(self.options.json_keys)):
                pieces.append([])
                for number in range(self.options.num_pieces):
                    tokens = stack.enter_context(new_file(folder / f"{key}.{number}.bin"))
                    lengths = stack.enter_context(new_file(folder / f"{key}.{number}.lengths"))
                    counts = stack.enter_context(new_file(folder / f"{key}.{number}.counts"))
                    pieces[-1].append(DocumentPiece(tokens, lengths, counts))
            rejects = stack.enter_context(new_file(folder / PART_REJECTS))
            for number, span in enumerate(shard):
                span.require_unchanged()
                for record in read_span(span, self.options.json_keys):
                    records[number] += 1
                    try:
                        documents = self._documents(record)
                    except BadRecord as bad:
                        if self.options.on_bad_line == STOP:
                            raise stopped_at(span, record, bad) from None
                        rejected[bad.reason] += 1
                        reject = {
                            "span": number,
                            "line": record.number + bad.lines_before,  # in the span
                            "offset": record.offset,
                            "reason": bad.reason,
                            "problem": bad.problem,
                            "excerpt": record.excerpt(),
                        }
                        rejects.write((json.dumps(reject) + "\n").encode())
                        continue
                    for row, document in zip(pieces, documents):
                        row[written % len(row)].add(document, self.dtype)
                    written += 1
                span.require_unchanged()
        assert written + rejected.total() == sum(records), "a record is neither accepted nor rejected"
        facts = {
            "documents": written,
            "records": records,
            "rejected": rejected,
            "rejects": rejects.entry(),
            "pieces": [[piece.facts() for piece in row] for row in pieces],
        }
        write_json(folder / PART_FACTS, facts)

    def _documents(self, record: InputRecord) -> list[list[list[int]]]:
        """Return the sequences of ids of a record's document, for each key.

        A text without tokens gives no sequence, and the last sequence ends with `eod`.
        """
        if record.bad is not None:
            raise record.bad
        documents = []
        for value in record.values:
            document = []
            for text in as_texts(value):
                try:
                    ids = self.tokenizer.tokenize(text)
                except ConfigError as error:
                    raise BadRecord("refused by the tokenizer", str(error)) from None
                if ids:
                    document.append(ids)
            if not document:
                raise BadRecord("no tokens", "the text gives no tokens")
            if self.options.append_eod:
                document[-1] = [*document[-1], self.tokenizer.eod]
            documents.append(document)
        return documents


def stopped_at(span: Span, record: InputRecord, bad: BadRecord) -> ConfigError:
    """Return the error that ends the work at a record which is no document."""
    place = f"row {record.number}" if record.offset is None else f"line {line_number(span, record)}"
    return ConfigError(f"{span.path}, {place}: {bad.problem} (--on-bad-line skip leaves it out)")


Task = tuple[Shard, Path]
"""A shard and the place of its part."""


def write_parts(
    options: PreprocessOptions, tokenizer: Tokenizer, tasks: Sequence[Task], workers_lock: Path
) -> Generator[Task, None, None]:
    """Write the parts of shards, and yield each task when its part is in its place, in any order.

    `workers` processes write them; with one worker, this process does it. Of several shards that raise an error, it is
    the first one's that is raised: it does not depend on the number of workers.
    """
    available = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    workers = min(available, len(tasks))
    if workers <= 1:
        encoder = Encoder(options, tokenizer)
        for task in tasks:
            _write_part(encoder, task)
            yield task
        return
    # spawn, not fork: this process has threads (progress), whose locks a fork would copy.
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(options, tokenizer, workers_lock),
    )
    try:
        yield from _as_completed(executor, tasks, 2 * workers)
    except BrokenProcessPool as error:
        raise RunFault(
            "a worker process died (out of memory?); run the same command again with fewer --workers"
        ) from error
    finally:
        # What the workers are doing after an error or Ctrl-C is not needed any more.
        processes = set(multiprocessing.active_children()) - others
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        executor.shutdown(wait=True)


def _as_completed(executor: ProcessPoolExecutor, tasks: Sequence[Task], at_once: int) -> Iterable[Task]:
    waiting = iter(tasks)
    running: dict[Future[None], int] = {}
    numbers: dict[int, Task] = {}
    failed: dict[int, BaseException] = {}

    def submit(count: int) -> None:
        for task in islice(waiting, count):
            number = len(numbers)
            numbers[number] = task
            running[executor.submit(_write_part_in_worker, task)] = number

    submit(at_once)
    while running and not (failed and min(failed) < min(running.values())):
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=running.__getitem__):
            number = running.pop(future)
            error = future.exception()
            if error is not None:
                failed[number] = error
                continue
            if not failed:
                submit(1)
            yield numbers[number]
    if failed:
        raise failed[min(failed)]


_encoder: Encoder | None = None


def _start_worker(options: PreprocessOptions, tokenizer: Tokenizer, workers_lock: Path) -> None:
    """Build this worker's encoder. Ctrl-C reaches every process of the terminal; the parent ends the workers."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker_lock(workers_lock)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(options, tokenizer)


def _end_with_parent() -> None:
    """End this process when its parent has died: a worker would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _write_part_in_worker(task: Task) -> None:
    assert _encoder is not None
    _write_part(_encoder, task)


def _write_part(encoder: Encoder, task: Task) -> None:
    shard, place = task
    aside = place.with_name(f"{place.name}.{os.getpid()}")
    aside.mkdir()
    try:
        encoder.write_part(shard, aside)
        publish_files([(aside, place)])
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
