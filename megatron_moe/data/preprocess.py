"""Writes text as indexed datasets, `PREFIX_KEY_document.bin`, `.idx` and the sidecar `.json`, in parallel.

The steps: find the inputs; refuse existing outputs; train a tokenizer where that is asked for; divide the inputs into
units; workers turn a unit into token bytes and document lengths; this process writes them, in the order of the inputs,
through the engine's builder into a temporary folder; when all is written, each dataset is published by renaming its
files. The `.idx` is renamed last: a dataset without it does not open, so a half-published one is not taken for
complete.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import TOKENIZER_FIELDS, DataConfig
from megatron_moe.data.documents import DocumentLocation, InputUnit, find_inputs, read_unit, work_units
from megatron_moe.data.index_file import FORMAT, Sidecar, sidecar_path, token_dtype
from megatron_moe.data.tokenizers import Tokenizer, build_tokenizer
from megatron_moe.data.train_tokenizer import train_sentencepiece
from megatron_moe.io.files import publish_files
from megatron_moe.io.hashing import sha256_of_file

if TYPE_CHECKING:
    from megatron_moe.data.datasets import IndexedDatasetBuilder


@dataclass(frozen=True)
class PreprocessOptions:
    """The options of tools/preprocess_data.py, one field per flag. With `workers` None there is one per core."""

    input: tuple[str, ...]
    output_prefix: str
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int | None = None
    overwrite: bool = False
    train_tokenizer: bool = False
    tokenizer_vocab_size: int = 4096
    tokenizer_model_type: str = "bpe"


@dataclass(frozen=True)
class EncodedUnit:
    """A unit as a worker returns it: token bytes and document lengths (int32) of each key, and its size."""

    tokens: list[bytes]
    lengths: list[numpy.ndarray]
    num_bytes: int


@dataclass
class DatasetWriter:
    """A dataset that is being written to temporary files: the engine's builder, and what the sidecar will say."""

    prefix: str
    aside: str
    dtype: numpy.dtype
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

    def add(self, content: bytes, lengths: numpy.ndarray) -> None:
        """Append documents: their token bytes, and their lengths in tokens."""
        ids = numpy.frombuffer(content, dtype=self.dtype)
        if len(ids) == 0:
            return
        self.min_id, self.max_id = min(self.min_id, int(ids.min())), max(self.max_id, int(ids.max()))
        self.tokens += len(ids)
        self.documents += len(lengths)
        self.digest.update(content)
        start = 0
        for length in lengths.tolist():
            self.builder.add_document(ids[start : start + length], [length])
            start += length

    def finish(self, tokenizer: Tokenizer, append_eod: bool) -> Sidecar:
        """Write the index and the sidecar aside."""
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
        """Close the file of tokens, which `finish` has done unless an error came first: it is thrown away then."""
        if "builder" in vars(self):
            with suppress(OSError):  # of a full disk, which the error before it has named
                self.builder.data_file.close()

    def renames(self) -> list[tuple[Path, Path]]:
        """Return each file with its place; the index is last, for a dataset without one does not open."""
        return [(Path(self.aside + suffix), Path(self.prefix + suffix)) for suffix in (".bin", ".json", ".idx")]


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
    writers = [DatasetWriter(prefix, os.path.join(aside, str(i)), dtype) for i, prefix in enumerate(prefixes)]
    try:
        with closing(encode_units(options, units)) as encoded:
            _write(encoded, writers, sum(unit.num_bytes for unit in units), show_progress)
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
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers {options.workers} must be at least 1")
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
    named = {name: getattr(options, name) for name in TOKENIZER_FIELDS}
    if options.train_tokenizer:
        named["tokenizer_type"] = "SentencePieceTokenizer"
    return build_tokenizer(DataConfig(**named), options.vocab_size)


def _train_tokenizer(options: PreprocessOptions, files: list[str]) -> None:
    texts = (text for unit in work_units(files) for _, values in read_unit(unit, options.json_keys) for text in values)
    train_sentencepiece(
        texts,
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
        """Return the token bytes and document lengths of a unit."""
        ids: list[list[int]] = [[] for _ in self.keys]
        lengths: list[list[int]] = [[] for _ in self.keys]
        for location, texts in read_unit(unit, self.keys):
            for number, text in enumerate(texts):
                new = self._ids(text, location)
                ids[number].extend(new)
                lengths[number].append(len(new))
        return EncodedUnit(
            [numpy.array(part, dtype=self.dtype).tobytes() for part in ids],
            [numpy.array(part, dtype=numpy.int32) for part in lengths],
            unit.num_bytes,
        )

    def _ids(self, text: str, location: DocumentLocation) -> list[int]:
        try:
            ids = self.tokenizer.tokenize(text)
        except ConfigError as error:
            raise location.error(str(error)) from error
        if not ids:
            raise location.error("the text gives no tokens")
        return [*ids, self.tokenizer.eod] if self.append_eod else ids


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


def _write(encoded: Iterator[EncodedUnit], writers: list[DatasetWriter], total_bytes: int, show_progress: bool) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %  {task.fields[rates]}"),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    done = 0
    with Progress(*columns, console=Console(stderr=True), disable=not show_progress) as progress:
        task = progress.add_task("tokenize", total=total_bytes, rates="")
        for unit in encoded:
            for writer, content, lengths in zip(writers, unit.tokens, unit.lengths):
                writer.add(content, lengths)
            done += unit.num_bytes
            seconds = max(time.monotonic() - started, 1e-9)
            rates = f"{writers[0].documents / seconds:,.0f} docs/s  {done / 1e6 / seconds:.2f} MB/s"
            progress.update(task, advance=unit.num_bytes, rates=rates)
    assert done == total_bytes, f"{done} of {total_bytes} bytes of input were encoded"


def _print_summary(sidecars: dict[str, Sidecar], total_bytes: int, seconds: float) -> None:
    for prefix, facts in sidecars.items():
        print(
            f"{prefix}: {facts.documents:,} documents, {facts.tokens:,} tokens ({facts.dtype}, ids "
            f"{facts.min_id} to {facts.max_id}), "
            f"{total_bytes / max(facts.tokens, 1):.2f} bytes of input per token; {seconds:.1f} s, "
            f"{total_bytes / 1e6 / seconds:.2f} MB/s"
        )
