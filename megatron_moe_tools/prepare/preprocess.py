"""Writes text as indexed datasets, `PREFIX_KEY_document.bin`, `.idx` and the sidecar `.json`, in parallel.

The steps: find the inputs; refuse existing outputs; train a tokenizer where that is asked for; divide the inputs into
shards; workers turn each shard into a part, a folder of files; when all parts are there, this process joins them in the
order of the inputs, and publishes each dataset by renaming its files. The `.idx` is renamed last: a dataset without it
does not open, so a half-published one is not taken for complete. A command that is killed goes on from the parts that
are finished, when it is run again (`output.ResumeDir`).
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import heapq
import io
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_moe.config.cli import add_flags
from megatron_moe.config.command_line import Parser, groups, parts
from megatron_moe.config.errors import ConfigError, RunFault, listing
from megatron_moe.config.paths import require_writable_file
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.data.index_file import MASK, Sidecar, read_sidecar, token_dtype
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.files import canonical_json, new_file, replacing
from megatron_moe.io.hashing import sha256_of_file
from megatron_moe.io.program import DONE, note, run_program
from megatron_moe_tools.compat.megatron_flags import table, translate
from megatron_moe_tools.prepare.chat import TRAIN_ON
from megatron_moe_tools.prepare.dataset_files import TokenSource, renames, write_dataset
from megatron_moe_tools.prepare.inputs import (
    TEXT,
    Shard,
    as_texts,
    find_inputs,
    kind_of,
    plan_shards,
    read_span,
    stopped_at,
)
from megatron_moe_tools.prepare.output import (
    PART_REJECTS,
    SKIP,
    STOP,
    PreprocessOptions,
    ResumeDir,
    Task,
    show_conversations,
    tokenizer_of,
    with_chat,
    write_parts,
)

_FEW_RECORDS = 1000
"""Records from which on the share of bad ones ends the work before all is read."""
_OF_RUNNING = ("input", "output_prefix", "workers", "overwrite", "log_interval", "on_bad_line", "max_bad_lines")
"""Options that change nothing in a finished part: the files of the input are compared instead of their names."""


def preprocess(options: PreprocessOptions, *, show_progress: bool = True) -> dict[str, Sidecar]:
    """Write the datasets of `options` and return prefix (`PREFIX_KEY_document`) -> sidecar, one per key.

    On an error existing files stay as they were, and finished parts stay in the work folder.

    Raises:
        ConfigError: options or input are wrong (naming file and line), or outputs exist and `overwrite` is off.
        RunFault: the disk is full.
    """
    _check_options(options)
    options = with_chat(options)
    files = find_inputs(options.input, refuse_empty=options.on_bad_line == STOP)
    if not files:
        raise ConfigError("--input names no files")
    written = set(map(os.path.realpath, options.outputs))
    for path in files:
        if os.path.realpath(path) in written:
            raise ConfigError(f"--input: {path} is what this command writes; put --output-prefix into another folder")
        if options.json_keys != ("text",) and kind_of(path) == TEXT:
            raise ConfigError(
                f"{path} is a text file, whose only key is text; --json-keys {' '.join(options.json_keys)} needs JSON "
                "lines or tables"
            )
    work = ResumeDir(options.output_prefix)
    command = _command(options, files)
    work.require_free(options.outputs, command, overwrite=options.overwrite)
    work.path.parent.mkdir(parents=True, exist_ok=True)
    started, total_bytes = time.monotonic(), sum(map(os.path.getsize, files))
    try:
        with work:
            work.begin(command, discard=options.overwrite)
            tokenizer = _tokenizer(options, files, work)
            shards = plan_shards(files)
            places = work.places(command, shards)
            if not work.publishing:
                parts = _finished_parts(options, work, list(zip(shards, places)), tokenizer)
                found = _counted(options, parts, len(places), total_bytes, show_progress)
                _join(options, work, [found[place] for place in places], tokenizer)
            else:
                work.publish()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunFault(
            f"{error.filename or work.path}: {error.strerror}; finished parts are kept in {work.path}: make room and "
            "run the same command again"
        ) from error
    sidecars = {}
    for prefix in options.prefixes:
        if (sidecar := read_sidecar(prefix)) is not None:
            sidecars[prefix] = sidecar
    if show_progress:
        seconds = time.monotonic() - started
        for prefix, sidecar in sidecars.items():
            print(
                f"{prefix}: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens ({sidecar.dtype}, ids "
                f"{sidecar.min_id} to {sidecar.max_id}), "
                f"{total_bytes / max(sidecar.tokens, 1):.2f} bytes of input per token; {seconds:.1f} s, "
                f"{total_bytes / 1e6 / seconds:.2f} MB/s"
            )
        first = next(iter(sidecars.values()))
        if first.rejected:
            bad = Counter(first.rejected)
            print(
                f"{first.documents + bad.total():,} records = {first.documents:,} documents + {bad.total():,} rejected "
                f"({_by_reason(bad)}), listed in {options.rejects}"
            )
    return sidecars


def _by_reason(rejected: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in rejected.most_common())


# ---- before the work


def _check_options(options: PreprocessOptions) -> None:
    if len(set(options.json_keys)) != len(options.json_keys):
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: a key is named twice")
    for key in options.json_keys:
        if not key or os.sep in key:
            raise ConfigError(f"--json-keys {key!r} cannot be part of a file name; rename the key")
    for name in ("workers", "partitions", "log_interval"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number} must be at least 1")
    if options.max_bad_lines is not None and not 0 <= options.max_bad_lines <= 1:
        raise ConfigError(f"--max-bad-lines {options.max_bad_lines} is a share, from 0 to 1, e.g. 0.01")
    if options.max_bad_lines is not None and options.on_bad_line != SKIP:
        raise ConfigError(f"--max-bad-lines {options.max_bad_lines} goes with --on-bad-line skip; add that, or drop it")
    kind = options.tokenizer_type
    if options.train_tokenizer and kind not in (None, "SentencePieceTokenizer"):
        raise ConfigError(f"--train-tokenizer trains a SentencePieceTokenizer, not --tokenizer-type {kind}")
    if options.train_tokenizer and options.tokenizer_model is None:
        raise ConfigError("--train-tokenizer needs --tokenizer-model FILE: where to write the model")
    for prefix in options.prefixes:
        require_writable_file("--output-prefix", f"{prefix}.bin", in_new_folder=True)
    if options.tokenizer_vocab_size != PreprocessOptions.tokenizer_vocab_size and not options.train_tokenizer:
        raise ConfigError(
            f"--tokenizer-vocab-size {options.tokenizer_vocab_size} is of a tokenizer that is trained; add "
            "--train-tokenizer, or drop it"
        )
    if options.chat_template is None:
        for name in ("train_on", "seq_length"):
            if getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} {getattr(options, name)} is for conversations; add --chat-template, or drop it"
                )
    elif options.train_tokenizer or options.tokenizer_hf_include_special_tokens:
        flag = "--train-tokenizer" if options.train_tokenizer else "--tokenizer-hf-include-special-tokens"
        raise ConfigError(f"{flag}: a chat template writes a tokenizer's special tokens itself; drop the flag")
    elif len(options.json_keys) > 1:
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: a conversation has one key, e.g. messages")
    elif options.seq_length is not None and options.seq_length < 1:
        raise ConfigError(f"--seq-length {options.seq_length} must be at least 1")
    if options.vocab_size is not None and options.tokenizer_type != "NullTokenizer":
        raise ConfigError(
            f"--vocab-size {options.vocab_size} is for --tokenizer-type NullTokenizer; other tokenizers have their "
            "own: drop it"
        )


def _command(options: PreprocessOptions, files: list[str]) -> dict[str, Any]:
    """Return what decides the content of a part in addition to its input: options, and the tokenizer's hash.

    A tokenizer that is trained on the input depends on the state of all its files.
    """
    command = asdict(options)
    for name in _OF_RUNNING:
        del command[name]
    command["json_keys"] = list(options.json_keys)
    command["tiktoken_special_tokens"] = list(options.tiktoken_special_tokens or ())
    if not options.train_tokenizer:
        tokenizer = tokenizer_of(options)
        command["tokenizer"] = [tokenizer.name, tokenizer.sha256, tokenizer.vocab_size, tokenizer.eod]
        for name in TOKENIZER_FIELDS:
            command.pop(name, None)
        return command
    states = []
    for path in files:
        about = os.stat(path)
        states.append([os.path.abspath(path), about.st_size, about.st_mtime_ns])
    command["trained on"] = hashlib.sha256(canonical_json(states)).hexdigest()
    return command


def _tokenizer(options: PreprocessOptions, files: list[str], work: ResumeDir) -> Tokenizer:
    """Return the tokenizer, which is trained first where that is asked for and was not done before a kill."""
    if options.train_tokenizer:
        model = str(options.tokenizer_model)
        trained = work.recorded("tokenizer")
        if trained is None or not os.path.isfile(model) or sha256_of_file(model) != trained:
            # Once training has begun, a model in this place is the one of this command.
            if os.path.exists(model) and not options.overwrite and work.recorded("training") is None:
                advice = "use it without --train-tokenizer, or add --overwrite"
                raise ConfigError(f"--tokenizer-model {model} exists: {advice}")
            work.record(training=model)
            size, kind = options.tokenizer_vocab_size, options.tokenizer_model_type
            train_sentencepiece(_texts(options, files), model, size, model_type=kind)
            work.record(tokenizer=sha256_of_file(model))
    return tokenizer_of(options)


def _texts(options: PreprocessOptions, files: list[str]) -> Iterator[str]:
    """Yield every text of the input."""
    for shard in plan_shards(files):
        for span in shard:
            for record in read_span(span, options.json_keys):
                if record.bad is not None and options.on_bad_line == STOP:
                    raise stopped_at(span, record, record.bad)
                for value in record.values:
                    yield from as_texts(value)


# ---- parts


@dataclass(frozen=True)
class FinishedPart:
    """A finished part: its shard, its folder, and what its `part.json` says."""

    shard: Shard
    place: Path
    facts: dict[str, Any]


def _finished_parts(
    options: PreprocessOptions, work: ResumeDir, planned: Sequence[Task], tokenizer: Tokenizer
) -> Generator[FinishedPart, None, None]:
    """Yield the parts of all shards: the ones that are there, then the others, which are written now."""
    read = partial(work.facts, itemsize=token_dtype(tokenizer.vocab_size).itemsize)
    todo = []
    for shard, place in planned:
        facts = read(place)
        if facts is not None and not (facts["rejected"] and options.on_bad_line == STOP):
            yield FinishedPart(shard, place, facts)
            continue
        todo.append((shard, place))
        if facts is None and place.exists():
            if work.assembling:
                raise RunFault(f"{place} is damaged; remove {work.path} and start over")
            shutil.rmtree(place)
    with closing(write_parts(options, tokenizer, todo, work.workers_lock)) as written:
        for shard, place in written:
            yield FinishedPart(shard, place, read(place) or {})


def _counted(
    options: PreprocessOptions, parts: Generator[FinishedPart, None, None], number: int, total_bytes: int, show: bool
) -> dict[Path, FinishedPart]:
    """Return place -> part of `number` parts, with a bar or lines for the person who waits for them.

    Raises:
        ConfigError: too many records are bad: of all, or of so many until here that their share says something.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %  {task.fields[rates]}"),
        TimeRemainingColumn(),
    )
    interval, limit = options.log_interval, options.max_bad_lines
    bar = Progress(*columns, console=Console(stderr=True), disable=not show or interval is not None)
    task = bar.add_task("tokenize", total=total_bytes, rates="")
    started = time.monotonic()
    documents = logged = num_bytes = 0
    rejected: Counter[str] = Counter()
    found: dict[Path, FinishedPart] = {}
    with bar, closing(parts):
        for part in parts:
            found[part.place] = part
            done = sum(span.end - span.start for span in part.shard)
            num_bytes += done
            documents += part.facts["documents"]
            rejected.update(part.facts["rejected"])
            bad = rejected.total()
            records = documents + bad
            if limit is not None and bad > limit * records and (records >= _FEW_RECORDS or len(found) == number):
                raise ConfigError(
                    f"--max-bad-lines {limit}: {bad} of {records} records are no documents ({_by_reason(rejected)}); "
                    "look at the input and at --json-keys, or allow more"
                )
            seconds = max(time.monotonic() - started, 1e-9)
            rates = f"{documents / seconds:,.0f} docs/s  {num_bytes / 1e6 / seconds:.2f} MB/s"
            bar.update(task, advance=done, rates=rates)
            if interval is not None and documents // interval > logged:
                logged = documents // interval
                print(f"{documents} documents, {rates}", file=sys.stderr, flush=True)
    return found


