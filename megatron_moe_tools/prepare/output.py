"""What `megatron-moe prepare` writes: its options, the folder of finished parts, how a part is made, and the datasets.

`.NAME.parts` for the output prefix NAME has `parts/KEY` (a folder per shard, which gets its name when it is complete),
`whole/` (the datasets while they are put together) and `state.json`: `command` is what the work is, with `plan` all
parts are there, with `publish` the datasets are complete, and are being renamed. The same command goes on, whatever the
moment at which a process was killed.

A part's documents are dealt out over as many pieces as `--partitions` says, document i to piece i modulo that number:
which partition a piece belongs to depends on the number of documents before the shard, which is known when all shards
are done. For each key K and piece P there are `K.P.bin` (tokens), `K.P.lengths` (int32, tokens of each sequence) and
`K.P.counts` (int32, sequences of each document), of conversations also `K.P.mask` (uint8, for each token 1 if it is
trained). Worker processes write parts: no torch and no engine here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

import numpy

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError, RunFault, listing
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.data.index_file import MASK, SUFFIXES, token_dtype
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megatron_moe.io.files import (
    canonical_json,
    new_file,
    publish_files,
    replace_json,
    write_json,
)
from megatron_moe.io.hashing import HashingFile
from megatron_moe.io.program import note
from megatron_moe_tools.prepare.chat import (
    ASSISTANT,
    CHAT_KEYS,
    MARKS,
    ChatEncoder,
    ChatFormat,
    ChatIds,
    chat_format,
    conversation_of,
    marked,
)
from megatron_moe_tools.prepare.inputs import (
    EXCERPT,
    BadRecord,
    InputRecord,
    Shard,
    Span,
    as_texts,
    find_inputs,
    plan_shards,
    read_span,
    stopped_at,
)

PART_FACTS, PART_REJECTS = "part.json", "rejects.jsonl"
STOP, SKIP = "stop", "skip"


@dataclass(frozen=True)
class PreprocessOptions:
    """The options of megatron-moe prepare, one field per flag. With `workers` None there is one per core.

    `chat` is what `--chat-template` names, with `--train-on` and `--seq-length`; it is no flag.
    """

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
    chat_template: str | None = None
    train_on: str | None = None
    seq_length: int | None = None
    chat: ChatFormat | None = None

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
            found += [prefix + suffix for suffix in SUFFIXES]
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


def with_chat(options: PreprocessOptions) -> PreprocessOptions:
    """Return the options with the chat template that they name, and the key of conversations.

    Raises:
        ConfigError: see `chat_format`.
    """
    if options.chat_template is None:
        return options
    tokenizer, train_on = tokenizer_of(options), options.train_on or ASSISTANT
    chat = chat_format(options.chat_template, tokenizer, options.tokenizer_model, train_on, options.seq_length)
    options = replace(options, chat=chat)
    if options.json_keys == PreprocessOptions.json_keys:
        options = replace(options, json_keys=CHAT_KEYS[:1])
    return options


def show_conversations(options: PreprocessOptions, count: int) -> None:
    """Print the first conversations with their trained tokens marked, or why they are none."""
    if options.chat is None:
        raise ConfigError(f"--show {count} shows conversations; add --chat-template")
    if count < 1:
        raise ConfigError(f"--show {count} must be at least 1")
    read, documents_of = reader_of(options), documents_by(options, tokenizer_of(options))
    marks = MARKS
    if sys.stdout.isatty():
        marks = ("\x1b[30;42m", "\x1b[0m")
    spans = chain.from_iterable(plan_shards(find_inputs(options.input)))
    for number, record in enumerate(islice(chain.from_iterable(map(read, spans)), count), 1):
        try:
            if record.bad is not None:
                raise record.bad
            (found,) = documents_of(record)
        except BadRecord as bad:
            print(f"conversation {number}: {bad.reason}: {bad.problem}\n")
            continue
        assert isinstance(found, ChatIds)
        print(f"conversation {number}: {len(found.ids)} tokens, {sum(found.mask)} trained")
        print(f"{marked(found, marks, longest=None)}\n")


class ResumeDir:
    """The folder of one output prefix. Used as a context manager, it is locked, and removed again if it is of no use.

    Attributes:
        path: the folder.
        parts: the folder of the finished parts.
        whole: the folder of the datasets that are put together.
        workers_lock: the file that each worker has locked as long as it lives.
    """

    def __init__(self, output_prefix: str) -> None:
        if not os.path.basename(output_prefix):
            head = f"--output-prefix {output_prefix} is a folder"
            raise ConfigError(f"{head}; give a name in it, e.g. {output_prefix}train")
        try:
            output_prefix.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"--output-prefix {output_prefix!r} is not UTF-8; choose another name") from error
        prefix = Path(output_prefix).absolute()
        self.path = prefix.with_name(f".{prefix.name}.parts")
        self.parts, self.whole = self.path / "parts", self.path / "whole"
        self.workers_lock = self.path / "workers"
        self._state = self.path / "state.json"
        self._lock: IO[str] | None = None
        self._done = self.path.with_suffix(".done")
        shutil.rmtree(self._done, ignore_errors=True)  # of a command that was killed when its last file was in place

    def __enter__(self) -> ResumeDir:
        for folder in (self.parts, self.whole):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.path / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Workers of a command that was killed may still be writing for a moment.
        _locked(self.workers_lock, fcntl.LOCK_EX).close()
        return self

    def __exit__(self, *_: object) -> None:
        if self.path.exists():
            for unfinished in self.parts.glob("*.*"):  # of workers that were ended
                shutil.rmtree(unfinished)
            if not any(self.parts.iterdir()):
                self.remove()
        if self._lock is not None:
            self._lock.close()

    def remove(self) -> None:
        """Remove the folder, so that a kill on the way leaves nothing that looks like unfinished work."""
        publish_files([(self.path, self._done)])
        shutil.rmtree(self._done)

    def recorded(self, name: str) -> Any:
        """Return what was recorded under a name; None where nothing was."""
        return (_read(self._state) or {}).get(name)

    def record(self, **values: Any) -> None:
        """Keep values under their names until the work is done."""
        replace_json(self._state, {**(_read(self._state) or {}), **values}, sole_writer=True)

    @property
    def assembling(self) -> bool:
        """Whether all parts were done, so that their tokens may have been moved into the datasets."""
        return self.recorded("plan") is not None

    @property
    def publishing(self) -> bool:
        """Whether the datasets were complete, so that files of them may be in their places."""
        return self.recorded("publish") is not None

    def require_free(self, outputs: Iterable[str], command: dict[str, Any], *, overwrite: bool) -> None:
        """Refuse outputs that exist, unless they may be replaced, or this command has put them there.

        Raises:
            ConfigError: an output exists, or is a folder.
        """
        if self.publishing and self.recorded("command") == command:
            return
        for path in outputs:
            if os.path.isdir(path):
                raise ConfigError(f"{path} is a folder; choose another --output-prefix")
            if os.path.exists(path) and not overwrite:
                raise ConfigError(f"{path} exists; choose another --output-prefix or add --overwrite")

    def begin(self, command: dict[str, Any], *, discard: bool) -> None:
        """Make the folder one of this command.

        Raises:
            ConfigError: it has parts of another command, and not `discard`.
        """
        before = self.recorded("command")
        if before == command:
            return
        if before is not None and any(self.parts.iterdir()) and not discard:
            lines = []
            for key, now in command.items():
                if before.get(key) != now:
                    lines.append(f"{key}: {before.get(key)}, now {now}")
            head = f"{self.path} has parts of another command: run that one, or add --overwrite to drop them"
            raise ConfigError(listing(head, lines))
        self.restart()
        replace_json(self._state, {"command": command}, sole_writer=True)

    def restart(self) -> None:
        """Remove all parts and everything that was made of them."""
        self.record(publish=None, plan=None)
        for folder in (self.whole, self.parts):
            shutil.rmtree(folder)
            folder.mkdir()

    def places(self, command: dict[str, Any], shards: Sequence[Shard]) -> list[Path]:
        """Return the place of each shard's part: its name is a hash of the command and of the state of its files.

        Parts of other names are removed, and so is everything that was made of them.
        """
        seen: Counter[str] = Counter()
        places = []
        for shard in shards:
            spans = [[os.path.abspath(s.path), s.start, s.end, s.size, s.mtime_ns] for s in shard]
            key = hashlib.sha256(canonical_json([command, spans])).hexdigest()[:24]
            seen[key] += 1
            places.append(self.parts / f"{key}-{seen[key]}")
        if self.assembling and self.recorded("plan") != [place.name for place in places]:
            note(f"the input has changed: what {self.path} has of it is done again")
            self.restart()
        stale = 0
        for path in set(self.parts.iterdir()).difference(places):
            stale += (path / PART_FACTS).exists() and "." not in path.name
            shutil.rmtree(path)
        if stale:
            note(f"{self.path}: {stale} parts are of input that has changed, and are removed")
        return places

    def facts(self, place: Path, itemsize: int) -> dict[str, Any] | None:
        """Return what `part.json` says; None where there is no part, or a file of it is not as long as that says.

        Files of tokens may be gone once the datasets are put together.
        """
        found = _read(place / PART_FACTS)
        if not isinstance(found, dict):
            return None
        sizes = {PART_REJECTS: found["rejects"]["bytes"]}
        for key, row in enumerate(found["pieces"]):
            for number, piece in enumerate(row):
                sizes[f"{key}.{number}.lengths"] = 4 * piece["num_sequences"]
                sizes[f"{key}.{number}.counts"] = 4 * piece["num_documents"]
                if (place / f"{key}.{number}.bin").exists() or not self.assembling:
                    sizes[f"{key}.{number}.bin"] = itemsize * piece["num_tokens"]
                mask = f"{key}.{number}{MASK}"
                if piece["mask"] is not None and ((place / mask).exists() or not self.assembling):
                    sizes[mask] = piece["num_tokens"]
        for name, size in sizes.items():
            if not (place / name).is_file() or (place / name).stat().st_size != size:
                return None
        return found

    def publish(self, renames: Sequence[tuple[Path, Path]] = (), older: Sequence[Path] = ()) -> None:
        """Rename the files to their places, in this order, and remove this folder; or go on with that after a kill.

        Args:
            renames: (file, place); not needed for going on.
            older: files of the outputs of an earlier command, which are removed first.
        """
        if not self.publishing:
            pairs = [list(map(str, pair)) for pair in renames]
            self.record(publish={"renames": pairs, "older": list(map(str, older))})
        found = self.recorded("publish")
        left, older = [], list(map(Path, found["older"]))
        for source, target in found["renames"]:
            if os.path.exists(source):
                left.append((Path(source), Path(target)))
            elif Path(target) in older:  # it is the new one
                older.remove(Path(target))
        # An older dataset loses its index first, so that no mixture of the two ever opens.
        publish_files(left, older)
        self.remove()


def _read(path: Path) -> Any:
    """Return the content of a JSON file; None where there is none, or not a whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _locked(path: Path, how: int) -> IO[str]:
    """Open a file and lock it; the lock ends with the process, or when the file is closed.

    Raises:
        ConfigError: another process has it.
    """
    file = open(path, "a")  # noqa: SIM115
    try:
        fcntl.flock(file, how)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"{path.parent}: another process is writing this output; wait for it") from error
    except OSError as error:
        note(f"{path} cannot be locked ({error.strerror}): start this command only once at a time")
    return file


