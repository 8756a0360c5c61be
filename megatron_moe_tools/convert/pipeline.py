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
import operator
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.tensors import dtype_name
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
EXPERTS = (".experts.weight1", ".experts.weight2")
"""The ends of the keys of tensors with a block per expert."""
_INPUTS, _BYTES_OF = "inputs", operator.attrgetter("num_bytes")
_SLACK = 64 * 2**20
"""Bytes that small files may need in addition."""


@dataclass(frozen=True)
class ConversionOptions:
    """The options of the command line that have an influence on the output."""

    dtype: torch.dtype | None = None
    fp8: bool = False
    mxfp4: bool = False
    family: str | None = None
    drop_mtp: bool = False
    no_optim: bool = False
    ema: bool = False
    allow_suspicious_weights: bool = False
    max_shard_bytes: int = 5 * 10**9

    def plain(self) -> dict[str, Any]:
        """Return the options as plain values for JSON."""
        return {**vars(self), "dtype": None if self.dtype is None else dtype_name(self.dtype)}


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
    if not key.endswith(EXPERTS):
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
        companions: files that a native step keeps beside the tensors -> their names in `inputs`.
        identity: what, besides files and options, has an influence on the output.
        notes, warnings: remarks from planning, of both sides; a native step keeps the warnings.
        iteration: the number of a native step that is made of it.
        shapes: the shapes of the tensors that are converted, by our keys.
        names: tensors of a Hugging Face folder, on either side, that have to be in the rows.
        values: values of the output that are no tensors, as they are stored.
        common: plain values of the engine's own file.
        summary: the model in a line.
        direction: both formats in words, where the two kinds do not say it.
    """

    kind: ClassVar[str]
    direction: ClassVar[str | None] = None
    shapes: dict[str, Shape]
    summary: str
    iteration = 0

    def __init__(self, path: Path, options: ConversionOptions) -> None:
        self.path, self.options = path, options
        self.inputs: dict[str, Path] = {}
        self.listed: dict[str, FileEntry] = {}
        self.companions: dict[str, str] = {}
        self.identity: dict[str, Any] = {}
        self.names: set[str] = set()
        self.values: dict[str, bytes] = {}
        self.common: dict[Any, Any] = {}
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def warn_if_rounded(self, name: str, dtype: torch.dtype, kept: str) -> None:
        """Warn of a tensor that is fp32 in every model, where it is stored in another dtype."""
        if dtype != torch.float32:
            self.warnings.append(
                f"PRECISION WARNING: {name} is {dtype_name(dtype)} in {self.path}, must be float32: it was rounded "
                f"before it was saved; {kept}"
            )

    @abstractmethod
    def read(self, block: Block) -> tuple[Tensor, Row]:
        """Return a block in its dtype, and its row of the certificate. Raises ConfigError: it is damaged."""

    def require_coverage(self, rows: list[Row]) -> None:
        """Check that everything stored was used, and that nothing looks as if it were there twice."""
        return

    def require_made_back(self, row: Row, block: Tensor) -> None:
        """Check that a block, read from the output, transforms back into what its row says of the source."""
        return

    @abstractmethod
    def step_blocks(self) -> list[Block]:
        """Return the blocks of a native step made of it. Raises ConfigError: a step cannot be what is asked for."""

    @abstractmethod
    def step_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings and the state of such a step."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what the certificate of such a step says of this source."""


class ConversionSink(ABC):
    """An output, planned from a source, whose notes, names and identity it adds to.

    files: those that hold the tensors. summary: the model in a line.
    """

    kind: ClassVar[str]
    files: list[OutputFile]
    summary: str

    def __init__(self, source: ConversionSource) -> None:
        self.source = source

    @property
    def direction(self) -> str:
        """Both formats in words."""
        return self.source.direction or f"{self.source.kind} to {self.kind}"

    @property
    def num_bytes(self) -> int:
        """Upper bound of the output's bytes."""
        return sum(map(_BYTES_OF, self.files))

    def identity(self) -> dict[str, Any]:
        """Return what has to be the same for a second start to go on with the work of the first."""
        inputs = {}
        for name, path in self.source.inputs.items():
            status = path.stat()
            inputs[name] = [status.st_size, status.st_mtime_ns, status.st_ino]
        return {
            "direction": self.direction,
            "source": str(self.source.path.resolve()),
            "inputs": inputs,
            "options": self.source.options.plain(),
            "versions": certificate.versions(),
            **self.source.identity,
        }

    @abstractmethod
    def write(self, file: OutputFile, output: Path, advance: Advance) -> Record:
        """Write one file from blocks of the source."""

    def require_coverage(self, rows: list[Row]) -> None:
        """Check that every tensor of both sides is in exactly one row."""
        certificate.require_coverage(rows, self.source.names, self.source.shapes, str(self.source.path))

    @abstractmethod
    def finish(self, output: Path, records: list[Record], inputs: dict[str, FileEntry]) -> dict[str, FileEntry]:
        """Write the small files. Returns all files of the output with their hashes."""

    @abstractmethod
    def read_again(self, output: Path, rows: list[Row]) -> Iterator[tuple[Row, Tensor]]:
        """Read what was written, check which tensors it holds and their hashes, and yield each row with its block."""

    @abstractmethod
    def facts(self, rows: list[Row]) -> dict[str, Any]:
        """Return what the certificate says in addition to rows, files and notes."""


