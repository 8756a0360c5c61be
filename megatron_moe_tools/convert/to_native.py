"""Convert a Hugging Face folder to a native step, and write the files of any native step without a process group."""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
from collections.abc import Iterable
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

from megatron_moe.checkpoint import folder, index, manifest, origin, pickles
from megatron_moe.checkpoint.pickles import PER_PART, by_itself
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.module_names import is_inside, kept_in_fp32, patterns_of
from megatron_moe.config.schema import Run, build, flatten, replace
from megatron_moe.hf.architecture import settings_of
from megatron_moe.hf.folder import CERTIFICATE, INDEX, HFFolder
from megatron_moe.hf.mapping import Mapping, Piece, mapping, require_tensors
from megatron_moe.hf.tensors import TensorReader, dtype_name, sha256
from megatron_moe.hf.transforms import Shape, elements
from megatron_moe.hf.weight_check import WeightCheck, refusal
from megatron_moe.io.files import new_file, write_bytes, write_json
from megatron_moe.io.hashing import FileEntry, HashingFile, sha256_of_file
from megatron_moe.io.program import note
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row, expected
from megatron_moe_tools.convert.convert import Advance, Conversion, ConversionOptions, OutputFile, Record, model_words

# ---- The files of a native step, written by blocks without a process group: a data file per layer, and the index.
#
# The format is the engine's torch_dist, which `checkpoint/writer.py` has torch write from a model: each part of a
# tensor is an archive of its own in a data file, and `.metadata` says where it is. A tensor may be cut into any blocks,
# and any layout loads them.


_LAYOUT = ("world_size", "tp_size", "cp_size", "pp_size", "dp_size", "ep_size", "etp_size")
_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.")


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

    def add_value(self, key: str, content: bytes) -> StoredPart:
        """Write a value that is no tensor, as it was pickled."""
        part = StoredPart(key, (), (), self._name, self._file.tell(), len(content))
        self._file.write(content)
        return part


def data_name(number: int) -> str:
    """Return the name of data file `number`."""
    return f"__0_{number}.distcp"


def file_order(key: str) -> tuple[bool, int, int]:
    """Return a tensor's sort key: tensors with the same key share a file, and files are in this order.

    Weights come before the optimizer; then what is outside of the layers, each layer, each depth of multi-token
    prediction.
    """
    optimizer = key.startswith("optimizer.")
    found = _LAYER.search(key)
    if found is not None:
        return optimizer, 1 if found.group(1) == "decoder" else 2, int(found.group(2))
    return optimizer, 0, 0


def write_index(
    step: Path, tensors: dict[str, tuple[str, Shape]], parts: Iterable[StoredPart], values: Any
) -> FileEntry:
    """Write `.metadata`, with the same bytes for the same content.

    Args:
        step: the step's folder.
        tensors: dtype (without `torch.`) and shape by key, in order.
        parts: blocks of the tensors.
        values: parts that are no tensors.
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
            storage[MetadataIndex(key, part.start, number)] = _info(part)
    for part in values:
        key = sys.intern(part.key)
        listed[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _info(part)
    return write_bytes(step / index.NAME, pickle.dumps(Metadata(listed, None, storage), protocol=4))


def _info(part: StoredPart) -> _StorageInfo:
    return _StorageInfo(sys.intern(part.file), part.offset, part.length)


def write_common(step: Path, plain: dict[str, Any]) -> dict[str, FileEntry]:
    """Write the engine's file of plain values, and the one that names its format."""
    content = io.BytesIO()
    torch.save(plain, content)
    return {
        pickles.COMMON: write_bytes(step / pickles.COMMON, content.getvalue()),
        "metadata.json": write_bytes(step / "metadata.json", json.dumps(folder.ENGINE_FORMAT).encode()),
    }


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