# ---- a part


Document = list[list[int]] | ChatIds
"""The sequences of ids of a text, or a conversation with the mask of its trained tokens."""


@dataclass
class DocumentPiece:
    """Every `num_pieces`-th document of a part, for one key, while it is written."""

    tokens: HashingFile
    lengths: HashingFile
    counts: HashingFile
    mask: HashingFile | None = None
    num_tokens: int = 0
    num_sequences: int = 0
    num_documents: int = 0
    min_id: int = 1 << 62
    max_id: int = -1

    def add(self, document: Document, dtype: numpy.dtype) -> None:
        """Append a document."""
        sequences = [document.ids] if isinstance(document, ChatIds) else document
        ids = numpy.array(sequences[0] if len(sequences) == 1 else list(chain(*sequences)), dtype=dtype)
        self.tokens.write(ids)
        self.lengths.write(numpy.array(list(map(len, sequences)), dtype=numpy.int32))
        self.counts.write(numpy.array([len(sequences)], dtype=numpy.int32))
        if self.mask is not None and isinstance(document, ChatIds):
            self.mask.write(numpy.array(document.mask, dtype=numpy.uint8))
        self.num_tokens += len(ids)
        self.num_sequences += len(sequences)
        self.num_documents += 1
        self.min_id, self.max_id = min(self.min_id, int(ids.min())), max(self.max_id, int(ids.max()))

    def facts(self) -> dict[str, Any]:
        """Return what part.json says of the piece: the hashes of its tokens and of their mask, and the numbers."""
        facts = dict(vars(self), sha256=self.tokens.entry()["sha256"])
        if self.mask is not None:
            facts["mask"] = self.mask.entry()["sha256"]
        del facts["tokens"], facts["lengths"], facts["counts"]
        return facts


