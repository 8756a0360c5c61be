"""Writes text as indexed datasets, `PREFIX_KEY_document.bin`, `.idx` and the sidecar `.json`, in parallel.

The steps: find the inputs; refuse existing outputs; train a tokenizer where that is asked for; divide the inputs into
units; workers turn a unit into token bytes and document lengths; this process writes them, in the order of the inputs,
through the engine's builder into a temporary folder; when all is written, each dataset is published by renaming its
files. The `.idx` is renamed last: a dataset without it does not open, so a half-published one is not taken for
complete.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.data.dataset_writer import DatasetWriter
from megatron_moe.data.documents import DocumentLocation, InputUnit, as_texts, find_inputs, read_unit, work_units
from megatron_moe.data.index_file import Sidecar, token_dtype
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megatron_moe.data.train_tokenizer import train_sentencepiece
from megatron_moe.io.files import publish_files


@dataclass(frozen=True)
class PreprocessOptions:
    """The options of tools/preprocess_data.py, one field per flag. With `workers` None there is one per core."""

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


@dataclass(frozen=True)
class EncodedUnit:
    """A unit as a worker returns it, with its size in bytes.

    For each key: the token bytes, the tokens of each sequence (int32) and the sequences of each document (int32).
    """

    tokens: list[bytes]
    lengths: list[numpy.ndarray]
    sequences: list[numpy.ndarray]
    num_bytes: int


def preprocess(options: PreprocessOptions, *, show_progress: bool = True) -> dict[str, Sidecar]:
    """Write the datasets of `options` and return prefix (`PREFIX_KEY_document`) -> sidecar, one per key.

    On an error, temporary files are removed and existing files stay as they were.

    Raises:
        ConfigError: options or input are wrong (naming file and line), or outputs exist and `overwrite` is off.
    """
    prefixes = [f"{options.output_prefix}_{key}_document" for key in options.json_keys]
    _check_options(options, prefixes)
    files = find_inputs(options.input)
    if not files:
        raise ConfigError("--input names no files")
    if options.train_tokenizer:
        _train_tokenizer(options, files)
    tokenizer = _tokenizer(options)
    units, dtype = work_units(files), token_dtype(tokenizer.vocab_size)
    folder = os.path.dirname(os.path.abspath(options.output_prefix))
    os.makedirs(folder, exist_ok=True)
    aside = tempfile.mkdtemp(prefix=f".{os.path.basename(options.output_prefix)}-", dir=folder)
    started = time.monotonic()
    partitions = 1 if options.keep_sequential_samples else options.partitions
    writers = [
        DatasetWriter(prefix, os.path.join(aside, str(i)), dtype, partitions) for i, prefix in enumerate(prefixes)
    ]
    try:
        with closing(encode_units(options, units)) as encoded:
            _write(encoded, writers, sum(unit.num_bytes for unit in units), show_progress, options.log_interval)
        sidecars = {writer.prefix: writer.finish(tokenizer, options.append_eod) for writer in writers}
        # An older dataset loses its index first, so that no mixture of the two ever opens.
        older = [Path(writer.prefix + suffix) for writer in writers for suffix in (".idx", ".json")]
        publish_files([rename for writer in writers for rename in writer.renames()], older)
    finally:
        for writer in writers:
            writer.close()
        shutil.rmtree(aside, ignore_errors=True)
    if show_progress:
        _print_summary(sidecars, sum(unit.num_bytes for unit in units), time.monotonic() - started)
    return sidecars


def _check_options(options: PreprocessOptions, prefixes: list[str]) -> None:
    if len(set(options.json_keys)) != len(options.json_keys):
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: a key is named twice")
    for key in options.json_keys:
        if not key or os.sep in key:
            raise ConfigError(f"--json-keys {key!r} cannot be part of a file name; rename the key")
    for name in ("workers", "partitions", "log_interval"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number} must be at least 1")
    if options.train_tokenizer and options.tokenizer_type not in (None, "SentencePieceTokenizer"):
        raise ConfigError(
            f"--train-tokenizer trains a SentencePieceTokenizer, not --tokenizer-type {options.tokenizer_type}"
        )
    if options.train_tokenizer and options.tokenizer_model is None:
        raise ConfigError("--train-tokenizer needs --tokenizer-model FILE: where to write the model")
    if not os.path.basename(options.output_prefix):
        raise ConfigError(
            f"--output-prefix {options.output_prefix} is a folder; give a name in it, e.g. {options.output_prefix}train"
        )
    for prefix in prefixes:
        existing = [prefix + suffix for suffix in (".bin", ".idx", ".json") if os.path.exists(prefix + suffix)]
        if existing and not options.overwrite:
            raise ConfigError(f"{existing[0]} exists; choose another --output-prefix or add --overwrite")


def _tokenizer(options: PreprocessOptions) -> Tokenizer:
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


def _train_tokenizer(options: PreprocessOptions, files: list[str]) -> None:
    values = (value for unit in work_units(files) for _, found in read_unit(unit, options.json_keys) for value in found)
    train_sentencepiece(
        (text for value in values for text in as_texts(value)),
        str(options.tokenizer_model),
        options.tokenizer_vocab_size,
        model_type=options.tokenizer_model_type,
        overwrite=options.overwrite,
    )


class Encoder:
    """A tokenizer with the options that turn a unit into token bytes; each worker has one."""

    def __init__(self, options: PreprocessOptions) -> None:
        self.keys = options.json_keys
        self.append_eod = options.append_eod
        self.tokenizer = _tokenizer(options)
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def encode(self, unit: InputUnit) -> EncodedUnit:
        """Return the token bytes of a unit, and how they are divided into sequences and documents."""
        ids: list[list[int]] = [[] for _ in self.keys]
        lengths: list[list[int]] = [[] for _ in self.keys]
        sequences: list[list[int]] = [[] for _ in self.keys]
        for location, values in read_unit(unit, self.keys):
            for number, value in enumerate(values):
                document = self._document(value, location)
                sequences[number].append(len(document))
                for sequence in document:
                    ids[number].extend(sequence)
                    lengths[number].append(len(sequence))
        return EncodedUnit(
            [numpy.array(part, dtype=self.dtype).tobytes() for part in ids],
            [numpy.array(part, dtype=numpy.int32) for part in lengths],
            [numpy.array(part, dtype=numpy.int32) for part in sequences],
            unit.num_bytes,
        )

    def _document(self, value: str | list[str], location: DocumentLocation) -> list[list[int]]:
        """Return the sequences of a document; a text without tokens gives none, and the last one ends with `eod`."""
        try:
            document = [ids for text in as_texts(value) if (ids := self.tokenizer.tokenize(text))]
        except ConfigError as error:
            raise location.error(str(error)) from error
        if not document:
            raise location.error("the text gives no tokens")
        if self.append_eod:
            document[-1] = [*document[-1], self.tokenizer.eod]
        return document


_encoder: Encoder | None = None


def _start_worker(options: PreprocessOptions) -> None:
    """Build this worker's encoder. Ctrl-C reaches every process of the terminal; the parent ends the workers."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _encoder = Encoder(options)