# ---- from parts to datasets


def _join(options: PreprocessOptions, work: ResumeDir, parts: list[FinishedPart], tokenizer: Tokenizer) -> None:
    """Put the datasets and the list of rejects together, and rename them to their places."""
    dtype = token_dtype(tokenizer.vocab_size)
    about = {
        "tokenizer_type": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": options.append_eod,
    }
    if options.chat is not None:
        about["chat"] = {"template": options.chat.template, "train_on": options.chat.train_on}
    rejected: Counter[str] = Counter()
    documents = 0
    for part in parts:
        rejected.update(part.facts["rejected"])
        documents += part.facts["documents"]
    if not documents:
        work.restart()
        raise ConfigError(
            f"no document was found in the input, and a dataset has at least one ({_by_reason(rejected)}); look at the "
            "input and at --json-keys"
        )
    work.record(plan=[part.place.name for part in parts])
    pairs = []
    for key, prefix in enumerate(options.prefixes):
        pieces = list(chain.from_iterable(part.facts["pieces"][key] for part in parts))
        # A piece without documents has bounds that no id has.
        bounds = {"min_id": min(map(itemgetter("min_id"), pieces)), "max_id": max(map(itemgetter("max_id"), pieces))}
        aside = work.whole / str(key)
        sources = _in_order(parts, key, options.num_pieces, dtype.itemsize)
        about |= {**bounds, "rejected": dict(sorted(rejected.items()))}
        write_dataset(aside, sources, dtype, about, consume=True)
        pairs += renames(aside, prefix)
    if rejected:
        # All rejects together, with the file of each and the line in the file.
        before = 0
        with new_file(work.whole / PART_REJECTS) as out:
            for part in parts:
                first_lines = []
                for span, records in zip(part.shard, part.facts["records"]):
                    before = before if span.start else 0
                    first_lines.append(before)
                    before += records
                with open(part.place / PART_REJECTS, encoding="utf-8") as file:
                    for line in file:
                        reject = json.loads(line)
                        number = reject.pop("span")
                        reject["line"] += first_lines[number]
                        out.write((json.dumps({"file": part.shard[number].path, **reject}) + "\n").encode())
        pairs.insert(0, (work.whole / PART_REJECTS, Path(options.rejects).absolute()))
    older = [Path(prefix + suffix).absolute() for prefix in options.prefixes for suffix in (".idx", ".json", MASK)]
    older.append(Path(options.rejects).absolute())
    work.publish(pairs, older)


