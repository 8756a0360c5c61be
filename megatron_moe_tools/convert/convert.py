"""The steps of a conversion, whatever its direction.

    plan        check names, shapes, dtypes and free space before anything is written
    write       file by file; the journal keeps each that is complete, and its rows of the certificate
    coverage    check that every tensor of both sides was read and written exactly once
    read again  read every tensor from the disk, transform it back, and compare both hashes
    publish     write the certificate and rename the output

The directions are in `to_native`, `to_hf` and `reshard`.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_moe.checkpoint.step_reader import AveragedReader, StepReader
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.io.files import free_bytes
from megatron_moe.io.hashing import FileEntry, sha256_of_file
from megatron_moe.io.program import note
from megatron_moe.io.texts import size_text
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.workspace import ConversionProgress, Workspace

Advance = Callable[[int], object]
Record = dict[str, Any]
_SLACK = 64 * 2**20
"""Bytes that small files may need in addition."""


@dataclass(frozen=True)
class ConversionOptions:
    """The options of the command line that have an influence on the output."""

    dtype: torch.dtype | None = None
    fp8: bool = False
    family: str | None = None
    drop_mtp: bool = False
    no_optim: bool = False
    ema: bool = False
    allow_suspicious_weights: bool = False
    max_shard_bytes: int = 5 * 10**9

    def plain(self) -> dict[str, Any]:
        """Return the options as plain values for JSON."""
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return {**vars(self), "dtype": dtype}


@dataclass(frozen=True)
class OutputFile:
    """A file of the output; `content` lists its blocks, which each direction defines."""

    name: str
    num_bytes: int
    content: tuple[Any, ...]


@dataclass
class Conversion(ABC):
    """A planned conversion of one source; a subclass for each direction says what is written.

    Attributes:
        source: a Hugging Face folder, or a step.
        options: options of the command line.
        inputs: the source's files by name.
        notes: remarks from planning.
        warnings: warnings from planning.
        units: files to write.
        summary: the model in a line.
    """

    source: Path
    options: ConversionOptions
    inputs: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    units: list[OutputFile] = field(default_factory=list)
    summary: str = ""
    direction: ClassVar[str] = ""

    @abstractmethod
    def write(self, unit: OutputFile, output: Path, advance: Advance) -> Record:
        """Write one file; return a record with `rows`, `entry` and what `finish` needs."""

    @abstractmethod
    def finish(self, output: Path, records: list[Record]) -> dict[str, FileEntry]:
        """Write the small files. Returns all files of the output with their hashes, those of the units too."""

    @abstractmethod
    def check(self, output: Path, records: list[Record], advance: Advance) -> None:
        """Read the output again, transform it back, and compare it with what was written and read.

        Raises:
            ConfigError: it is not what was written, or does not transform back into the source.
        """

    @abstractmethod
    def coverage(self, records: list[Record]) -> None:
        """Check that every tensor of both sides was read and written exactly once.

        Raises:
            ConfigError: some were not.
        """

    @abstractmethod
    def facts(self, records: list[Record]) -> dict[str, Any]:
        """Return what the certificate says in addition to rows, files and notes."""

    def wanted_inputs(self) -> dict[str, FileEntry] | None:
        """Return sizes and hashes of the input files, where the source has a manifest."""
        return None

    @property
    def num_bytes(self) -> int:
        """Upper bound of the output's bytes."""
        return sum(unit.num_bytes for unit in self.units)

    def identity(self) -> dict[str, Any]:
        """Return what has to be the same for a second start to go on with the work of the first."""
        status = {name: path.stat() for name, path in self.inputs.items()}
        return {
            "direction": self.direction,
            "source": str(self.source.resolve()),
            "inputs": {name: [one.st_size, one.st_mtime_ns, one.st_ino] for name, one in status.items()},
            "options": self.options.plain(),
            "versions": certificate.versions(),
        }


def reader_of(step: Path, options: ConversionOptions) -> StepReader:
    """Return the reader of a step's weights, or of their averages with `--ema`.

    Raises:
        ConfigError: the step has no averages.
    """
    if not options.ema:
        return StepReader(step)
    reader = AveragedReader(step)
    if not reader.has_averages:
        raise ConfigError(f"--ema: {step} has no average of its weights, which a run with --ema-decay saves")
    return reader


