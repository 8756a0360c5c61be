"""Native steps as source and as sink. The files of a step are written by blocks, without a process group.

The format is the engine's torch_dist, which `checkpoint/writer.py` has torch write from a model: each part of a tensor
is an archive of its own in a data file, and `.metadata` says where it is. A tensor may be cut into any blocks, and any
layout loads them. Here there is one data file per layer.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_moe.checkpoint import folder, index, manifest, step_reader
from megatron_moe.checkpoint.index import LARGEST_VALUE
from megatron_moe.checkpoint.step_reader import AVERAGE, PER_PART, StepReader, by_itself
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.config.schema import replace as replace_settings
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import new_file, write_bytes, write_json
from megatron_moe.io.hashing import FileEntry, HashingFile, sha256_of_file
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row
from megatron_moe_tools.convert.pipeline import (
    OPTIMIZER,
    Advance,
    Block,
    ConversionOptions,
    ConversionSink,
    ConversionSource,
    OutputFile,
    Record,
    blocks_of,
)

_LAYOUT = ("world_size", "tp_size", "cp_size", "pp_size", "dp_size", "ep_size", "etp_size")
_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.")
_PARTS = ("", "decoder", "mtp")
EMBEDDING = "embedding.word_embeddings.weight"
_BIAS = ".expert_bias"
_MAIN = "optimizer.state.param."
_REWRITTEN = (".metadata", "metadata.json", step_reader.COMMON, folder.CONFIG, folder.STATE)


# ---- The source.


class NativeSource(ConversionSource):
    """A native step: its weights, or their averages with `--ema`.

    Raises:
        ConfigError: the step is damaged, or has no averages.
    """

    kind: ClassVar[str] = "native"

    def __init__(self, step: Path, options: ConversionOptions, notes: Iterable[str] = ()) -> None:
        super().__init__(step, options)
        self.notes += notes
        self.reader = StepReader(step)
        if options.ema and not any(key.startswith(AVERAGE) for key in self.reader.index.tensors):
            raise ConfigError(f"--ema: {step} has no average of its weights, which a run with --ema-decay saves")
        self.config, self.state = folder.read_json(step / folder.CONFIG), folder.read_json(step / folder.STATE)
        self.iteration = int(step.name.removeprefix("iter_"))
        self.files = self.listed = manifest.read(step).files
        self.inputs = {name: step / name for name in self.files}
        stored = self.reader.index.tensors
        self.weights = {key: one.shape for key, one in stored.items() if not key.startswith(OPTIMIZER)}
        self.keeps_optimizer = len(self.weights) < len(stored) and not (options.no_optim or options.ema)

    def read(self, block: Block) -> tuple[Tensor, Row]:
        values = self._values(block)
        if values.is_floating_point():
            certificate.require_finite(values, block.key, str(self.path))
        native = certificate.native_entry(block.key, block.start, values)
        cast_values = certificate.cast(values, block.dtype, block.key)
        if native["dtype"] != dtype_name(block.dtype):
            native["sha256_as_written"] = sha256(cast_values)
        return cast_values, {"native": native, "cast": certificate.cast_name(native["dtype"], dtype_name(block.dtype))}

    def _values(self, block: Block) -> Tensor:
        # What has no average is read as it is: frozen weights, and state such as expert_bias.
        averaged = self.options.ema and AVERAGE + block.key in self.reader.index.tensors
        return self.reader.read(AVERAGE + block.key if averaged else block.key, block.start, block.shape)

    def with_stored_padding(self, run: Run) -> Run:
        """Return a run with the vocabulary padded as in the step; the padding depends on the run's layout.

        Raises:
            ConfigError: the step has no table of its vocabulary.
        """
        table, vocab_size = self.weights.get(EMBEDDING), run.model.vocab_size
        if table is None or len(table) != 2 or vocab_size is None or table[0] < vocab_size:
            found = "no" if table is None else list(table)
            raise ConfigError(f"--load {self.path}: {EMBEDDING}: {found}, for a vocabulary of {vocab_size} tokens")
        return replace_settings(run, padded_vocab_size=table[0], tensor_model_parallel_size=1)

    # A step made of it.

    def step_blocks(self) -> list[Block]:
        options, tensors = self.options, self.reader.index.tensors
        if options.dtype is not None and self.keeps_optimizer:
            raise ConfigError(
                f"--dtype: the optimizer's main weights belong to weights of the step's own dtype; add --no-optim to "
                f"cast the weights of {self.path} alone"
            )
        if options.dtype not in (None, torch.float32) and self.config.get("keep_fp32"):
            raise ConfigError(
                f"--dtype: {self.path} keeps {self.config['keep_fp32']} in fp32 (--keep-fp32), and all weights or "
                "none are cast; --dtype fp32 works"
            )
        if options.drop_mtp or options.family is not None:
            flag = "--drop-mtp" if options.drop_mtp else "--family"
            raise ConfigError(f"{flag}: is for folders of Hugging Face; from native to native nothing is left out")
        self.shapes = dict(self.weights)
        if self.keeps_optimizer:
            self.shapes = {key: tensor.shape for key, tensor in tensors.items()}
        kept = "weights alone"
        if self.keeps_optimizer:
            kept = "with the optimizer's state"
        elif options.ema:
            kept = "the averages of the weights"
        self.summary = f"step {self.iteration}, {len(self.shapes)} tensors, {kept}"
        blocks = []
        for key in sorted(self.shapes):
            dtype = stored = self.reader.dtype(key)
            if key.endswith(_BIAS) and not key.startswith(OPTIMIZER):
                dtype = torch.float32
            elif options.dtype is not None and stored.is_floating_point:
                dtype = options.dtype
            blocks += blocks_of(key, self.shapes[key], dtype)
        for key in self.weights:
            if key.endswith(_BIAS) and self.reader.dtype(key) != torch.float32:
                kept = "kept in float32 from now on"
                self.warnings.append(certificate.rounded_before(key, self.reader.dtype(key), self.path, kept))
        return blocks

    def step_config(self) -> dict[str, Any]:
        if self.options.dtype is None:
            return self.config
        bf16, fp16 = self.options.dtype == torch.bfloat16, self.options.dtype == torch.float16
        return {**self.config, "bf16": bf16, "fp16": fp16, "keep_fp32": None, "fp8_format": None}

    def step_state(self) -> dict[str, Any]:
        state = dict(self.state)
        for name in ("has_optimizer", folder.HAS_AVERAGE):
            state[name] = bool(self.state.get(name)) and self.keeps_optimizer
        if self.options.ema:
            state["averaged"] = True
        return state

    def step_values(self) -> dict[str, bytes]:
        found = {}
        for name, stored in sorted(self.reader.index.values.items()):
            with open(self.path / stored.file, "rb") as file:
                file.seek(stored.offset)
                found[name] = file.read(min(stored.length, LARGEST_VALUE))
        return found

    def step_common(self) -> dict[Any, Any]:
        common: dict[Any, Any] = {}
        if step_reader.COMMON in self.files:
            common = step_reader.read_file(self.path, step_reader.COMMON)
        if not self.keeps_optimizer:
            common.pop("optimizer", None)
        return common

    def write_companions(self, step: Path) -> dict[str, FileEntry]:
        copied = {}
        for name, known in self.files.items():
            if not (name.endswith(".distcp") or name in _REWRITTEN):
                (step / name).parent.mkdir(exist_ok=True)
                copied[name] = copy_file(self.path / name, step / name, known)
        return copied

    def facts(self) -> dict[str, Any]:
        dropped = [key for key in self.reader.index.tensors if key not in self.shapes]
        return {"family": (self.state.get("hf") or {}).get("family"), "iteration": self.iteration, "dropped": dropped}


class AveragedSource(NativeSource):
    """The mean of several native steps, in fp64; the rest is the last one's.

    The main weights are averaged where a step has them, else the weights; expert_bias is averaged too. The result is
    rounded to the weights' dtype. It has no optimizer state: moments belong to one trajectory.

    Raises:
        ConfigError: the steps are not of one model.
    """

    def __init__(self, steps: Sequence[Path], options: ConversionOptions) -> None:
        super().__init__(steps[-1], replace(options, no_optim=True))
        self._readers = [StepReader(step) for step in steps]
        self.listed = {}
        for step in steps:
            for name, entry in manifest.read(step).files.items():
                self.listed[f"{step.name}/{name}"] = entry
        self.inputs = {name: steps[0].parent / name for name in self.listed}
        for step, reader in zip(steps, self._readers):
            shapes = {key: one.shape for key, one in reader.index.tensors.items() if not key.startswith(OPTIMIZER)}
            differ = sorted(shapes.keys() ^ self.weights.keys())
            differ += sorted(key for key, shape in shapes.items() if self.weights.get(key, shape) != shape)
            if differ:
                raise ConfigError(f"--average-steps: {step} is of another model than {self.path}: {differ[0]} differs")
        self.iterations = [int(step.name.removeprefix("iter_")) for step in steps]

    def _values(self, block: Block) -> Tensor:
        if not self.reader.dtype(block.key).is_floating_point:
            return super()._values(block)
        total = torch.zeros(block.shape, dtype=torch.float64)
        for reader in self._readers:
            key = _MAIN + block.key
            if key not in reader.index.tensors:
                key = block.key
            total += reader.read(key, block.start, block.shape)
        return (total / len(self._readers)).to(block.dtype)

    def step_blocks(self) -> list[Block]:
        blocks = super().step_blocks()
        self.summary = f"mean of steps {', '.join(map(str, self.iterations))} in fp64, {len(self.shapes)} tensors"
        return blocks

    def direction(self, to: str) -> str:
        return "average of native steps"

    def step_state(self) -> dict[str, Any]:
        return {**super().step_state(), "average_of_steps": self.iterations}


def steps_to_average(load: Path, numbers: Sequence[int]) -> list[Path]:
    """Return the folders of the steps of a checkpoint folder, oldest first.

    Raises:
        ConfigError: fewer than two, one twice, or one that is not there.
    """
    shown = f"--average-steps {' '.join(map(str, numbers))}"
    if len(set(numbers)) < len(numbers) or len(numbers) < 2:
        raise ConfigError(f"{shown}: name two steps or more, each once")
    there = folder.steps(load)
    if not there:
        raise ConfigError(f"{shown}: --load {load} has no steps; name the folder that a run saved its steps in")
    missing = [number for number in numbers if number not in there]
    if missing:
        raise ConfigError(
            f"{shown}: --load {load} has no step {missing[0]}; it has {', '.join(map(str, sorted(there)))}"
        )
    return [folder.step_folder(load, number) for number in sorted(numbers)]


# ---- The sink.


class TorchDistSink(ConversionSink):
    """A step in the engine's format torch_dist: a data file per layer, a block per expert.

    Attributes:
        name: the step's folder.
        tensors: dtype and shape of the tensors in the output, by their names there.
    """

    name: str

    def __init__(self, source: ConversionSource) -> None:
        super().__init__(source)
        self.tensors: dict[str, tuple[str, Shape]] = {}

    def planned(self, blocks: list[Block], values: dict[str, bytes]) -> list[OutputFile]:
        """Return the data files: one for each layer's blocks, and one for the values that are no tensors."""
        # Weights come before the optimizer; then what is outside of the layers, each layer, each depth of multi-token
        # prediction.
        contents: dict[tuple[bool, int, int], list[Block]] = {}
        for block in blocks:
            key = block.copy or block.key
            part = number = 0
            if (found := _LAYER.search(key)) is not None:
                part, number = _PARTS.index(found.group(1)), int(found.group(2))
            contents.setdefault((key.startswith(OPTIMIZER), part, number), []).append(block)
            name, shape = self.tensor_of(block)
            self.tensors[name] = (dtype_name(block.dtype), shape)
        files = []
        for at, order in enumerate(sorted(contents)):
            size = sum(block.num_bytes + PER_PART for block in contents[order])
            files.append(OutputFile(f"{self.name}/__0_{at}.distcp", size, tuple(contents[order])))
        if values:
            name = f"{self.name}/__0_{len(files)}.distcp"
            files.append(OutputFile(name, sum(map(len, values.values())), tuple(values)))
        self.values = values
        return files

    def tensor_of(self, block: Block) -> tuple[str, Shape]:
        """Return name and shape in the output of the tensor that a block is of."""
        return block.key, self.source.shapes[block.key]

    def box_of(self, block: Block) -> tuple[Shape, Shape]:
        """Return start and shape of a block in the output."""
        return block.start, block.shape

    def write(self, file: OutputFile, output: Path, advance: Advance) -> Record:
        rows: list[Row] = []
        values: list[StoredPart] = []
        with new_file(output / file.name) as opened:
            data = DataFile(opened)
            for item in file.content:
                if isinstance(item, str):
                    content = self.values[item]
                    values.append(StoredPart(item, (), (), opened.path.name, opened.tell(), len(content)))
                    opened.write(content)
                    continue
                tensor, row = self.source.read(item)
                start, shape = self.box_of(item)
                data.add(self.tensor_of(item)[0], start, tensor.reshape(shape))
                rows.append(self.completed(row, item, tensor))
                advance(item.num_bytes + PER_PART)
        return {"entry": opened.entry(), "parts": data.parts, "values": values, "rows": rows}

    def completed(self, row: Row, block: Block, tensor: Tensor) -> Row:
        """Return a row together with what the output has of it."""
        return row

    def write_format(self, step: Path, records: list[Record], common: dict[Any, Any]) -> dict[str, FileEntry]:
        """Write the index and the engine's small files; return their entries and those of the data files."""
        files: dict[str, FileEntry] = {Path(record["name"]).name: record["entry"] for record in records}
        parts = [StoredPart(*part) for record in records for part in record["parts"]]
        values = [StoredPart(*part) for record in records for part in record["values"]]
        files[index.NAME] = write_index(step, self.tensors, parts, values)
        content = io.BytesIO()
        torch.save(common, content)
        files[step_reader.COMMON] = write_bytes(step / step_reader.COMMON, content.getvalue())
        files["metadata.json"] = write_bytes(step / "metadata.json", json.dumps(folder.ENGINE_FORMAT).encode())
        return files

    def open_again(self, output: Path) -> None:
        step = output / self.name
        self._back = self.reader_of(step)
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in self._back.index.tensors.items()}
        if found != self.tensors:
            raise ConfigError(f"{step}: its tensors are not those of the model; nothing was published")
        if self._back.index.values.keys() != self.values.keys():
            raise ConfigError(f"{step}: values are missing; nothing was published")

    def reader_of(self, step: Path) -> StepReader:
        """Return a reader of the step that was written."""
        return StepReader(step)

    def read_back(self, row: Row) -> Tensor:
        native = row["native"]
        block = self._back.read(native["key"], tuple(native["start"]), tuple(native["shape"]))
        written = certificate.expected(native)
        certificate.require_same(sha256(block), written, native["key"], "it reads otherwise than it was written")
        return block