def _in_order(parts: list[FinishedPart], key: int, num_pieces: int, itemsize: int) -> list[TokenSource]:
    """Return the pieces by partition: document i of all belongs to partition i modulo the number of partitions."""
    sources = []
    for partition in range(num_pieces):
        before = 0
        for part in parts:
            number = (partition - before) % num_pieces
            piece = part.facts["pieces"][key][number]
            name = part.place / f"{key}.{number}"
            sources.append(
                TokenSource(
                    Path(f"{name}.bin"),
                    piece["num_tokens"] * itemsize,
                    piece["sha256"],
                    piece["num_sequences"],
                    piece["num_documents"],
                    partial(_numbers, f"{name}.lengths", piece["num_tokens"]),
                    partial(_numbers, f"{name}.counts", piece["num_sequences"]),
                    piece["mask"] and (Path(f"{name}{MASK}"), piece["mask"]),
                )
            )
            before += part.facts["documents"]
    return sources


def _numbers(path: str, total: int) -> numpy.ndarray:
    """Return the int32 numbers of a file of a part, whose sum is known."""
    numbers = numpy.fromfile(path, numpy.int32)
    if int(numbers.sum(dtype=numpy.int64)) != total:
        raise RunFault(f"{path} is not what was written; is the disk bad? Remove the folder of parts and start over")
    return numbers