def convert(
    conversion: Conversion, workspace: Workspace, verify: Callable[[Path], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Write, check and read again the output of a conversion; it is complete on return, and not published yet.

    Args:
        conversion: the planned conversion.
        workspace: its workspace, opened.
        verify: compares the output with the source as models; its result becomes part of the certificate.

    Returns:
        The certificate.

    Raises:
        ConfigError: something about the source or the output is wrong.
        OSError: a file could not be read or written.
    """
    output = workspace.output
    done = [unit for unit in conversion.units if unit.name in workspace.done]
    left = [unit for unit in conversion.units if unit.name not in workspace.done]
    if workspace.resumed:
        note(f"continuing: {len(done)} of {len(conversion.units)} files are complete")
    _require_room(workspace.target, sum(unit.num_bytes for unit in left))
    with _hashes(conversion, workspace) as hashes:
        progress = ConversionProgress("converted", conversion.num_bytes, sum(unit.num_bytes for unit in done))
        for unit in left:
            (output / unit.name).parent.mkdir(parents=True, exist_ok=True)
            (output / unit.name).unlink(missing_ok=True)
            workspace.record(unit.name, conversion.write(unit, output, progress.advance))
        progress.finish()
        records = [workspace.done[unit.name] for unit in conversion.units]
        conversion.coverage(records)
        inputs = hashes()
    outputs = conversion.finish(output, records)
    _drop_page_cache(output)
    progress = ConversionProgress("read again", sum(entry["bytes"] for entry in outputs.values()))
    conversion.check(output, records, progress.advance)
    progress.finish()
    rows = [row for record in records for row in record["rows"]]
    content = {
        "format": 1,
        "direction": conversion.direction,
        "options": conversion.options.plain(),
        "versions": certificate.versions(),
        "source": {"path": str(conversion.source.resolve()), "files": inputs},
        "output": {"files": dict(sorted(outputs.items()))},
        "blocks": len(rows),
        **conversion.facts(records),
        "notes": conversion.notes,
        "warnings": conversion.warnings,
        "read_again": "every tensor had the hash it was written with, and gave its source's hash when it was made back",
        "verification": None,
        "tensors": rows,
    }
    if verify is not None:
        content["verification"] = verify(output)
    return content


def plan_lines(conversion: Conversion, target: Path) -> list[str]:
    """Return lines about what would be converted."""
    blocks = sum(len(unit.content) for unit in conversion.units)
    read = sum(path.stat().st_size for path in conversion.inputs.values())
    free = free_bytes(target.parent)
    lines = [
        f"{conversion.direction}: {conversion.source} -> {target}",
        f"  {conversion.summary}",
        f"  reads {size_text(read, exact=True)} in {len(conversion.inputs)} files",
        f"  writes {size_text(conversion.num_bytes, exact=True)} at most, {blocks} blocks in {len(conversion.units)} "
        f"files and small ones; {'an unknown number of bytes' if free is None else size_text(free, exact=True)} free",
    ]
    lines += [f"    {unit.name}: {len(unit.content)} blocks, {size_text(unit.num_bytes)}" for unit in conversion.units]
    return lines


def _require_room(target: Path, needed: int) -> None:
    free = free_bytes(target.parent)
    if free is not None and free < needed + _SLACK:
        raise ConfigError(
            f"--save {target}: not enough room: {size_text(needed + _SLACK, exact=True)} are needed, "
            f"{size_text(free, exact=True)} are free; remove something, or name a folder on another disk"
        )


@contextmanager
def _hashes(conversion: Conversion, workspace: Workspace) -> Iterator[Callable[[], dict[str, FileEntry]]]:
    """Hash the input files in a thread while the context runs, and yield a function that waits for the hashes.

    Raises:
        ConfigError: from the function: a file is not what the source's manifest says, or cannot be read.
    """
    name = "inputs"
    if name in workspace.done:
        yield lambda: dict(workspace.done[name]["files"])
        return
    stopped = False

    def advance(count: int) -> None:
        if stopped:
            raise InterruptedError

    def hashed() -> dict[str, FileEntry]:
        files = {}
        for file, path in sorted(conversion.inputs.items()):
            files[file] = FileEntry(bytes=path.stat().st_size, sha256=sha256_of_file(path, advance))
        return files

    def result() -> dict[str, FileEntry]:
        try:
            files = future.result()
        except OSError as error:
            raise ConfigError(f"--load {conversion.source}: {error.filename}: cannot be read: {error}") from None
        wanted = conversion.wanted_inputs()
        for file, entry in files.items():
            if wanted is not None and wanted.get(file, entry) != entry:
                raise ConfigError(
                    f"--load {conversion.source}: is damaged: {file} does not hold what was saved; take another step"
                )
        workspace.record(name, {"files": files})
        return files

    with ThreadPoolExecutor(1, thread_name_prefix="inputs") as pool:
        future: Future[dict[str, FileEntry]] = pool.submit(hashed)
        try:
            yield result
        finally:
            stopped = True


def _drop_page_cache(output: Path) -> None:
    """Drop the output from the page cache, so that it is read from the disk again."""
    for path in output.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt in this context: what is complete stays for the next start."""

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def model_words(run: Run, family: str, dtype: str) -> str:
    """Return a description of a model in one line."""
    model, moe = run.model, run.moe
    depths = f" and {model.mtp_num_layers} of multi-token prediction" if model.mtp_num_layers else ""
    tied = "" if model.untie_embeddings_and_output_weights else ", tied"
    return (
        f"{family} in {dtype}: {model.num_layers} layers{depths}, {sum(run.derived.moe_layer_pattern)} of them with "
        f"{moe.num_experts} experts of {run.derived.moe_ffn_hidden_size}, {moe.moe_router_topk} per token; hidden "
        f"size {model.hidden_size}, vocabulary {model.vocab_size}{tied}"
    )