Task = tuple[Shard, Path]
"""A shard and the place of its part."""


def write_part(options: PreprocessOptions, tokenizer: Tokenizer, task: Task) -> None:
    """Write the part of a shard onto the disk, and rename it to its place when it is complete.

    Raises:
        ConfigError: a record is no document and `--on-bad-line` is stop, or a file changed while it was read.
    """
    shard, place = task
    dtype = token_dtype(tokenizer.vocab_size)
    read, documents_of = reader_of(options), documents_by(options, tokenizer)
    written, records, rejected = 0, [0] * len(shard), Counter[str]()
    aside = place.with_name(f"{place.name}.{os.getpid()}")
    aside.mkdir()
    try:
        with ExitStack() as stack:
            pieces: list[list[DocumentPiece]] = []
            for key in range(len(options.json_keys)):
                pieces.append([])
                for number in range(options.num_pieces):
                    tokens = stack.enter_context(new_file(aside / f"{key}.{number}.bin"))
                    lengths = stack.enter_context(new_file(aside / f"{key}.{number}.lengths"))
                    counts = stack.enter_context(new_file(aside / f"{key}.{number}.counts"))
                    piece = DocumentPiece(tokens, lengths, counts)
                    if options.chat is not None:
                        piece.mask = stack.enter_context(new_file(aside / f"{key}.{number}{MASK}"))
                    pieces[-1].append(piece)
            rejects = stack.enter_context(new_file(aside / PART_REJECTS))
            for number, span in enumerate(shard):
                span.require_unchanged()
                for record in read(span):
                    records[number] += 1
                    try:
                        if record.bad is not None:
                            raise record.bad
                        documents = documents_of(record)
                    except BadRecord as bad:
                        if options.on_bad_line == STOP:
                            raise stopped_at(span, record, bad) from None
                        rejected[bad.reason] += 1
                        shown = record.content[: 4 * EXCERPT].decode("utf-8", errors="backslashreplace")
                        if record.values and not record.content:
                            shown = str(record.values[0])
                        reject = {
                            "span": number,
                            "line": record.number + bad.lines_before,  # in the span
                            "offset": record.offset,
                            "reason": bad.reason,
                            "problem": bad.problem,
                            "excerpt": shown[:EXCERPT],
                        }
                        rejects.write((json.dumps(reject) + "\n").encode())
                        continue
                    for row, document in zip(pieces, documents):
                        row[written % len(row)].add(document, dtype)
                    written += 1
                span.require_unchanged()
        assert written + rejected.total() == sum(records), "a record is neither accepted nor rejected"
        facts = {
            "documents": written,
            "records": records,
            "rejected": rejected,
            "rejects": rejects.entry(),
            "pieces": [list(map(DocumentPiece.facts, row)) for row in pieces],
        }
        write_json(aside / PART_FACTS, facts)
        publish_files([(aside, place)])
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def reader_of(options: PreprocessOptions) -> Callable[[Span], Iterator[InputRecord]]:
    """Return what reads the records of a span: texts, or with a chat template conversations."""
    if options.chat is None:
        return partial(read_span, keys=options.json_keys)
    (key,) = options.json_keys
    return partial(
        read_span, keys=(key, *CHAT_KEYS), take=lambda record, _, there: [conversation_of(record, key, there)]
    )


