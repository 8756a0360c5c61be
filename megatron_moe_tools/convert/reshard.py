"""Convert a native step to the same step in a canonical layout: one file per layer, one block per expert."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_moe.checkpoint import folder, manifest, pickles
from megatron_moe.checkpoint.index import LARGEST_VALUE, Tensor
from megatron_moe.checkpoint.pickles import PER_PART
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import new_file, write_json
from megatron_moe.io.hashing import FileEntry
from megatron_moe_tools.convert import certificate, to_native
from megatron_moe_tools.convert.certificate import Row, expected
from megatron_moe_tools.convert.convert import Advance, Conversion, ConversionOptions, OutputFile, Record, reader_of
from megatron_moe_tools.convert.to_native import DataFile, StoredPart

_OPTIMIZER = "optimizer."
_EXPERTS = (".experts.weight1", ".experts.weight2")
_FP32 = ".expert_bias"
_OF_OPTIMIZER = ("has_optimizer", folder.HAS_AVERAGE)
_REWRITTEN = (".metadata", "metadata.json", pickles.COMMON, folder.CONFIG, folder.STATE)
Box = tuple[str, Shape, Shape]
"""A block of a tensor: key, first element, extent."""


class Reshard(Conversion):
    """A conversion from native to native.

    Raises:
        ConfigError: the options ask for something that a step cannot be.
    """

    direction: ClassVar[str] = "native to native"

    def __init__(self, step: Path, options: ConversionOptions, notes: tuple[str, ...] = ()) -> None:
        super().__init__(step, options)
        self.notes = list(notes)
        self.reader = reader_of(step, options)
        self.config, self.state = folder.read_json(step / folder.CONFIG), folder.read_json(step / folder.STATE)
        self.iteration = int(step.name.removeprefix("iter_"))
        self.files = manifest.read(step).files
        self.inputs = {name: step / name for name in self.files}
        self.keeps_optimizer = not (options.no_optim or options.ema) and any(
            key.startswith(_OPTIMIZER) for key in self.reader.index.tensors
        )
        if options.dtype is not None:
            self._check_cast()
        if options.drop_mtp or options.family is not None:
            flag = "--drop-mtp" if options.drop_mtp else "--family"
            raise ConfigError(f"{flag}: is for folders of Hugging Face; from native to native nothing is left out")
        self.tensors: dict[str, Tensor] = {
            key: tensor
            for key, tensor in self.reader.index.tensors.items()
            if self.keeps_optimizer or not key.startswith(_OPTIMIZER)
        }
        self.units = self._planned()
        kept = "with the optimizer's state" if self.keeps_optimizer else "weights alone"
        kept = "the averages of the weights" if options.ema else kept
        self.summary = f"step {self.iteration}, {len(self.tensors)} tensors, {kept}"

    def _check_cast(self) -> None:
        if self.keeps_optimizer:
            raise ConfigError(
                f"--dtype: the optimizer's main weights belong to weights of the step's own dtype; add --no-optim to "
                f"cast the weights of {self.source} alone"
            )
        half = self.options.dtype != torch.float32
        if half and self.config.get("keep_fp32"):
            raise ConfigError(
                f"--dtype: {self.source} keeps {self.config['keep_fp32']} in fp32 (--keep-fp32), and all weights or "
                "none are cast; --dtype fp32 works"
            )

    def wanted_inputs(self) -> dict[str, FileEntry] | None:
        return self.files

    def _dtype(self, key: str) -> torch.dtype:
        stored = self.reader.dtype(key)
        if key.endswith(_FP32) and not key.startswith(_OPTIMIZER):
            return torch.float32
        return stored if self.options.dtype is None or not stored.is_floating_point else self.options.dtype

    def _planned(self) -> list[OutputFile]:
        files: dict[Any, list[Box]] = {}
        for key, tensor in self.tensors.items():
            if self._dtype(key) != self.reader.dtype(key) and key.endswith(_FP32):
                self.warnings.append(
                    f"PRECISION WARNING: {key} is {dtype_name(self.reader.dtype(key))} in {self.source}, must be "
                    "float32: it was rounded before it was saved; kept in float32 from now on"
                )
            files.setdefault(to_native.file_order(key), []).extend(_boxes(key, tensor))
        units = []
        for number, order in enumerate(sorted(files)):
            size = sum(self._bytes(box) for box in files[order])
            name = f"{self.source.name}/{to_native.data_name(number)}"
            units.append(OutputFile(name, size, tuple(sorted(files[order]))))
        if self.reader.index.values:  # values that are neither tensors nor in the common file
            size = sum(stored.length for stored in self.reader.index.values.values())
            name = f"{self.source.name}/{to_native.data_name(len(units))}"
            units.append(OutputFile(name, size, tuple(sorted(self.reader.index.values))))
        return units

    def _bytes(self, box: Box) -> int:
        return math.prod(box[2]) * self._dtype(box[0]).itemsize + PER_PART

    def write(self, unit: OutputFile, output: Path, advance: Advance) -> Record:
        rows: list[Row] = []
        values: list[StoredPart] = []
        with new_file(output / unit.name) as file:
            data = DataFile(file)
            for box in unit.content:
                if isinstance(box, str):
                    values.append(data.add_value(box, self._value(box)))
                    continue
                key, start, _ = box
                block = self._block(box)
                if block.is_floating_point():
                    certificate.require_finite(block, key, str(self.source))
                native = certificate.native_entry(key, start, block)
                before, block = native["dtype"], certificate.cast(block, self._dtype(key), key)
                if native["dtype"] != dtype_name(block.dtype):
                    native["sha256_as_written"] = sha256(block)
                data.add(key, start, block)
                rows.append({"native": native, "cast": certificate.cast_name(before, dtype_name(block.dtype))})
                advance(self._bytes(box))
        return {"entry": file.entry(), "parts": data.parts, "values": values, "rows": rows}

    def _block(self, box: Box) -> torch.Tensor:
        return self.reader.read(*box)

    def _new_state(self) -> dict[str, Any]:
        kept = {name: bool(self.state.get(name)) and self.keeps_optimizer for name in _OF_OPTIMIZER}
        return {**self.state, **kept, **({"averaged": True} if self.options.ema else {})}

    def _value(self, key: str) -> bytes:
        stored = self.reader.index.values[key]
        with open(self.source / stored.file, "rb") as file:
            file.seek(stored.offset)
            return file.read(min(stored.length, LARGEST_VALUE))

    def coverage(self, records: list[Record]) -> None:
        rows = [row for record in records for row in record["rows"]]
        shapes = {key: tensor.shape for key, tensor in self.tensors.items()}
        certificate.require_coverage(rows, (), shapes, str(self.source))

    def finish(self, output: Path, records: list[Record]) -> dict[str, FileEntry]:
        step = folder.step_folder(output, self.iteration)
        files = {Path(record["name"]).name: record["entry"] for record in records}
        parts = [StoredPart(*part) for record in records for part in record["parts"]]
        values = [StoredPart(*part) for record in records for part in record["values"]]
        tensors = {key: (dtype_name(self._dtype(key)), tensor.shape) for key, tensor in sorted(self.tensors.items())}
        files[".metadata"] = to_native.write_index(step, tensors, parts, values)
        common = pickles.read_file(self.source, pickles.COMMON) if pickles.COMMON in self.files else {}
        if not self.keeps_optimizer:
            common.pop("optimizer", None)
        files |= to_native.write_common(step, common)
        for name, known in self.files.items():
            if not (name.endswith(".distcp") or name in _REWRITTEN):
                (step / name).parent.mkdir(exist_ok=True)
                files[name] = to_native.copy_file(self.source / name, step / name, known)
        files[folder.CONFIG] = write_json(step / folder.CONFIG, self._new_config())
        files[folder.STATE] = write_json(step / folder.STATE, self._new_state())
        return to_native.seal(output, self.iteration, files)

    def _new_config(self) -> dict[str, Any]:
        if self.options.dtype is None:
            return self.config
        bf16, fp16 = self.options.dtype == torch.bfloat16, self.options.dtype == torch.float16
        return {**self.config, "bf16": bf16, "fp16": fp16, "keep_fp32": None, "fp8_format": None}

    def check(self, output: Path, records: list[Record], advance: Advance) -> None:
        step = folder.step_folder(output, self.iteration)
        back = StepReader(step)
        for record in records:
            for row in record["rows"]:
                native = row["native"]
                key = native["key"]
                block = back.read(key, tuple(native["start"]), tuple(native["shape"]))
                certificate.require_same(sha256(block), expected(native), key, "it reads otherwise than it was written")
                advance(block.nbytes)
        if back.index.values.keys() != self.reader.index.values.keys():
            raise ConfigError(f"{step}: values are missing; nothing was published")

    def facts(self, records: list[Record]) -> dict[str, Any]:
        dropped = [key for key in self.reader.index.tensors if key not in self.tensors]
        return {"family": (self.state.get("hf") or {}).get("family"), "iteration": self.iteration, "dropped": dropped}


def _boxes(key: str, tensor: Tensor) -> list[Box]:
    """Return the blocks of a tensor: one per expert, other tensors whole."""
    zeros = (0,) * len(tensor.shape)
    if not key.endswith(_EXPERTS):
        return [(key, zeros, tensor.shape)]
    return [(key, (expert, *zeros[1:]), (1, *tensor.shape[1:])) for expert in range(tensor.shape[0])]