def _encode_in_worker(unit: InputUnit) -> EncodedUnit:
    assert _encoder is not None
    return _encoder.encode(unit)


def encode_units(options: PreprocessOptions, units: list[InputUnit]) -> Generator[EncodedUnit, None, None]:
    """Return a generator of the encoded units in order.

    `workers` processes encode them and start immediately; with one worker, this process does it.
    """
    available = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    workers = min(available, len(units))
    if workers == 1:
        encoder = Encoder(options)
        return (encoder.encode(unit) for unit in units)
    # spawn, not fork: this process has threads (progress, the engine's libraries), whose locks a fork would copy.
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(options,)
    )
    waiting = iter(units)
    window: deque[Future[EncodedUnit]] = deque()
    for unit in islice(waiting, 4 * workers):
        window.append(executor.submit(_encode_in_worker, unit))
    return _in_order(executor, window, waiting, others)


def _in_order(
    executor: ProcessPoolExecutor,
    window: deque[Future[EncodedUnit]],
    waiting: Iterator[InputUnit],
    others: set[BaseProcess],
) -> Generator[EncodedUnit, None, None]:
    try:
        while window:
            encoded = window.popleft().result()
            for unit in islice(waiting, 1):
                window.append(executor.submit(_encode_in_worker, unit))
            yield encoded
    except BrokenProcessPool as error:
        raise RuntimeError("a worker process died (out of memory?); try fewer --workers") from error
    finally:
        if window:  # an error or Ctrl-C: what the workers are doing is not needed any more
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
        executor.shutdown(wait=True, cancel_futures=True)


def _write(
    encoded: Iterator[EncodedUnit],
    writers: list[DatasetWriter],
    total_bytes: int,
    show_progress: bool,
    log_interval: int | None,
) -> None:
    """Write the units; with `log_interval`, print a line each time that many documents more are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %  {task.fields[rates]}"),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    done = logged = 0
    quiet = not show_progress or log_interval is not None
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("tokenize", total=total_bytes, rates="")
        for unit in encoded:
            for writer, content, lengths, sequences in zip(writers, unit.tokens, unit.lengths, unit.sequences):
                writer.add(content, lengths, sequences)
            done += unit.num_bytes
            seconds = max(time.monotonic() - started, 1e-9)
            rates = f"{writers[0].documents / seconds:,.0f} docs/s  {done / 1e6 / seconds:.2f} MB/s"
            progress.update(task, advance=unit.num_bytes, rates=rates)
            if log_interval is not None and writers[0].documents // log_interval > logged:
                logged = writers[0].documents // log_interval
                print(f"{writers[0].documents} documents, {rates}", file=sys.stderr, flush=True)
    assert done == total_bytes, f"{done} of {total_bytes} bytes of input were encoded"


def _print_summary(sidecars: dict[str, Sidecar], total_bytes: int, seconds: float) -> None:
    for prefix, facts in sidecars.items():
        print(
            f"{prefix}: {facts.documents:,} documents, {facts.tokens:,} tokens ({facts.dtype}, ids "
            f"{facts.min_id} to {facts.max_id}), "
            f"{total_bytes / max(facts.tokens, 1):.2f} bytes of input per token; {seconds:.1f} s, "
            f"{total_bytes / 1e6 / seconds:.2f} MB/s"
        )
