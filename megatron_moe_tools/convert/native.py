"""Native steps as source and as sink. The files of a step are written by blocks, without a process group.

The format is the engine's torch_dist, which `checkpoint/writer.py` has torch write from a model: each part of a tensor
is an archive of its own in a data file, and `.metadata` says where it is. A tensor may be cut into any blocks, and any
layout loads them. Here there is one data file per layer.
"""

from __future__ import annotations

import io
import itertools
import json
import operator
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from megatron_moe.checkpoint import folder, index, manifest, origin, step_reader
from megatron_moe.checkpoint.index import LARGEST_VALUE
from megatron_moe.checkpoint.step_reader import AVERAGE, PER_PART, StepReader, by_itself
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, flatten
from megatron_moe.config.schema import replace as replace_settings
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import new_file, write_bytes, write_json
from megatron_moe.io.hashing import FileEntry, HashingFile, sha256_of_file
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row
from megatron_moe_tools.convert.exported_files import FROM_MEMORY
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
    """A native step: its weights, or with `--ema` their averages. Raises ConfigError: it is damaged, or has none."""

    kind: ClassVar[str] = "native"

    def __init__(self, step: Path, options: ConversionOptions, notes: Iterable[str] = ()) -> None:
        super().__init__(step, options)
        self.notes += notes
        self.reader = StepReader(step)
        if options.ema and not any(key.startswith(AVERAGE) for key in self.reader.index.tensors):
            raise ConfigError(f"--ema: {step} has no average of its weights, which a run with --ema-decay saves")
        self.config, self.state = folder.read_json(step / folder.CONFIG), folder.read_json(step / folder.STATE)
        self.iteration = int(step.name.removeprefix("iter_"))
        self.listed = manifest.read(step).files
        for name in self.listed:
            self.inputs[name] = step / name
            if not (name.endswith(".distcp") or name in _REWRITTEN):
                self.companions[name] = name
        self.stored = shapes_of(self.reader)
        self.weights = shapes_of(self.reader, with_optimizer=False)
        self.keeps_optimizer = len(self.weights) < len(self.stored) and not (options.no_optim or options.ema)

    def read(self, block: Block) -> tuple[Tensor, Row]:
        values = self._values(block)
        native = certificate.native_entry(block.key, block.start, values)
        values = certificate.taken(values, block.dtype, native, block.key, str(self.path))
        return values, {"native": native, "cast": certificate.cast_name([native], block.dtype)}

    def _values(self, block: Block) -> Tensor:
        # What has no average is read as it is: frozen weights, and state such as expert_bias.
        averaged = self.options.ema and AVERAGE + block.key in self.reader.index.tensors
        return self.reader.read(AVERAGE + block.key if averaged else block.key, block.start, block.shape)

    def with_stored_padding(self, run: Run) -> Run:
        """Return a run with the vocabulary padded as in the step. Raises ConfigError: it has no table of tokens."""
        table, vocab_size = self.weights.get(EMBEDDING), run.model.vocab_size
        if table is None or len(table) != 2 or vocab_size is None or table[0] < vocab_size:
            found = "no" if table is None else list(table)
            raise ConfigError(f"--load {self.path}: {EMBEDDING}: {found}, for a vocabulary of {vocab_size} tokens")
        return replace_settings(run, padded_vocab_size=table[0], tensor_model_parallel_size=1)

    def step_blocks(self) -> list[Block]:
        options = self.options
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
        self.shapes, kept = dict(self.weights), "the averages of the weights" if options.ema else "weights alone"
        if self.keeps_optimizer:
            self.shapes, kept = dict(self.stored), "with the optimizer's state"
        self.summary = f"step {self.iteration}, {len(self.shapes)} tensors, {kept}"
        blocks = []
        for key in sorted(self.shapes):
            dtype = self.reader.dtype(key)
            if key.endswith(_BIAS) and not key.startswith(OPTIMIZER):
                dtype = torch.float32
            elif options.dtype is not None and dtype.is_floating_point:
                dtype = options.dtype
            blocks += blocks_of(key, self.shapes[key], dtype)
        for key in self.weights:
            if key.endswith(_BIAS):
                self.warn_if_rounded(key, self.reader.dtype(key), "kept in float32 from now on")
        for name, stored in sorted(self.reader.index.values.items()):
            with open(self.path / stored.file, "rb") as file:
                file.seek(stored.offset)
                self.values[name] = file.read(min(stored.length, LARGEST_VALUE))
        if step_reader.COMMON in self.listed:
            self.common = step_reader.read_file(self.path, step_reader.COMMON)
        if not self.keeps_optimizer:
            self.common.pop("optimizer", None)
        return blocks

    def step_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        config, state, dtype = self.config, dict(self.state), self.options.dtype
        if dtype is not None:
            half = {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
            config = {**config, **half, "keep_fp32": None, "fp8_format": None}
        for name in ("has_optimizer", folder.HAS_AVERAGE):
            state[name] = bool(self.state.get(name)) and self.keeps_optimizer
        if self.options.ema:
            state["averaged"] = True
        return config, state

    def facts(self) -> dict[str, Any]:
        dropped = [key for key in self.stored if key not in self.shapes]
        return {"family": (self.state.get("hf") or {}).get("family"), "iteration": self.iteration, "dropped": dropped}


def shapes_of(reader: StepReader, *, with_optimizer: bool = True) -> dict[str, Shape]:
    """Return the shapes of a step's tensors by key, with or without the optimizer's."""
    found = {}
    for key, tensor in reader.index.tensors.items():
        if with_optimizer or not key.startswith(OPTIMIZER):
            found[key] = tensor.shape
    return found


class AveragedSource(NativeSource):
    """The mean of several native steps, in fp64; the rest is the last one's.

    The main weights are averaged where a step has them, else the weights; expert_bias is averaged too. The result is
    rounded to the weights' dtype. It has no optimizer state: moments belong to one trajectory.
    """

    direction: ClassVar[str] = "average of native steps"

    def __init__(self, load: Path, numbers: Sequence[int], options: ConversionOptions) -> None:
        shown = f"--average-steps {' '.join(map(str, numbers))}"
        if len(set(numbers)) < len(numbers) or len(numbers) < 2:
            raise ConfigError(f"{shown}: name two steps or more, each once")
        there = folder.steps(load)
        if not there:
            raise ConfigError(f"{shown}: --load {load} has no steps; name the folder that a run saved its steps in")
        self.iterations, steps = sorted(numbers), []
        for number in self.iterations:
            if number not in there:
                has = ", ".join(map(str, sorted(there)))
                raise ConfigError(f"{shown}: --load {load} has no step {number}; it has {has}")
            steps.append(folder.step_folder(load, number))
        super().__init__(steps[-1], replace(options, no_optim=True))
        self._readers = list(map(StepReader, steps))
        self.companions = dict(zip(self.companions, map(f"{steps[-1].name}/{{}}".format, self.companions)))
        self.listed, self.inputs = {}, {}
        for step, reader in zip(steps, self._readers):
            for name, entry in manifest.read(step).files.items():
                self.listed[f"{step.name}/{name}"] = entry
                self.inputs[f"{step.name}/{name}"] = step / name
            shapes = shapes_of(reader, with_optimizer=False)
            if differ := sorted(dict(shapes.items() ^ self.weights.items())):
                raise ConfigError(f"--average-steps: {step} is of another model than {self.path}: {differ[0]} differs")

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

    def step_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        config, state = super().step_json()
        return config, {**state, "average_of_steps": self.iterations}


# ---- The sink.


class MemorySource(ConversionSource):
    """The tensors of a model in this process, as a step. like: the checkpoint that it was read from, if it was.

    tokenizer: what a step keeps of the tokenizer of a model that was trained here.
    """

    kind: ClassVar[str] = "memory"

    def __init__(
        self, run: Run, tensors: Mapping[str, Tensor], tokenizer: dict[str, Any], like: ConversionSource | None
    ) -> None:
        super().__init__(Path("memory") if like is None else like.path, ConversionOptions(no_optim=True))
        self.run, self.tensors, self.tokenizer, self.like = run, tensors, tokenizer, like
        self.shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        self.summary = f"{len(tensors)} tensors"
        if like is not None:
            for name, among_inputs in like.companions.items():
                if name.startswith(f"{origin.FOLDER}/"):
                    self.companions[name] = among_inputs
                    self.inputs[among_inputs] = like.inputs[among_inputs]

    def read(self, block: Block) -> tuple[Tensor, Row]:
        box = tuple(slice(first, first + count) for first, count in zip(block.start, block.shape))
        values = self.tensors[block.key].detach()[box].cpu().contiguous()
        return values, {"native": certificate.native_entry(block.key, block.start, values), "cast": None}

    def step_blocks(self) -> list[Block]:
        blocks: list[Block] = []
        for key, tensor in sorted(self.tensors.items()):
            blocks += blocks_of(key, self.shapes[key], tensor.dtype)
        return blocks

    def step_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        config, state = flatten(self.run), {**native_state(self.run, []), "tokenizer": self.tokenizer}
        if self.like is not None:
            config, state = self.like.step_json()
            config |= {"bf16": self.run.precision.bf16, "fp16": self.run.precision.fp16, "keep_fp32": None}
            config["max_position_embeddings"] = self.run.derived.max_position_embeddings
        table = self.shapes[EMBEDDING][0]
        return config, {**state, "has_optimizer": False, "padded_vocab_size": table, FROM_MEMORY: True}

    def facts(self) -> dict[str, Any]:
        return {"family": None, "iteration": 0, "dropped": []}


class TorchDistSink(ConversionSink):
    """A step in the engine's format torch_dist: a data file per layer, a block per expert.

    name: the step's folder. tensors: dtype and shape of the tensors in the output, by their names there. stored_index:
    the index as it was written, for a step without a manifest.
    """

    name: str
    tensors: dict[str, tuple[str, Shape]]
    stored_index: index.StepIndex | None = None

    def planned(self, blocks: list[Block]) -> list[OutputFile]:
        """Return the data files: one for each layer's blocks, and one for the values that are no tensors."""
        # Weights come before the optimizer; then what is outside of the layers, each layer, each depth of multi-token
        # prediction.
        self.tensors = {}
        contents: dict[tuple[bool, int, int], list[Block]] = {}
        for block in blocks:
            key = block.copy or block.key
            part = number = 0
            if (found := _LAYER.search(key)) is not None:
                part, number = _PARTS.index(found.group(1)), int(found.group(2))
            contents.setdefault((key.startswith(OPTIMIZER), part, number), []).append(block)
            name, shape, _, _ = self.placed(block)
            self.tensors[name] = (dtype_name(block.dtype), shape)
        files = []
        for at, order in enumerate(sorted(contents)):
            size = sum(map(operator.attrgetter("num_bytes"), contents[order])) + PER_PART * len(contents[order])
            files.append(OutputFile(f"{self.name}/__0_{at}.distcp", size, tuple(contents[order])))
        if values := self.source.values:
            name = f"{self.name}/__0_{len(files)}.distcp"
            files.append(OutputFile(name, sum(map(len, values.values())), tuple(values)))
        return files

    def placed(self, block: Block) -> tuple[str, Shape, Shape, Shape]:
        """Return the name and shape in the output of the tensor that a block is of, and the block's start and shape."""
        return block.key, self.source.shapes[block.key], block.start, block.shape

    def write(self, file: OutputFile, output: Path, advance: Advance) -> Record:
        rows: list[Row] = []
        parts, values = list[StoredPart](), list[StoredPart]()
        with new_file(output / file.name) as opened:
            for item in file.content:
                if isinstance(item, str):
                    content = self.source.values[item]
                    values.append(StoredPart(item, (), (), opened.path.name, opened.tell(), len(content)))
                    opened.write(content)
                    continue
                tensor, row = self.source.read(item)
                name, _, start, shape = self.placed(item)
                parts.append(append_block(opened, name, start, tensor.reshape(shape)))
                rows.append(self.completed(row, item, tensor))
                advance(item.num_bytes + PER_PART)
                del tensor  # before the next is read: a conversion holds one block
        return {"entry": opened.entry(), "parts": parts, "values": values, "rows": rows}

    def completed(self, row: Row, block: Block, tensor: Tensor) -> Row:
        """Return a row together with what the output has of it."""
        return row

    def write_format(self, step: Path, records: list[Record], common: dict[Any, Any]) -> dict[str, FileEntry]:
        """Write the index and the engine's small files; return their entries and those of the data files."""
        files: dict[str, FileEntry] = {}
        parts, values = list[StoredPart](), list[StoredPart]()
        for record in records:
            files[Path(record["name"]).name] = record["entry"]
            parts += itertools.starmap(StoredPart, record["parts"])
            values += itertools.starmap(StoredPart, record["values"])
        files[index.NAME] = write_index(step, self.tensors, parts, values)
        content = io.BytesIO()
        torch.save(common, content)
        files[step_reader.COMMON] = write_bytes(step / step_reader.COMMON, content.getvalue())
        files["metadata.json"] = write_bytes(step / "metadata.json", json.dumps(folder.ENGINE_FORMAT).encode())
        return files

    def read_again(self, output: Path, rows: list[Row]) -> Iterator[tuple[Row, Tensor]]:
        reader = StepReader(output / self.name, self.stored_index)
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in reader.index.tensors.items()}
        if found != self.tensors:
            raise ConfigError(f"{reader.step}: its tensors are not those of the model; nothing was published")
        if reader.index.values.keys() != self.source.values.keys():
            raise ConfigError(f"{reader.step}: values are missing; nothing was published")
        blocks = list[Block]()
        for file in self.files:
            blocks += (item for item in file.content if isinstance(item, Block))
        for block, row in zip(blocks, rows, strict=True):
            (name, _, start, shape), expected = self.placed(block), certificate.expected(row["native"])
            values = reader.read(name, start, shape)
            certificate.require_same(sha256(values), expected, name, "it reads otherwise than it was written")
            yield row, values
            del values  # before the next is read