# ---- training a tokenizer

MODEL_TYPES = ("bpe", "unigram")
_LONGEST_LINE = 4096  # characters; longer lines are cut, or the trainer would leave them out
# Sums of the unigram trainer depend on the number of threads, which is therefore fixed and not the machine's.
_THREADS = 2
# 256 byte pieces, unknown, begin, end, newline.
_FIXED_PIECES = 260


def sample_texts(texts: Iterable[str], limit_bytes: int) -> list[str]:
    """Return at most `limit_bytes` (UTF-8) of `texts`, chosen by the hash of each text.

    The choice depends on the set of texts, neither on their order nor on chance, and needs memory for the sample alone.
    A single text larger than the limit is cut to it.
    """
    heap: list[tuple[int, str]] = []  # largest hash first
    taken: set[int] = set()
    size, bound = 0, 1 << 128  # hashes from the smallest dropped one on stay out, or order would count
    for text in texts:
        encoded = text.encode("utf-8")
        if len(encoded) > limit_bytes:
            text = encoded[:limit_bytes].decode("utf-8", errors="ignore")
            encoded = text.encode("utf-8")
        key = int.from_bytes(hashlib.sha256(encoded).digest()[:16], "big")
        if key in taken or key >= bound:
            continue
        taken.add(key)
        heapq.heappush(heap, (-key, text))
        size += len(encoded)
        while size > limit_bytes:
            negative_key, dropped = heapq.heappop(heap)
            bound = -negative_key
            size -= len(dropped.encode("utf-8"))
    return [text for _, text in sorted(heap, reverse=True)]