class NativeSink(TorchDistSink):
    """A folder of checkpoints with one native step, made of any source."""

    kind: ClassVar[str] = "native"

    def __init__(self, source: ConversionSource) -> None:
        super().__init__(source)
        blocks = source.step_blocks()
        self.name = folder.step_folder(Path(), source.iteration).name
        self.files = self.planned(blocks, source.step_values())
        self.summary = source.summary

    def finish(self, output: Path, records: list[Record]) -> dict[str, FileEntry]:
        step, source = output / self.name, self.source
        files = self.write_format(step, records, source.step_common())
        files |= source.write_companions(step)
        files[folder.CONFIG] = write_json(step / folder.CONFIG, source.step_config())
        files[folder.STATE] = write_json(step / folder.STATE, source.step_state())
        (step / manifest.NAME).unlink(missing_ok=True)
        manifest.write(step, source.iteration, files)
        if defect := manifest.structure_defect(step):
            raise OSError(f"{step}: {defect}")
        result = {f"{step.name}/{name}": entry for name, entry in files.items()}
        path = step / manifest.NAME
        result[f"{step.name}/{path.name}"] = FileEntry(bytes=path.stat().st_size, sha256=sha256_of_file(path))
        result[folder.OWNER] = write_bytes(output / folder.OWNER, b"")
        result[folder.LATEST] = write_bytes(output / folder.LATEST, f"{source.iteration}\n".encode())
        return result

    def facts(self, rows: list[Row]) -> dict[str, Any]:
        return self.source.facts()