class NativeSink(TorchDistSink):
    """A folder of checkpoints with one native step, made of any source."""

    kind: ClassVar[str] = "native"

    def __init__(self, source: ConversionSource) -> None:
        super().__init__(source)
        self.name = folder.step_folder(Path(), source.iteration).name
        self.files = self.planned(source.step_blocks())
        self.summary = source.summary

    def finish(self, output: Path, records: list[Record], inputs: dict[str, FileEntry]) -> dict[str, FileEntry]:
        step, source = output / self.name, self.source
        files = self.write_format(step, records, source.common)
        for name, among_inputs in source.companions.items():
            (step / name).parent.mkdir(exist_ok=True)
            files[name] = copy_file(source.inputs[among_inputs], step / name, inputs[among_inputs])
        config, state = source.step_json()
        files[folder.CONFIG] = write_json(step / folder.CONFIG, config)
        files[folder.STATE] = write_json(step / folder.STATE, state)
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


def append_block(file: HashingFile, key: str, start: Shape, block: Tensor) -> StoredPart:
    """Append a block of a tensor to a data file `__0_N.distcp`."""
    offset = file.tell()
    torch.save(by_itself(block.contiguous()), cast(IO[bytes], file))
    return StoredPart(key, start, tuple(block.shape), file.path.name, offset, file.tell() - offset)


def write_index(
    step: Path, tensors: dict[str, tuple[str, Shape]], parts: Iterable[StoredPart], values: Iterable[StoredPart]
) -> FileEntry:
    """Write `.metadata`, with the same bytes for the same content.

    tensors: dtype (without `torch.`) and shape by key, in order. parts: blocks. values: parts that are no tensors.
    """
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
            storage[MetadataIndex(key, part.start, number)] = _StorageInfo(
                sys.intern(part.file), part.offset, part.length
            )
    for part in values:
        key = sys.intern(part.key)
        listed[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(sys.intern(part.file), part.offset, part.length)
    return write_bytes(step / index.NAME, pickle.dumps(Metadata(listed, None, storage), protocol=4))


def copy_file(source: Path, target: Path, known: FileEntry) -> FileEntry:
    """Copy a file of a step and check its hash. Raises ConfigError: it is not the known one."""
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
