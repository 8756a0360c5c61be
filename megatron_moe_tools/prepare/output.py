"""The output of preparing data: a folder of finished parts, and the dataset that is written of them.

`.NAME.parts` for the output prefix NAME has `command.json` (what the work is), `parts/KEY` (one folder per shard,
renamed to its name when it is complete), `plan.json` (all parts are there), `whole/` (the datasets while they are put
together) and `publish.json` (these are complete, and are being renamed). Whatever the moment at which a process is
killed, the same command goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy

from megatron_moe.config.errors import ConfigError, RunFault, listing
from megatron_moe.data.index_file import DTYPES, FORMAT, MAGIC, Sidecar
from megatron_moe.io.files import canonical_json, free_bytes, new_file, publish_files, replace_json, sync, write_bytes
from megatron_moe.io.hashing import FileEntry, HashingFile, blocks_of_file
from megatron_moe.io.program import note
from megatron_moe.io.texts import size_text
from megatron_moe_tools.prepare.inputs import Shard

PART_FACTS, PART_REJECTS = "part.json", "rejects.jsonl"


class ResumeDir:
    """The folder of one output prefix. Used as a context manager, it is locked, and removed again if it is of no use.

    Attributes:
        path: the folder.
        parts: the folder of the finished parts.
        whole: the folder of the datasets that are put together.
    """

    def __init__(self, output_prefix: str) -> None:
        try:
            output_prefix.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"--output-prefix {output_prefix!r} is not UTF-8; choose another name") from error
        prefix = Path(output_prefix).absolute()
        self.path = prefix.with_name(f".{prefix.name}.parts")
        self.parts, self.whole = self.path / "parts", self.path / "whole"
        self._command, self._plan = self.path / "command.json", self.path / "plan.json"
        self._publish = self.path / "publish.json"
        self._lock: IO[str] | None = None

    def sweep(self) -> None:
        """Remove what a command left that was killed after its last file was in its place."""
        shutil.rmtree(self._done, ignore_errors=True)

    def __enter__(self) -> ResumeDir:
        self.sweep()
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

    @property
    def workers_lock(self) -> Path:
        """The file that each worker has locked as long as it lives."""
        return self.path / "workers"

    @property
    def _done(self) -> Path:
        return self.path.with_suffix(".done")

    def remove(self) -> None:
        """Remove the folder, so that a kill on the way leaves nothing that looks like unfinished work."""
        publish_files([(self.path, self._done)])
        shutil.rmtree(self._done)

    # ---- what the work is

    def holds(self, command: dict[str, Any]) -> bool:
        """Return whether the folder has work of this command."""
        return _read(self._command) == command

    def begin(self, command: dict[str, Any], *, discard: bool) -> None:
        """Make the folder one of this command.

        Raises:
            ConfigError: it has parts of another command, and not `discard`.
        """
        before = _read(self._command)
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
        self.record("training", None)
        self.record("tokenizer", None)
        replace_json(self._command, command, sole_writer=True)

    def recorded(self, name: str) -> Any:
        """Return what was recorded under a name; None where nothing was."""
        return _read(self.path / f"{name}.json")

    def record(self, name: str, value: Any) -> None:
        """Keep a value until the work is done."""
        replace_json(self.path / f"{name}.json", value, sole_writer=True)

    def restart(self) -> None:
        """Remove all parts and everything that was made of them."""
        for path in (self._publish, self._plan):
            path.unlink(missing_ok=True)
        for folder in (self.whole, self.parts):
            shutil.rmtree(folder)
            folder.mkdir()

    # ---- parts

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
        if self._plan.exists() and _read(self._plan) != [place.name for place in places]:
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
                if not self.assembling or (place / f"{key}.{number}.bin").exists():
                    sizes[f"{key}.{number}.bin"] = itemsize * piece["num_tokens"]
        for name, size in sizes.items():
            if not (place / name).is_file() or (place / name).stat().st_size != size:
                return None
        return found

    # ---- from parts to datasets

    @property
    def assembling(self) -> bool:
        """Whether all parts were done, so that their tokens may have been moved into the datasets."""
        return self._plan.exists()

    def begin_assembling(self, places: Sequence[Path]) -> None:
        """Say that all parts are done."""
        replace_json(self._plan, [place.name for place in places], sole_writer=True)

    @property
    def publishing(self) -> bool:
        """Whether the datasets were complete, so that files of them may be in their places."""
        return self._publish.exists()

    def publish(self, renames: Sequence[tuple[Path, Path]] = (), older: Sequence[Path] = ()) -> None:
        """Rename the files to their places, in this order, and remove this folder; or go on with that after a kill.

        Args:
            renames: (file, place); not needed for going on.
            older: files of the outputs of an earlier command, which are removed first.
        """
        if not self.publishing:
            record = {"renames": [list(map(str, pair)) for pair in renames], "older": list(map(str, older))}
            replace_json(self._publish, record, sole_writer=True)
        found = _read(self._publish)
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
    except (OSError, ValueError):
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


def worker_lock(path: Path) -> None:
    """Take a worker's share of the lock, for as long as the process lives."""
    _held.append(_locked(path, fcntl.LOCK_SH))


