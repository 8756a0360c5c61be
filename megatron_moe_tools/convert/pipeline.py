"""One conversion: the blocks of a model go from a source to a sink, and a certificate says what was done.

    plan        check names, shapes, dtypes and free space before anything is written
    write       file by file; the journal keeps each that is complete, and its rows of the certificate
    coverage    check that every tensor of both sides was read and written exactly once
    read again  read every tensor from the disk, transform it back, and compare both hashes
    publish     write the certificate and rename the output

Sources and sinks are in `native`, `hugging_face` and `megatron`. One of the two is always a native step.
"""

from __future__ import annotations

import math
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import free_bytes
from megatron_moe.io.hashing import FileEntry, sha256_of_file
from megatron_moe.io.program import note
from megatron_moe.io.texts import size_text
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row
from megatron_moe_tools.convert.workspace import ConversionProgress, Workspace

Advance = Callable[[int], object]
Record = dict[str, Any]
"""What the journal keeps of a file: its `entry`, its `rows`, and what `ConversionSink.finish` needs."""
OPTIMIZER = "optimizer."
"""The beginning of the keys of an optimizer's tensors in a native step."""
_EXPERTS = (".experts.weight1", ".experts.weight2")
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
class Block:
    """A box of one of the model's tensors: what is read, written and certified at a time.

    key: our name of the tensor. start, shape: the box in it. dtype: as it is written. copy: a further name of the
    tensor, where this block is written for it once more.
    """

    key: str
    start: Shape
    shape: Shape
    dtype: torch.dtype
    copy: str | None = None

    @property
    def place(self) -> tuple[str, Shape]:
        """Tensor and first element, which no other block has."""
        return self.key, self.start

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements as they are written."""
        return math.prod(self.shape) * self.dtype.itemsize


def blocks_of(key: str, shape: Shape, dtype: torch.dtype, copy: str | None = None) -> list[Block]:
    """Return the blocks of a tensor: one for each expert, or the whole tensor."""
    zeros = (0,) * len(shape)
    if not key.endswith(_EXPERTS):
        return [Block(key, zeros, shape, dtype, copy)]
    return [Block(key, (expert, *zeros[1:]), (1, *shape[1:]), dtype, copy) for expert in range(shape[0])]


@dataclass(frozen=True)
class OutputFile:
    """A file of the output: an upper bound of its bytes, and its blocks or the names of values that are no tensors."""

    name: str
    num_bytes: int
    content: tuple[Block | str, ...]


class ConversionSource(ABC):
    """A checkpoint to convert. Its small files and headers have been read and checked.

    Attributes:
        path: the step, or the folder.
        inputs: its files by name.
        listed: sizes and hashes of files, where the source has a list of them.
        identity: what, besides files and options, has an influence on the output.
        notes, warnings: remarks from planning; a native step keeps the warnings.
        iteration: the number of a native step that is made of it.
        shapes: the shapes of the tensors that are converted, by our keys.
        names: the stored tensors that have to be in the rows; empty where blocks alone are counted.
        summary: the model in a line.
    """

    kind: ClassVar[str]
    shapes: dict[str, Shape]
    summary: str
    iteration = 0

    def __init__(self, path: Path, options: ConversionOptions) -> None:
        self.path, self.options = path, options
        self.inputs: dict[str, Path] = {}
        self.listed: dict[str, FileEntry] = {}
        self.identity: dict[str, Any] = {}
        self.names: set[str] = set()
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def direction(self, to: str) -> str:
        """Return the two formats of a conversion in words."""
        return f"{self.kind} to {to}"

    @abstractmethod
    def read(self, block: Block) -> tuple[Tensor, Row]:
        """Return a block in its dtype, and its row of the certificate, which the sink may complete.

        Raises:
            ConfigError: the source is damaged, or its numbers do not fit into the dtype.
        """

    def require_used(self, rows: list[Row]) -> None:
        """Check that everything stored was used, and that nothing looks as if it were there twice."""
        return

    def require_made_back(self, row: Row, block: Tensor) -> None:
        """Check that a block, read from the output, transforms back into what its row says of the source."""
        return

    # What a native step is that is made of this source.

    @abstractmethod
    def step_blocks(self) -> list[Block]:
        """Return the blocks of the step, each tensor's in order.

        Raises:
            ConfigError: the options ask for something that a step cannot be.
        """

    @abstractmethod
    def step_config(self) -> dict[str, Any]: ...

    @abstractmethod
    def step_state(self) -> dict[str, Any]: ...

    def step_values(self) -> dict[str, bytes]:
        """Return the values that are no tensors, as they are stored."""
        return {}

    def step_common(self) -> dict[Any, Any]:
        """Return the plain values of the engine's own file."""
        return {}

    def write_companions(self, step: Path) -> dict[str, FileEntry]:
        """Write the files that are kept beside the tensors into a step, and return their entries."""
        return {}

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what the certificate of a native step says of this source."""


class ConversionSink(ABC):
    """An output, planned from a source.

    Attributes:
        files: the files that hold the tensors.
        names: the tensors of a Hugging Face folder that have to be in the rows.
        identity: what, besides the source and the options, has an influence on the output.
        notes, warnings: remarks from planning.
        summary: the model in a line.
    """

    kind: ClassVar[str]
    files: list[OutputFile]
    summary: str

    def __init__(self, source: ConversionSource) -> None:
        self.source = source
        self.names = source.names
        self.identity: dict[str, Any] = {}
        self.notes: list[str] = []
        self.warnings: list[str] = []

    @abstractmethod
    def write(self, file: OutputFile, output: Path, advance: Advance) -> Record:
        """Write one file from blocks of the source."""

    def require_coverage(self, rows: list[Row]) -> None:
        """Check that every tensor of both sides is in exactly one row."""
        certificate.require_coverage(rows, self.names, self.source.shapes, str(self.source.path))

    @abstractmethod
    def finish(self, output: Path, records: list[Record]) -> dict[str, FileEntry]:
        """Write the small files. Returns all files of the output with their hashes."""

    @abstractmethod
    def open_again(self, output: Path) -> None:
        """Open the output to read it, and check which tensors it holds."""

    @abstractmethod
    def read_back(self, row: Row) -> Tensor:
        """Read what was written for a row, check its hashes, and return our block that it stands for."""

    def close(self, rows: list[Row]) -> None:
        """Check what no row is about, and close the output."""
        return

    @abstractmethod
    def facts(self, rows: list[Row]) -> dict[str, Any]:
        """Return what the certificate says in addition to rows, files and notes."""


@dataclass(frozen=True)
class Conversion:
    """A planned conversion."""

    source: ConversionSource
    sink: ConversionSink

    @property
    def notes(self) -> list[str]:
        """Remarks of both sides."""
        return [*self.source.notes, *self.sink.notes]

    @property
    def warnings(self) -> list[str]:
        """Warnings of both sides."""
        return [*self.source.warnings, *self.sink.warnings]

    @property
    def num_bytes(self) -> int:
        """Upper bound of the output's bytes."""
        return sum(file.num_bytes for file in self.sink.files)

    def identity(self) -> dict[str, Any]:
        """Return what has to be the same for a second start to go on with the work of the first."""
        inputs = {}
        for name, path in self.source.inputs.items():
            status = path.stat()
            inputs[name] = [status.st_size, status.st_mtime_ns, status.st_ino]
        return {
            "direction": self.source.direction(self.sink.kind),
            "source": str(self.source.path.resolve()),
            "inputs": inputs,
            "options": self.source.options.plain(),
            "versions": certificate.versions(),
            **self.source.identity,
            **self.sink.identity,
        }

    def plan_lines(self, target: Path) -> list[str]:
        """Return lines about what would be converted."""
        files, inputs = self.sink.files, self.source.inputs
        blocks = sum(len(file.content) for file in files)
        read = sum(path.stat().st_size for path in inputs.values())
        free = free_bytes(target.parent)
        lines = [
            f"{self.source.direction(self.sink.kind)}: {self.source.path} -> {target}",
            f"  {self.sink.summary}",
            f"  reads {size_text(read, exact=True)} in {len(inputs)} files",
            f"  writes {size_text(self.num_bytes, exact=True)} at most, {blocks} blocks in {len(files)} "
            f"files and small ones; {'an unknown number of bytes' if free is None else size_text(free, exact=True)} "
            "free",
        ]
        return lines + [f"    {file.name}: {len(file.content)} blocks, {size_text(file.num_bytes)}" for file in files]


