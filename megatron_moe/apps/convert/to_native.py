"""Convert a Hugging Face folder to a native step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_moe.apps.convert import certificate, native_step
from megatron_moe.apps.convert.certificate import Row, expected
from megatron_moe.apps.convert.convert import Advance, Conversion, ConversionOptions, OutputFile, Record, model_words
from megatron_moe.apps.convert.native_step import DataFile, StoredPart
from megatron_moe.checkpoint import folder, origin
from megatron_moe.checkpoint.pickles import PER_PART
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import build, flatten
from megatron_moe.hf.architecture import settings_of
from megatron_moe.hf.folder import INDEX, HFFolder
from megatron_moe.hf.mapping import Mapping, Piece, mapping, require_tensors
from megatron_moe.hf.tensors import TensorReader, dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import new_file, write_bytes, write_json
from megatron_moe.io.hashing import FileEntry

ITERATION = 0
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)
_LAYOUT = ("world_size", "tp_size", "cp_size", "pp_size", "dp_size", "ep_size", "etp_size")


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
        self.dtype = options.dtype or self._one_dtype(table, where)
        flags = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}, torch.float32: {}}
        self.run = build({**flat, **flags[self.dtype]})
        self.table = table
        self.inputs = {name: found.path / name for name in {stored.file for stored in found.tensors.values()}}
        self.companions = {name: path for name, path in found.companions.items() if name != certificate.NAME}
        self.inputs |= self.companions
        if (found.path / INDEX).exists():
            self.inputs[INDEX] = found.path / INDEX
        self.units = self._planned()
        self.summary = model_words(self.run, self.family.name, dtype_name(self.dtype))

    def _one_dtype(self, table: Mapping, where: str) -> torch.dtype:
        dtypes: dict[torch.dtype, list[str]] = {}
        for piece in table.pieces:
            for name in () if piece.fp32 else piece.hf:
                dtypes.setdefault(self.reader.dtype(name), []).append(name)
        examples = "; ".join(f"{dtype_name(dtype)}: {len(names)}, {names[0]}" for dtype, names in dtypes.items())
        (dtype, *others) = dtypes
        if others or dtype not in _WEIGHTS:
            raise ConfigError(
                f"{where}: its weights are of {len(dtypes)} dtypes, and a model here has one ({examples}); give the "
                "one that all are to have: --dtype {bf16,fp16,fp32}"
            )
        return dtype

    def _planned(self) -> list[OutputFile]:
        files: dict[Any, list[Piece]] = {}
        for piece in self.table.pieces:
            self._warn_of_rounded(piece)
            files.setdefault(native_step.file_order(piece.key), []).append(piece)
        units = []
        for number, order in enumerate(sorted(files)):
            size = sum(_bytes(piece, self.dtype) + PER_PART for piece in files[order])
            name = f"{folder.step_folder(Path(), ITERATION)}/{native_step.data_name(number)}"
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
                advance(_bytes(piece, self.dtype) + PER_PART)
        return {"entry": file.entry(), "parts": data.parts, "rows": rows}

    def _read(self, piece: Piece) -> tuple[list[torch.Tensor], list[Row]]:
        """Return the tensors that a block is made of, in the block's dtype, and their entries of a row."""
        dtype = torch.float32 if piece.fp32 else self.dtype
        tensors, entries = [], []
        for name in piece.hf:
            tensor, digests = self.reader.read_hashed(name, torch.float32 if dtype == torch.float32 else None)
            certificate.require_finite(tensor, name, str(self.source))
            stored = self.reader.folder.tensors[name]
            entry: Row = {"name": name, "shape": list(stored.shape), "dtype": stored.dtype, "sha256": digests[name]}
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
        step = folder.step_folder(output, ITERATION)
        files = {Path(record["name"]).name: record["entry"] for record in records}
        parts = [StoredPart(*part) for record in records for part in record["parts"]]
        fp32 = {piece.key for piece in self.table.pieces if piece.fp32}
        dtype = dtype_name(self.dtype)
        tensors = {key: ("float32" if key in fp32 else dtype, shape) for key, shape in self.table.shapes.items()}
        files[".metadata"] = native_step.write_index(step, tensors, parts, ())
        files |= native_step.write_common(step, {})
        if self.companions:
            (step / origin.FOLDER).mkdir(exist_ok=True)
        for name in sorted(self.companions):
            content = self.reader.folder.companion(name)  # unchanged since the folder was checked
            files[f"{origin.FOLDER}/{name}"] = write_bytes(step / origin.FOLDER / name, content)
        files[folder.CONFIG] = write_json(step / folder.CONFIG, flatten(self.run))
        files[folder.STATE] = write_json(step / folder.STATE, self._state())
        return native_step.seal(output, ITERATION, files)

    def _state(self) -> dict[str, Any]:
        vocab_size = self.run.model.vocab_size
        assert vocab_size is not None, "a folder's configuration says it"
        progress = ("iteration", "consumed_samples", "skipped_iterations", "loss_scale_raised", "loss_scale_lowered")
        return {
            **dict.fromkeys(progress, 0),
            "has_optimizer": False,
            "layout": dict.fromkeys(_LAYOUT, 1),
            "vocab_size": vocab_size,
            "padded_vocab_size": self.run.derived.padded_vocab_size(vocab_size),
            "versions": certificate.versions(),
            "tokenizer": {},
            "data": {},
            "records": [],
            "precision_warnings": self.warnings,
            "hf": {"family": self.family.name, "copies": self.copies, "dropped": self.dropped},
        }

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
    size: Shape = piece.transform.native_shape
    count = 4 if piece.fp32 else dtype.itemsize
    for extent in size:
        count *= extent
    return count