def train_sentencepiece(
    texts: Iterable[str], model_file: str | Path, size: int, *, model_type: str = "bpe", limit_bytes: int = 4_000_000
) -> None:
    """Train on a sample of `texts` and write `model_file`, which is renamed into place when it is complete.

    The same texts give the same bytes. bpe is the default: on 4 MB of source code it trains in under 2 s where unigram
    takes 16 s, with as many bytes per token.

    Args:
        size: number of pieces, including the 256 byte pieces and 4 fixed ones.
        model_type: one of MODEL_TYPES.
        limit_bytes: size of the sample.

    Raises:
        ConfigError: there is no text, or the sample cannot fill the vocabulary.
    """
    if size <= _FIXED_PIECES:
        raise ConfigError(f"--tokenizer-vocab-size {size} must exceed {_FIXED_PIECES} (bytes, fixed pieces), e.g. 2048")
    sample = sample_texts(texts, limit_bytes)
    if not sample:
        raise ConfigError("--train-tokenizer: the input contains no text to train on")
    import sentencepiece

    content = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(sample),
            model_writer=content,
            model_type=model_type,
            vocab_size=size,
            character_coverage=0.9999,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n"],
            max_sentence_length=8 * _LONGEST_LINE,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        advice = str(error)
        if largest := re.search(r"value <= (\d+)", advice):
            advice = f"it allows at most {largest[1]}"
        elif smallest := re.search(r"required_chars\. \d+ vs (\d+)", advice):
            advice = f"its characters need at least {smallest[1]}"
        raise ConfigError(f"--tokenizer-vocab-size {size} does not fit the text: {advice}") from error
    target = Path(model_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, "wb") as file:  # never half written
        file.write(content.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the non-empty lines, without their ends, in parts of at most `_LONGEST_LINE` characters."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _LONGEST_LINE):
                yield line[start : start + _LONGEST_LINE]


# ---- the command line; flags that Megatron-LM has too have its names

NAME = "megatron-moe prepare"

_SENTENCES = (
    "sentences are for BERT and T5; where a document needs several sequences, write its text as a list of texts under "
    "the key, and each becomes one"
)
_WORKERS = "measures the speed for several numbers of workers; each run prints its own, and --workers sets the number"
_REFUSED = {
    "--split-sentences": _SENTENCES,
    "--find-optimal-num-workers": _WORKERS,
    "--workers-to-check": _WORKERS,
    "--max-documents": _WORKERS,
    "--performance-dir": _WORKERS,
    "--tokenizer-sentencepiece-legacy": "a SentencePiece model is read as it is; drop it",
}
"""Flags of Megatron-LM's preprocess_data.py that are not here -> why, and what to do."""
_IGNORED = {
    "--lang": "read with --split-sentences alone",
    "--keep-newlines": "read with --split-sentences alone",
    "--dataset-impl": "there is one format, Megatron-LM's mmap",
}
_INTERRUPTED = "interrupted; the parts that are finished are kept, and the same command goes on with them"
_ANSWERED = frozenset(
    """--legacy-tokenizer --null-tokenizer-eod-id --null-tokenizer-pad-id --tokenizer-hf-no-use-fast
    --tokenizer-hf-no-include-special-tokens --tokenizer-hf-use-fast --tokenizer-metadata --tokenizer-special-tokens
    --trust-remote-code --use-gigatoken --vocab-extra-ids""".split()
)
"""Flags of its tokenizers whose answer in the table of training holds here too."""


def parser() -> argparse.ArgumentParser:
    """Return the parser, with one flag per field of `PreprocessOptions`."""
    p = Parser(
        prog=NAME,
        description="Tokenize text into indexed datasets: PREFIX_KEY_document.bin, .idx and a .json sidecar.",
        allow_abbrev=False,
    )
    add = p.add_argument_group("input and output").add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        help="JSON lines (.jsonl, .json), tables (.parquet, .arrow), texts (other files), .gz and .zst of lines and "
        "texts, folders of them or of a Hugging Face dataset, or patterns such as 'a/*.jsonl'",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys of the JSON objects; one dataset each (default: text). Of a list of texts each is a sequence",
    )
    add("--output-prefix", required=True, help="path and beginning of the names of the files to write")
    add("--append-eod", action="store_true", help="end every document with the end-of-document id")
    add("--workers", type=int, help="processes that tokenize (default: one per available core)")
    add(
        "--partitions",
        type=int,
        default=1,
        help="write first the documents 0, N, 2 N, ..., then 1, N + 1, ...: Megatron-LM's order (default: 1)",
    )
    add("--keep-sequential-samples", action="store_true", help="the order of the input, whatever --partitions says")
    add("--log-interval", type=int, help="documents between lines of progress, instead of a bar")
    add(
        "--on-bad-line",
        choices=(STOP, SKIP),
        default=STOP,
        help="what is no document ends the work, or is counted and listed in PREFIX_rejects.jsonl (default: stop)",
    )
    add("--max-bad-lines", type=float, help="with skip: the share of bad lines, from 0 to 1, beyond which it stops")
    add("--overwrite", action="store_true", help="replace files that exist, and drop parts of another command")
    add = p.add_argument_group("conversations, under the key messages or conversations").add_argument
    add(
        "--chat-template",
        nargs="?",
        const="",
        metavar="FILE",
        help="render conversations by this file in Jinja, or without FILE by the tokenizer's template, and write which "
        "tokens are trained beside them",
    )
    add(
        "--train-on",
        choices=TRAIN_ON,
        help="turns to train: the assistant's, its last, or all (default: assistant)",
    )
    add("--seq-length", type=int, help="a longer conversation is a bad line, for its answer would be cut off")
    add("--show", type=int, metavar="N", help="print the first N conversations, trained tokens marked; write nothing")
    tokenizer = p.add_argument_group("tokenizer")
    add_flags(tokenizer, TOKENIZER_FIELDS)
    add = tokenizer.add_argument
    add(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="HuggingFaceTokenizer: add what tokenizer.json adds to a text, such as a token that begins it",
    )
    add("--vocab-size", type=int, help="NullTokenizer: ids, with the end-of-document id")
    add = p.add_argument_group("training a SentencePiece tokenizer on the input first").add_argument
    add("--train-tokenizer", action="store_true", help="train and write the file --tokenizer-model, then use it")
    add("--tokenizer-vocab-size", type=int, default=4096, help="pieces of the new model (default: 4096)")
    add("--tokenizer-model-type", choices=MODEL_TYPES, default="bpe", help="algorithm (default: bpe)")
    return p