def documents_by(options: PreprocessOptions, tokenizer: Tokenizer) -> Callable[[InputRecord], Sequence[Document]]:
    """Return what makes the document of a sound record, for each key, or raises a `BadRecord`."""
    if options.chat is None:
        return partial(_of_texts, options, tokenizer)
    assert isinstance(tokenizer, HuggingFaceTokenizer), "templates are of these"
    encode = ChatEncoder(tokenizer, options.chat, eod=options.append_eod)
    return lambda record: [encode(record.values[0])]


def _of_texts(options: PreprocessOptions, tokenizer: Tokenizer, record: InputRecord) -> list[list[list[int]]]:
    """Return the document of a record's texts, for each key.

    A text without tokens gives no sequence, and the last sequence ends with `eod`.
    """
    documents = []
    for value in record.values:
        document: list[list[int]] = []
        for text in as_texts(value):
            try:
                ids = tokenizer.tokenize(text)
            except ConfigError as error:
                raise BadRecord("refused by the tokenizer", str(error)) from None
            if ids:
                document.append(ids)
        if not document:
            raise BadRecord("no tokens", "the text gives no tokens")
        if options.append_eod:
            document[-1] = [*document[-1], tokenizer.eod]
        documents.append(document)
    return documents


def write_parts(
    options: PreprocessOptions, tokenizer: Tokenizer, tasks: Sequence[Task], workers_lock: Path
) -> Generator[Task, None, None]:
    """Write the parts of shards, and yield each task in its turn, when its part is in its place.

    `workers` processes write them; with one worker, this process does it. Of several shards that raise an error, it is
    the first one's that is raised: it does not depend on the number of workers.
    """
    available = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    workers = min(available, len(tasks))
    if workers <= 1:
        for task in tasks:
            write_part(options, tokenizer, task)
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
        # Not executor.map: it cancels futures at an error, which a pool whose workers are then ended trips over.
        futures = [executor.submit(_write_part_in_worker, task) for task in tasks]
        for task, future in zip(tasks, futures):
            future.result()
            yield task
    except BrokenProcessPool as error:
        advice = "run the same command again with fewer --workers"
        raise RunFault(f"a worker process died (out of memory?); {advice}") from error
    finally:
        # What the workers are doing after an error or Ctrl-C is not needed any more.
        processes = set(multiprocessing.active_children()) - others
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        executor.shutdown(wait=True)


_worker: tuple[PreprocessOptions, Tokenizer, IO[str]] | None = None
"""What a worker process works with, and the lock that it holds as long as it lives."""


def _start_worker(options: PreprocessOptions, tokenizer: Tokenizer, workers_lock: Path) -> None:
    """Prepare this worker. Ctrl-C reaches every process of the terminal; the parent ends the workers."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = options, tokenizer, _locked(workers_lock, fcntl.LOCK_SH)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has died: a worker would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _write_part_in_worker(task: Task) -> None:
    assert _worker is not None
    options, tokenizer, _ = _worker
    write_part(options, tokenizer, task)