_held: list[IO[str]] = []


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
) -> None:
    """Write `aside` + `.bin`, `.idx` and, where it is known what they are `about`, `.json`.

    Args:
        aside: path without ending of the files, which are renamed later.
        consume: remove each source's file of tokens when its bytes are on the disk in `.bin`. A call after a kill then
            goes on with the sources that are left.

    Raises:
        ConfigError: there are no documents, or the disk has no room.
        RunFault: a source is not what its hash says.
    """
    documents = sum(source.num_documents for source in sources)
    if not documents:
        raise ConfigError("no document was found in the input, and a dataset has at least one")
    _require_room(aside.parent, sources, consume)
    bin_entry = _append(Path(f"{aside}.bin"), sources, consume)
    idx_entry = _write_index(Path(f"{aside}.idx"), sources, dtype)
    if about is None:
        return
    tokenizer, contents = about
    sidecar = Sidecar(
        format=FORMAT,
        tokens=bin_entry["bytes"] // dtype.itemsize,
        documents=documents,
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


def renames(aside: Path, prefix: str) -> list[tuple[Path, Path]]:
    """Return each file with its place; the index is last, for a dataset without one does not open."""
    found = []
    for suffix in (".bin", ".json", ".idx"):
        source = Path(f"{aside}{suffix}")
        if source.exists():
            found.append((source, Path(prefix + suffix)))
    return found


def _require_room(folder: Path, sources: Sequence[TokenSource], consume: bool) -> None:
    free = free_bytes(folder)
    index = tokens = 0
    for source in sources:
        index += 12 * source.num_sequences + 8 * source.num_documents
        if not consume:
            tokens += source.num_bytes
        elif source.path.exists():
            tokens = max(tokens, source.num_bytes)
    needed = index + tokens
    if free is not None and free < needed:
        raise ConfigError(
            f"{folder}: the dataset needs {size_text(needed)} more, {size_text(free)} are free; make room and run the "
            "same command again"
        )


# ---- tokens


def _append(target: Path, sources: Sequence[TokenSource], consume: bool) -> FileEntry:
    """Write the sources' tokens to `target`, behind those that an earlier call has consumed."""
    digest = hashlib.sha256()
    size = 0
    consumed = consume
    target.touch()
    with open(target, "r+b") as file:
        for source in sources:
            consumed = consumed and not source.path.exists()
            if consumed:
                _hash(source, target, _blocks(file, source.num_bytes), digest)
            else:
                file.seek(size)
                _hash(source, source.path, _written(file, source.path), digest)
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


def _hash(source: TokenSource, path: Path, blocks: Iterable[bytes | memoryview], whole: hashlib._Hash) -> None:
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
    if size != source.num_bytes or source.sha256 not in (None, digest.hexdigest()):
        raise RunFault(
            f"{path}: the {source.num_bytes} bytes of {source.path} are not what was written; is the disk bad?"
        )


# ---- the index


def _write_index(path: Path, sources: Sequence[TokenSource], dtype: numpy.dtype) -> FileEntry:
    """Write the `.idx` of the format, of which `index_file` has the layout."""
    codes = {known: code for code, known in DTYPES.items()}
    sequences = documents = 0
    for source in sources:
        sequences += source.num_sequences
        documents += source.num_documents
    with new_file(path) as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, codes[dtype], sequences, documents + 1))
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
        if not len(sums):
            continue
        total = int(sums[-1])
        if not is_ends:
            sums -= part.astype(numpy.int64) * factor
        file.write(sums)
