"""Convert a native step to a checkpoint that Megatron-LM loads, in its format torch_dist; weights alone."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_moe.apps.convert import certificate
from megatron_moe.apps.convert.certificate import Row, expected
from megatron_moe.apps.convert.convert import Advance, Conversion, ConversionOptions, OutputFile, Record, model_words
from megatron_moe.apps.convert.to_native import DataFile, StoredPart, data_name, file_order, write_common, write_index
from megatron_moe.checkpoint import folder, index, manifest
from megatron_moe.checkpoint.pickles import PER_PART
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.schema import Run, replace
from megatron_moe.hf.source import ModelSource
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import new_file, write_bytes
from megatron_moe.io.hashing import FileEntry, sha256_of_file
from megatron_moe.megatron_lm import exporting
from megatron_moe.megatron_lm.contents import EMBEDDING, tensors_of

_OPTIMIZER = "optimizer."
_EXPERTS = (".experts.weight1", ".experts.weight2")
_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: None}
Box = tuple[str, Shape, Shape]
"""A block of one of our tensors: key, first element, extent."""


class ToMegatron(Conversion):
    """A conversion from native to Megatron-LM's torch_dist.

    Args:
        transformer_impl: whose layers it is to be loaded into, Transformer Engine's or local ones.

    Raises:
        ConfigError: the step has an optimizer that is not left out, or a model that Megatron-LM does not have.
    """

    direction: ClassVar[str] = "native to Megatron-LM"

    def __init__(self, source: ModelSource, options: ConversionOptions, transformer_impl: str) -> None:
        super().__init__(source.path, options)
        self.notes, self.impl = list(source.notes), transformer_impl
        self.reader = StepReader(source.path)
        self.run = self._with_stored_padding(source.run)
        self.shapes, self.fp32 = tensors_of(self.run)
        self._require_tensors()
        self._require_known_there()
        self.files = manifest.read(source.path).files
        self.inputs = {name: source.path / name for name in self.files}
        self.dtype = self._one_dtype()
        self.units = self._planned()
        self.notes.append(
            f"for --transformer-impl {transformer_impl} there; weights alone: Megatron-LM starts at iteration 0"
        )
        self.summary = model_words(self.run, "--ckpt-format torch_dist", dtype_name(self.dtype))

    def wanted_inputs(self) -> dict[str, FileEntry] | None:
        return self.files

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "transformer_impl": self.impl}

    def _with_stored_padding(self, run: Run) -> Run:
        table = self.reader.index.tensors.get(EMBEDDING)
        if table is None:
            raise ConfigError(f"--load {self.source}: has no tensor {EMBEDDING}")
        return replace(run, padded_vocab_size=table.shape[0], tensor_model_parallel_size=1)

    def _require_tensors(self) -> None:
        stored = self.reader.index.tensors
        optimizer = [key for key in stored if key.startswith(_OPTIMIZER)]
        if optimizer and not self.options.no_optim:
            raise ConfigError(
                f"--load {self.source}: has the optimizer's state ({optimizer[0]}), which is not written for "
                "Megatron-LM: its form there depends on the layout that loads it; add --no-optim to write weights alone"
            )
        shapes = {key: tensor.shape for key, tensor in stored.items() if key not in set(optimizer)}
        wrong = [f"missing: {key}" for key in sorted(self.shapes.keys() - shapes.keys())]
        wrong += [f"no tensor of its configuration: {key}" for key in sorted(shapes.keys() - self.shapes.keys())]
        wrong += [
            f"{key}: shape {list(shapes[key])}, its configuration says {list(shape)}"
            for key, shape in self.shapes.items()
            if key in shapes and shapes[key] != shape
        ]
        if wrong:
            raise ConfigError(listing(f"--load {self.source}: its tensors are not those of its configuration:", wrong))

    def _require_known_there(self) -> None:
        """Refuse settings that Megatron-LM would compute otherwise, since it has no argument for them."""
        run, wrong = self.run, []
        if run.moe.moe_router_num_groups is not None and run.moe.moe_router_group_score != "megatron":
            best = run.moe.moe_router_topk // (run.moe.moe_router_group_topk or 1)
            if not (run.moe.moe_router_group_score == "top2" and best == 2 and not _softmax_after(run)):
                wrong.append(f"--moe-router-group-score {run.moe.moe_router_group_score}: it ranks groups otherwise")
        default = replace(run, moe_router_norm_topk_prob=None).derived.norm_topk_prob
        if run.moe.num_experts is not None and run.derived.norm_topk_prob != default:
            wrong.append(
                f"--moe-router-norm-topk-prob {run.derived.norm_topk_prob}: it takes {default} for this router"
            )
        if wrong:
            head = f"--load {self.source}: is a model that Megatron-LM does not have:"
            raise ConfigError(listing(head, wrong))

    def _one_dtype(self) -> torch.dtype:
        found = {self._dtype(key) for key in self.shapes if key not in self.fp32}
        if len(found) != 1:
            raise ConfigError(
                f"--load {self.source}: its weights are of {len(found)} dtypes, and Megatron-LM has one for all; give "
                "it: --dtype {bf16,fp16,fp32}"
            )
        return found.pop()

    def _dtype(self, key: str) -> torch.dtype:
        return torch.float32 if key in self.fp32 else self.options.dtype or self.reader.dtype(key)

    def _planned(self) -> list[OutputFile]:
        files: dict[Any, list[Box]] = {}
        for key, shape in self.shapes.items():
            zeros = (0,) * len(shape)
            boxes = [(key, zeros, shape)]
            if key.endswith(_EXPERTS):
                boxes = [(key, (expert, *zeros[1:]), (1, *shape[1:])) for expert in range(shape[0])]
            files.setdefault(file_order(key), []).extend(boxes)
        units = []
        for number, order in enumerate(sorted(files)):
            size = sum(self._bytes(box) for box in files[order])
            units.append(OutputFile(f"{exporting.STEP}/{data_name(number)}", size, tuple(files[order])))
        empty = exporting.extra_states(self.shapes, self.run)
        name = f"{exporting.STEP}/{data_name(len(units))}"
        return [*units, OutputFile(name, PER_PART * len(empty), tuple(empty))]

    def _bytes(self, box: Box) -> int:
        return math.prod(box[2]) * self._dtype(box[0]).itemsize + PER_PART

    def write(self, unit: OutputFile, output: Path, advance: Advance) -> Record:
        rows: list[Row] = []
        values: list[StoredPart] = []
        with new_file(output / unit.name) as file:
            data = DataFile(file)
            for box in unit.content:
                if isinstance(box, str):
                    values.append(data.add_value(box, _EMPTY))
                    advance(PER_PART)
                    continue
                key, start, shape = box
                block = self.reader.read(key, start, shape)
                certificate.require_finite(block, key, str(self.source))
                native = certificate.native_entry(key, start, block)
                before, block = native["dtype"], certificate.cast(block, self._dtype(key), key)
                if native["dtype"] != dtype_name(block.dtype):
                    native["sha256_as_written"] = sha256(block)
                name = exporting.name_there(key, self.run, self.impl)
                there, first = exporting.shape_there(key, shape), self._start_there(key, start)
                data.add(name, first, block.reshape(there))
                entry = {"start": list(first), "shape": list(there), "dtype": dtype_name(block.dtype)}
                rows.append(
                    {
                        "native": native,
                        "cast": certificate.cast_name(before, dtype_name(block.dtype)),
                        "megatron": [{"name": name, **entry, "sha256": sha256(block)}],
                    }
                )
                advance(self._bytes(box))
        return {"entry": file.entry(), "parts": data.parts, "values": values, "rows": rows}

    def _start_there(self, key: str, start: Shape) -> Shape:
        return (start[0], 0, 0) if key.endswith(_EXPERTS) else start

    def coverage(self, records: list[Record]) -> None:
        rows = [row for record in records for row in record["rows"]]
        certificate.require_coverage(rows, (), self.shapes, str(self.source))

    def finish(self, output: Path, records: list[Record]) -> dict[str, FileEntry]:
        step = output / exporting.STEP
        files = {Path(record["name"]).name: record["entry"] for record in records}
        parts = [StoredPart(*part) for record in records for part in record["parts"]]
        values = [StoredPart(*part) for record in records for part in record["values"]]
        files[index.NAME] = write_index(step, self._tensors_there(), parts, values)
        half = _HALF[self.dtype]
        files |= write_common(step, exporting.common(self.run, transformer_impl=self.impl, half=half))
        result = {f"{exporting.STEP}/{name}": entry for name, entry in files.items()}
        result[folder.LATEST] = write_bytes(output / folder.LATEST, exporting.STEP.encode())
        return result

    def _tensors_there(self) -> dict[str, tuple[str, Shape]]:
        return {
            exporting.name_there(key, self.run, self.impl): (
                dtype_name(self._dtype(key)),
                exporting.shape_there(key, shape),
            )
            for key, shape in self.shapes.items()
        }

    def check(self, output: Path, records: list[Record], advance: Advance) -> None:
        step = output / exporting.STEP
        names = [path.name for path in step.iterdir()]
        sizes = {
            name: FileEntry(bytes=(step / name).stat().st_size, sha256=sha256_of_file(step / name)) for name in names
        }
        back = StepReader(step, index.read(step, sizes))
        if {key: (tensor.dtype, tensor.shape) for key, tensor in back.index.tensors.items()} != self._tensors_there():
            raise ConfigError(f"{step}: its tensors are not those of the model; nothing was published")
        for row in (row for record in records for row in record["rows"]):
            native, (entry,) = row["native"], row["megatron"]
            block = back.read(entry["name"], tuple(entry["start"]), tuple(entry["shape"]))
            certificate.require_same(sha256(block), entry["sha256"], entry["name"], "it reads otherwise than written")
            certificate.require_same(entry["sha256"], expected(native), native["key"], f"{entry['name']} is another")
            advance(block.nbytes)

    def facts(self, records: list[Record]) -> dict[str, Any]:
        dropped = sorted(key for key in self.reader.index.tensors if key not in self.shapes)
        return {"format": "torch_dist", "dtype": dtype_name(self.dtype), "dropped": dropped, "impl": self.impl}


def _softmax_after(run: Run) -> bool:
    return run.moe.moe_router_score_function == "softmax" and not run.moe.moe_router_pre_softmax


def _empty_value() -> bytes:
    content = io.BytesIO()
    torch.save([None], content)
    return content.getvalue()


_EMPTY = _empty_value()
"""What a layer's extra state is without FP8, as the engine stores it."""