def convert(sink: ConversionSink, workspace: Workspace) -> dict[str, Any]:
    """Write, check and read again the planned output, and return the certificate; nothing is published yet.

    Raises ConfigError: something about the source or the output is wrong. OSError: a file could not be read or written.
    """
    source, output = sink.source, workspace.output
    left = [file for file in sink.files if file.name not in workspace.done]
    left_bytes = sum(map(_BYTES_OF, left))
    if workspace.done:
        note(f"continuing: {len(sink.files) - len(left)} of {len(sink.files)} files are complete")
    free = free_bytes(workspace.target.parent)
    if free is not None and free < left_bytes + _SLACK:
        raise ConfigError(
            f"--save {workspace.target}: not enough room: {size_text(left_bytes + _SLACK, exact=True)} are needed, "
            f"{size_text(free, exact=True)} are free; remove something, or name a folder on another disk"
        )
    stopped = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="inputs") as pool:
        hashes = None
        if _INPUTS not in workspace.done:
            hashes = pool.submit(_hash_inputs, source, stopped)
        try:
            progress = ConversionProgress("converted", sink.num_bytes, sink.num_bytes - left_bytes)
            for file in left:
                (output / file.name).parent.mkdir(parents=True, exist_ok=True)
                (output / file.name).unlink(missing_ok=True)
                workspace.record(file.name, sink.write(file, output, progress.advance))
            progress.finish()
            records, rows = [], []
            for file in sink.files:
                records.append(workspace.done[file.name])
                rows += records[-1]["rows"]
            sink.require_coverage(rows)
            source.require_coverage(rows)
            if hashes is not None:
                workspace.record(_INPUTS, {"files": hashes.result()})
        finally:
            stopped.set()
    if sink.identity()["inputs"] != workspace.identity["inputs"]:
        raise ConfigError(f"--load {source.path}: a file changed while it was read; nothing was published")
    inputs = workspace.done[_INPUTS]["files"]
    outputs = sink.finish(output, records, inputs)
    for path in output.rglob("*"):
        if path.is_file():  # it is read from the disk again, and not from the page cache
            with open(path, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    progress = ConversionProgress("read again", sum(map(operator.itemgetter("bytes"), outputs.values())))
    for row, block in sink.read_again(output, rows):
        source.require_made_back(row, block)
        progress.advance(block.nbytes)
        del block  # before the next is read
    progress.finish()
    return {
        "format": 1,
        "direction": sink.direction,
        "options": source.options.plain(),
        "versions": certificate.versions(),
        "source": {"path": str(source.path.resolve()), "files": inputs},
        "output": {"files": dict(sorted(outputs.items()))},
        "blocks": len(rows),
        **sink.facts(rows),
        "notes": source.notes,
        "warnings": source.warnings,
        "read_again": "every tensor had the hash it was written with, and gave its source's hash when it was made back",
        "verification": None,
        "tensors": rows,
    }


def _hash_inputs(source: ConversionSource, stopped: threading.Event) -> dict[str, FileEntry]:
    """Hash the input files, in a thread beside the conversion, and compare them with the source's list."""

    def advance(count: int) -> None:
        if stopped.is_set():
            raise InterruptedError

    files = {}
    for name, path in sorted(source.inputs.items()):
        try:
            files[name] = FileEntry(bytes=path.stat().st_size, sha256=sha256_of_file(path, advance))
        except OSError as error:
            raise ConfigError(f"--load {source.path}: {error.filename}: cannot be read: {error}") from None
        if source.listed.get(name, files[name]) != files[name]:
            raise ConfigError(f"--load {source.path}: is damaged: {name} does not hold what was saved; take another")
    return files


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