def convert(conversion: Conversion, workspace: Workspace) -> dict[str, Any]:
    """Write, check and read again the output of a conversion; it is complete on return, and not published yet.

    Args:
        conversion: the planned conversion.
        workspace: its workspace, opened.

    Returns:
        The certificate.

    Raises:
        ConfigError: something about the source or the output is wrong.
        OSError: a file could not be read or written.
    """
    source, sink, output = conversion.source, conversion.sink, workspace.output
    left = [file for file in sink.files if file.name not in workspace.done]
    left_bytes = sum(file.num_bytes for file in left)
    if workspace.resumed:
        note(f"continuing: {len(sink.files) - len(left)} of {len(sink.files)} files are complete")
    free = free_bytes(workspace.target.parent)
    if free is not None and free < left_bytes + _SLACK:
        raise ConfigError(
            f"--save {workspace.target}: not enough room: {size_text(left_bytes + _SLACK, exact=True)} are needed, "
            f"{size_text(free, exact=True)} are free; remove something, or name a folder on another disk"
        )
    with _input_hashes(source, workspace) as input_hashes:
        progress = ConversionProgress("converted", conversion.num_bytes, conversion.num_bytes - left_bytes)
        for file in left:
            (output / file.name).parent.mkdir(parents=True, exist_ok=True)
            (output / file.name).unlink(missing_ok=True)
            workspace.record(file.name, sink.write(file, output, progress.advance))
        progress.finish()
        records = [workspace.done[file.name] for file in sink.files]
        rows = [row for record in records for row in record["rows"]]
        sink.require_coverage(rows)
        source.require_used(rows)
        inputs = input_hashes()
    outputs = sink.finish(output, records)
    for path in output.rglob("*"):
        if path.is_file():  # it is read from the disk again, and not from the page cache
            with open(path, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    progress = ConversionProgress("read again", sum(entry["bytes"] for entry in outputs.values()))
    sink.open_again(output)
    for row in rows:
        block = sink.read_back(row)
        source.require_made_back(row, block)
        progress.advance(block.nbytes)
    sink.close(rows)
    progress.finish()
    return {
        "format": 1,
        "direction": source.direction(sink.kind),
        "options": source.options.plain(),
        "versions": certificate.versions(),
        "source": {"path": str(source.path.resolve()), "files": inputs},
        "output": {"files": dict(sorted(outputs.items()))},
        "blocks": len(rows),
        **sink.facts(rows),
        "notes": conversion.notes,
        "warnings": conversion.warnings,
        "read_again": "every tensor had the hash it was written with, and gave its source's hash when it was made back",
        "verification": None,
        "tensors": rows,
    }


@contextmanager
def _input_hashes(source: ConversionSource, workspace: Workspace) -> Iterator[Callable[[], dict[str, FileEntry]]]:
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
        for file, path in sorted(source.inputs.items()):
            files[file] = FileEntry(bytes=path.stat().st_size, sha256=sha256_of_file(path, advance))
        return files

    def result() -> dict[str, FileEntry]:
        try:
            files = future.result()
        except OSError as error:
            raise ConfigError(f"--load {source.path}: {error.filename}: cannot be read: {error}") from None
        for file, entry in files.items():
            if source.listed.get(file, entry) != entry:
                raise ConfigError(
                    f"--load {source.path}: is damaged: {file} does not hold what was saved; take another step"
                )
        workspace.record(name, {"files": files})
        return files

    with ThreadPoolExecutor(1, thread_name_prefix="inputs") as pool:
        future: Future[dict[str, FileEntry]] = pool.submit(hashed)
        try:
            yield result
        finally:
            stopped = True


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt in this context: what is complete stays for the next start."""

    def end(number: int, frame: FrameType | None) -> None:
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