# ---- The format.


class StoredPart(NamedTuple):
    """A block of a tensor in a data file, as plain values for a journal; offset and length are in bytes."""

    key: str
    start: Shape
    shape: Shape
    file: str
    offset: int
    length: int


class DataFile:
    """A data file `__0_N.distcp` to which blocks are appended."""

    def __init__(self, file: HashingFile) -> None:
        self._file, self._name = file, file.path.name
        self.parts: list[StoredPart] = []

    def add(self, key: str, start: Shape, block: Tensor) -> None:
        """Write a block of a tensor."""
        offset = self._file.tell()
        torch.save(by_itself(block.contiguous()), cast(IO[bytes], self._file))
        self.parts.append(StoredPart(key, start, tuple(block.shape), self._name, offset, self._file.tell() - offset))


def write_index(
    step: Path, tensors: dict[str, tuple[str, Shape]], parts: Iterable[StoredPart], values: Iterable[StoredPart]
) -> FileEntry:
    """Write `.metadata`, with the same bytes for the same content.

    Args:
        step: the step's folder.
        tensors: dtype (without `torch.`) and shape by key, in order.
        parts: blocks of the tensors.
        values: parts that are no tensors.
    """

    def info(part: StoredPart) -> _StorageInfo:
        return _StorageInfo(sys.intern(part.file), part.offset, part.length)

    chunks: dict[str, list[StoredPart]] = {}
    for part in parts:
        chunks.setdefault(part.key, []).append(part)
    listed: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, (dtype, shape) in tensors.items():
        key = sys.intern(name)  # a pickle's bytes depend on which equal strings are one object
        boxes = [ChunkStorageMetadata(torch.Size(part.start), torch.Size(part.shape)) for part in chunks[name]]
        properties = TensorProperties(getattr(torch, dtype))
        listed[key] = TensorStorageMetadata(properties, torch.Size(shape), boxes)
        for number, part in enumerate(chunks[name]):
            storage[MetadataIndex(key, part.start, number)] = info(part)
    for part in values:
        key = sys.intern(part.key)
        listed[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = info(part)
    return write_bytes(step / index.NAME, pickle.dumps(Metadata(listed, None, storage), protocol=4))


def copy_file(source: Path, target: Path, known: FileEntry) -> FileEntry:
    """Copy a file of a step and check its hash.

    Raises:
        ConfigError: it is not what the step's manifest says.
    """
    with open(source, "rb") as content, new_file(target) as file:
        while block := content.read(1 << 22):
            file.write(block)
    if file.entry() != known:
        raise ConfigError(f"{source}: changed while it was read; nothing was published")
    return known


def native_state(run: Run, warnings: list[str]) -> dict[str, Any]:
    """Return the state of a step of weights alone, before any training here; the caller adds where it is from."""
    vocab_size = run.model.vocab_size
    assert vocab_size is not None, "the source's configuration says it"
    progress = ("iteration", "consumed_samples", "skipped_iterations", "loss_scale_raised", "loss_scale_lowered")
    return {
        **dict.fromkeys(progress, 0),
        "has_optimizer": False,
        "layout": dict.fromkeys(_LAYOUT, 1),
        "vocab_size": vocab_size,
        "padded_vocab_size": run.derived.padded_vocab_size(vocab_size),
        "versions": certificate.versions(),
        "tokenizer": {},
        "data": {},
        "records": [],
        "precision_warnings": warnings,
    }