def main(argv: list[str]) -> int:
    """Preprocess as the flags say, and return the exit status: also 1 for a full disk."""
    errors = (ConfigError, OSError)
    return run_program(NAME, _main, argv, interrupted=_INTERRUPTED, errors=errors, rank=0)


def _main(argv: list[str]) -> int:
    p = parser()
    own = [name for action in p._actions for name in action.option_strings]
    # Of Megatron-LM's flags some become this program's; what is wrong with others is told in one message.
    kept: list[str] = []
    others: list[str] = []
    problems: list[str] = []
    for group in groups(argv):
        flag, given = parts(group)
        if flag in _REFUSED:
            problems.append(f"{flag}: {_REFUSED[flag]}")
        elif flag in _IGNORED:
            note(f"{NAME}: ignored: {' '.join([flag, *given])}: {_IGNORED[flag]}")
        elif flag in own and flag != "--tokenizer-type":
            kept += group
        elif flag in table() and flag not in (*own, *_ANSWERED) and table()[flag][0].target not in own:
            problems.append(f"{flag}: is a flag of training and says nothing here; drop it")
        else:
            others += group
    found = translate(others, own)
    problems += found.problems
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else listing(f"{len(problems)} flags", problems))
    for text in found.notes:
        note(f"{NAME}: {text}")
    flags: dict[str, Any] = vars(p.parse_args(kept + found.argv))
    count = flags.pop("show")
    options = PreprocessOptions(**{**flags, "input": tuple(flags["input"]), "json_keys": tuple(flags["json_keys"])})
    if count is None:
        preprocess(options)
    else:
        _check_options(options)
        show_conversations(with_chat(options), count)
    return DONE