def seal(root: Path, iteration: int, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Make a folder of checkpoints of the one step in it: manifest, owner's mark, pointer. Returns all of its files.

    Raises:
        OSError: the step does not hold exactly these files.
    """
    step = folder.step_folder(root, iteration)
    (step / manifest.NAME).unlink(missing_ok=True)
    manifest.write(step, iteration, files)
    if defect := manifest.structure_defect(step):
        raise OSError(f"{step}: {defect}")
    result = {f"{step.name}/{name}": entry for name, entry in files.items()}
    path = step / manifest.NAME
    result[f"{step.name}/{path.name}"] = FileEntry(bytes=path.stat().st_size, sha256=sha256_of_file(path))
    result[folder.OWNER] = write_bytes(root / folder.OWNER, b"")
    result[folder.LATEST] = write_bytes(root / folder.LATEST, f"{iteration}\n".encode())
    return result


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


# ---- From a Hugging Face folder to these files.

ITERATION = 0
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)


class ToNative(Conversion):
    """A conversion from Hugging Face to native.

    Raises:
        ConfigError: the folder's tensors are not those of its configuration, or of several dtypes.
    """

    direction: ClassVar[str] = "Hugging Face to native"

    def __init__(self, found: HFFolder, options: ConversionOptions) -> None:
        super().__init__(found.path, options)
        self.reader = TensorReader(found)
        where = f"--load {found.path}"
        described = settings_of(found, where)
        self.family, self.notes = described.family, [*found.notes, *described.notes]
        stored = {name: self.reader.shape(name) for name in self.reader.names()}
        table = mapping(build(described.flat), self.family.names)
        self.copies, self.ignored = require_tensors(table, stored, where)
        self.notes += [f"{name} follows from the configuration and is left out" for name in self.ignored]
        flat, self.dropped = dict(described.flat), list[str]()
        if options.drop_mtp:
            flat["mtp_num_layers"] = None
            kept = mapping(build(flat), self.family.names)
            self.dropped = sorted((_names(table) | table.copies.keys()) - _names(kept) - kept.copies.keys())
            self.dropped = [name for name in self.dropped if name in stored]
            self.copies = [name for name in self.copies if name in kept.copies]
            self.notes.append(f"--drop-mtp: {len(self.dropped)} tensors of multi-token prediction are left out")
            table = kept
        self.table = table
        self.dtype, wide = (options.dtype, []) if options.dtype else self._dtypes(where)
        flags = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}, torch.float32: {}}
        self.run = build({**flat, **flags[self.dtype]})
        if wide:
            patterns = patterns_of(self.run, wide)
            self.run = replace(self.run, keep_fp32=patterns)
            self.notes.append(f"fp32 weights stay in fp32: --keep-fp32 {' '.join(patterns)}, which a run needs too")
        in_fp32 = kept_in_fp32(self.run)
        self.fp32 = {piece.key for piece in table.pieces if piece.fp32 or is_inside(piece.key, in_fp32)}
        self.weights = WeightCheck(self.reader, table)
        self.inputs = {name: found.path / name for name in {stored.file for stored in found.tensors.values()}}
        self.companions = {name: path for name, path in found.companions.items() if name != CERTIFICATE}
        self.inputs |= self.companions
        if (found.path / INDEX).exists():
            self.inputs[INDEX] = found.path / INDEX
        self.units = self._planned()
        self.summary = model_words(self.run, self.family.name, dtype_name(self.dtype))

    def _dtypes(self, where: str) -> tuple[torch.dtype, list[str]]:
        """Return the dtype of the weights, and the keys of those that are fp32 beside others in bf16 or fp16."""
        dtypes: dict[torch.dtype, list[Piece]] = {}
        for piece in self.table.pieces:
            for name in () if piece.fp32 else piece.hf:
                dtypes.setdefault(self.reader.dtype(name), []).append(piece)
        narrow = [dtype for dtype in dtypes if dtype != torch.float32]
        if len(narrow) > 1 or not dtypes.keys() <= set(_WEIGHTS):
            examples = "; ".join(f"{dtype_name(dtype)}: {len(of)}, {of[0].hf[0]}" for dtype, of in dtypes.items())
            raise ConfigError(
                f"{where}: its weights are of {len(dtypes)} dtypes ({examples}), and a model here has bf16 or fp16, "
                "and fp32 beside it; give the one that all are to have: --dtype {bf16,fp16,fp32}"
            )
        if not narrow:
            return torch.float32, []
        return narrow[0], list(dict.fromkeys(piece.key for piece in dtypes.get(torch.float32, ())))

    def _dtype(self, piece: Piece) -> torch.dtype:
        return torch.float32 if piece.key in self.fp32 else self.dtype

    def _planned(self) -> list[OutputFile]:
        files: dict[Any, list[Piece]] = {}
        for piece in self.table.pieces:
            self._warn_of_rounded(piece)
            files.setdefault(file_order(piece.key), []).append(piece)
        units = []
        for number, order in enumerate(sorted(files)):
            size = sum(_bytes(piece, self._dtype(piece)) + PER_PART for piece in files[order])
            name = f"{folder.step_folder(Path(), ITERATION)}/{data_name(number)}"
            units.append(OutputFile(name, size, tuple(files[order])))
        return units

    def _warn_of_rounded(self, piece: Piece) -> None:
        for name in piece.hf if piece.fp32 else ():
            if (dtype := self.reader.dtype(name)) != torch.float32:
                self.warnings.append(
                    f"PRECISION WARNING: {name} is {dtype_name(dtype)} in {self.source}, must be float32: it was "
                    "rounded before it was saved; converted as it is and kept in float32 from now on"
                )

    def write(self, unit: OutputFile, output: Path, advance: Advance) -> Record:
        rows: list[Row] = []
        with new_file(output / unit.name) as file:
            data = DataFile(file)
            for piece in unit.content:
                tensors, entries = self._read(piece)
                block = piece.transform.to_native(tensors)
                dtypes = {entry["dtype"] for entry in entries}
                before = dtypes.pop() if len(dtypes) == 1 else " and ".join(sorted(dtypes))
                data.add(piece.key, piece.start, block)
                rows.append(
                    {
                        "native": certificate.native_entry(piece.key, piece.start, block),
                        "transform": piece.transform.name,
                        "cast": certificate.cast_name(before, dtype_name(block.dtype)),
                        "hf": entries,
                    }
                )
                advance(_bytes(piece, self._dtype(piece)) + PER_PART)
        return {"entry": file.entry(), "parts": data.parts, "rows": rows}

    def _read(self, piece: Piece) -> tuple[list[torch.Tensor], list[Row]]:
        """Return the tensors that a block is made of, in the block's dtype, and their entries of a row."""
        dtype = self._dtype(piece)
        tensors, entries = [], []
        for name in piece.hf:
            tensor, digests = self.reader.read_hashed(name, torch.float32 if dtype == torch.float32 else None)
            self.weights.require_certified(digests)
            certificate.require_finite(tensor, name, str(self.source))
            stored = self.reader.folder.tensors[name]
            entry: Row = {"name": name, "shape": list(stored.shape), "dtype": stored.dtype, "sha256": digests[name]}
            if doubt := self.weights.doubt(name, tensor, digests[name]):
                if not self.options.allow_suspicious_weights:
                    raise refusal(doubt)
                entry["suspicious"] = doubt
            for scale in self.reader.sources(name)[1:]:
                entry["scale"] = {"name": scale, "sha256": digests[scale]}
            tensors.append(certificate.cast(tensor, dtype, name))
            if stored.dtype != dtype_name(dtype):
                entry["sha256_as_written"] = sha256(tensors[-1])
            entries.append(entry)
        return tensors, entries

    def coverage(self, records: list[Record]) -> None:
        rows = [row for record in records for row in record["rows"]]
        left_out = {*self.copies, *self.ignored, *self.dropped}
        names = set(self.reader.names()) - left_out
        certificate.require_coverage(rows, names, self.table.shapes, str(self.source))
        hashes = {entry["name"]: (entry["sha256"], entry["dtype"]) for row in rows for entry in row["hf"]}
        for copy in self.copies:
            original = self.table.copies[copy]
            if (self.reader.digest(copy), self.reader.folder.tensors[copy].dtype) != hashes[original]:
                raise ConfigError(
                    f"{self.source}: {copy} differs from {original}, which it has to be a copy of: the model has one "
                    "tensor for both"
                )

    def finish(self, output: Path, records: list[Record]) -> dict[str, FileEntry]:
        entries = (entry for record in records for row in record["rows"] for entry in row["hf"])
        suspicious = [f"WARNING: {entry['suspicious']}: taken as it is" for entry in entries if "suspicious" in entry]
        self.warnings += suspicious
        for line in suspicious:
            note(line)
        step = folder.step_folder(output, ITERATION)
        files = {Path(record["name"]).name: record["entry"] for record in records}
        parts = [StoredPart(*part) for record in records for part in record["parts"]]
        dtype = dtype_name(self.dtype)
        tensors = {key: ("float32" if key in self.fp32 else dtype, shape) for key, shape in self.table.shapes.items()}
        files[".metadata"] = write_index(step, tensors, parts, ())
        files |= write_common(step, {})
        if self.companions:
            (step / origin.FOLDER).mkdir(exist_ok=True)
        for name in sorted(self.companions):
            content = self.reader.folder.companion(name)  # unchanged since the folder was checked
            files[f"{origin.FOLDER}/{name}"] = write_bytes(step / origin.FOLDER / name, content)
        files[folder.CONFIG] = write_json(step / folder.CONFIG, flatten(self.run))
        files[folder.STATE] = write_json(step / folder.STATE, self._state())
        return seal(output, ITERATION, files)

    def _state(self) -> dict[str, Any]:
        about = {"family": self.family.name, "copies": self.copies, "dropped": self.dropped}
        return {**native_state(self.run, self.warnings), origin.FOLDER: about}

    def check(self, output: Path, records: list[Record], advance: Advance) -> None:
        step = folder.step_folder(output, ITERATION)
        back = StepReader(step)
        shapes = {key: tensor.shape for key, tensor in back.index.tensors.items()}
        if shapes != self.table.shapes:
            raise ConfigError(f"{step}: its tensors are not those of the model; nothing was published")
        pieces = {(piece.key, piece.start): piece for piece in self.table.pieces}
        for row in (row for record in records for row in record["rows"]):
            native = row["native"]
            key, start = native["key"], tuple(native["start"])
            piece = pieces[key, start]
            block = back.read(key, start, tuple(native["shape"]))
            certificate.require_same(sha256(block), native["sha256"], key, "it reads otherwise than it was written")
            for tensor, entry in zip(piece.transform.to_hf(block), row["hf"], strict=True):
                certificate.require_same(sha256(tensor), expected(entry), entry["name"], f"{key} gives another one")
            advance(block.nbytes)

    def facts(self, records: list[Record]) -> dict[str, Any]:
        original = {name: self.table.copies[name] for name in self.copies}
        return {
            "family": self.family.name,
            "dtype": dtype_name(self.dtype),
            "copies": original,
            "dropped": self.dropped,
            "ignored": self.ignored,
        }


def _names(table: Mapping) -> set[str]:
    return {name for piece in table.pieces for name in piece.hf}


def _bytes(piece: Piece, dtype: torch.dtype) -> int:
    return elements(piece.transform.native_shape) * dtype.itemsize
