"""Convert a native step to a checkpoint that Megatron-LM loads, in its format torch_dist."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_moe.checkpoint import folder, index, manifest, pickles
from megatron_moe.checkpoint.pickles import PER_PART
from megatron_moe.checkpoint.step_reader import AVERAGE, StepReader
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.schema import Run, replace
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import new_file, write_bytes
from megatron_moe.io.hashing import FileEntry, sha256_of_file
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row, expected
from megatron_moe_tools.convert.convert import Advance, Conversion, ConversionOptions, OutputFile, Record, model_words
from megatron_moe_tools.convert.to_native import DataFile, StoredPart, data_name, file_order, write_common, write_index
from megatron_moe_tools.megatron_lm import exporting, optimizer
from megatron_moe_tools.megatron_lm.contents import EMBEDDING, Progress, tensors_of, weight_of
from megatron_moe_tools.models.source import ModelSource

_OPTIMIZER = "optimizer."
_EXPERTS = (".experts.weight1", ".experts.weight2")
_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: None}
Box = tuple[str, Shape, Shape]
"""A block of one of our tensors: key, first element, extent."""


class ToMegatron(Conversion):
    """A conversion from native to Megatron-LM's torch_dist.

    Args:
        transformer_impl: whose layers it is to be loaded into, Transformer Engine's or local ones.
        expert_ranks: how many ranks experts are spread over there, which decides what its optimizer is.

    Raises:
        ConfigError: the step has a model or an optimizer that Megatron-LM does not have.
    """

    direction: ClassVar[str] = "native to Megatron-LM"

    def __init__(
        self, source: ModelSource, options: ConversionOptions, transformer_impl: str, expert_ranks: int | None
    ) -> None:
        super().__init__(source.path, options)
        self.notes, self.impl, self.expert_ranks = list(source.notes), transformer_impl, expert_ranks
        self.reader = StepReader(source.path)
        self.run = self._with_stored_padding(source.run)
        self.weights, self.fp32 = tensors_of(self.run)
        stored = [key for key in self.reader.index.tensors if key.startswith(_OPTIMIZER)]
        self.keeps_optimizer = bool(stored) and not options.no_optim
        self._require_tensors()
        self._require_known_there()
        self.files = manifest.read(source.path).files
        self.inputs = {name: source.path / name for name in self.files}
        self.dtype = self._one_dtype()
        self.shapes, self.again, self.continued = dict(self.weights), dict[str, str](), self._continued()
        if self.continued is not None:
            # Megatron-LM's distributed optimizer has main weights of fp32 weights too, and asks for them.
            wanted = optimizer.wanted_keys(self.weights, self.fp32, half=True)
            mains = {key: weight_of(key) for key in wanted if key.startswith(f"{optimizer.STATE}{optimizer.MAIN}.")}
            self.again = mains if self.dtype == torch.float32 else {}
            self.shapes |= wanted
        self.name = exporting.RELEASE if self.continued is None else folder.step_folder(Path(), self._iteration()).name
        self.units = self._planned()
        kept = "weights alone: Megatron-LM starts at iteration 0"
        if self.continued is not None:
            kept = f"with the optimizer of iteration {self._iteration()}, for --use-distributed-optimizer"
            if self.expert_ranks is not None:
                kept += f" and --expert-model-parallel-size {'above 1' if self.expert_ranks > 1 else '1'}"
        self.notes.append(f"for --transformer-impl {transformer_impl} there; {kept}")
        self.summary = model_words(self.run, "--ckpt-format torch_dist", dtype_name(self.dtype))

    def wanted_inputs(self) -> dict[str, FileEntry] | None:
        return self.files

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "transformer_impl": self.impl, "expert_ranks": self.expert_ranks}

    def _with_stored_padding(self, run: Run) -> Run:
        table = self.reader.index.tensors.get(EMBEDDING)
        if table is None:
            raise ConfigError(f"--load {self.source}: has no tensor {EMBEDDING}")
        return replace(run, padded_vocab_size=table.shape[0], tensor_model_parallel_size=1)

    def _require_tensors(self) -> None:
        stored = self.reader.index.tensors
        self._require_shapes(
            {key: one.shape for key, one in stored.items() if not key.startswith(_OPTIMIZER)}, self.weights
        )

    def _require_shapes(self, shapes: dict[str, Shape], wanted: dict[str, Shape]) -> None:
        wrong = [f"missing: {key}" for key in sorted(wanted.keys() - shapes.keys())]
        wrong += [f"no tensor of its configuration: {key}" for key in sorted(shapes.keys() - wanted.keys())]
        wrong += [
            f"{key}: shape {list(shapes[key])}, its configuration says {list(shape)}"
            for key, shape in wanted.items()
            if key in shapes and shapes[key] != shape
        ]
        if wrong:
            raise ConfigError(listing(f"--load {self.source}: its tensors are not those of its configuration:", wrong))

    def _iteration(self) -> int:
        return int(self.source.name.removeprefix("iter_"))

    def _continued(self) -> exporting.Continued | None:
        """Return what a run goes on from there besides the weights; None without an optimizer."""
        if not self.keeps_optimizer:
            return None
        where, without = f"--load {self.source}", "add --no-optim to convert the weights alone"
        if self.options.dtype is not None:
            raise ConfigError(f"--dtype: the optimizer's main weights belong to weights of their own dtype; {without}")
        if self.dtype == torch.float16:
            raise ConfigError(
                f"{where}: has the optimizer of an fp16 run, whose loss scale is not converted; {without}"
            )
        config, state = folder.read_json(self.source / folder.CONFIG), folder.read_json(self.source / folder.STATE)
        if (kind := config.get("optimizer", "adam")) != "adam":
            raise ConfigError(f"{where}: has the state of --optimizer {kind}, which is not converted; {without}")
        ranks = 1 if self.run.moe.num_experts is None else self.expert_ranks
        if ranks is None:
            raise ConfigError(
                f"{where}: has the optimizer's state, and Megatron-LM has one optimizer where each rank has all "
                "experts and two where not: say how many ranks experts are spread over there, "
                f"--expert-model-parallel-size N, or {without}"
            )
        if ranks < 1:
            raise ConfigError(f"--expert-model-parallel-size {ranks}: must be at least 1")
        settings = optimizer.settings_of(config)
        if missing := [name for name in optimizer.SETTINGS if name not in settings]:
            raise ConfigError(
                f"{where}: its {folder.CONFIG} has no {' and no '.join(missing)}, which Megatron-LM takes from a "
                f"checkpoint; {without}"
            )
        self.run = replace(self.run, **settings)
        stored = self.reader.index.tensors
        wanted = optimizer.wanted_keys(self.weights, self.fp32, half=self.dtype != torch.float32)
        own = {
            key: one.shape for key, one in stored.items() if key.startswith(_OPTIMIZER) and not key.startswith(AVERAGE)
        }
        self._require_shapes(own, wanted)
        if state.get(folder.HAS_AVERAGE):
            self.notes.append("the average of the weights is left out: Megatron-LM has none")
        progress = Progress(self._iteration(), int(state["consumed_samples"]))
        batch = config.get("global_batch_size") or progress.consumed_samples // max(progress.iteration, 1)
        updates = optimizer.step_of(pickles.read_file(self.source, pickles.COMMON), where)
        return exporting.Continued(progress, updates, state["scheduler"], max(int(batch), 1), ranks > 1)

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
        found = {self._dtype(key) for key in self.weights if key not in self.fp32}
        if len(found) != 1:
            raise ConfigError(
                f"--load {self.source}: its weights are of {len(found)} dtypes, and Megatron-LM has one for all; give "
                "it: --dtype {bf16,fp16,fp32}"
            )
        return found.pop()

    def _dtype(self, key: str) -> torch.dtype:
        if key in self.fp32 or key.startswith(_OPTIMIZER):
            return torch.float32
        return self.options.dtype or self.reader.dtype(key)

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
            units.append(OutputFile(f"{self.name}/{data_name(number)}", size, tuple(files[order])))
        empty = exporting.extra_states(self.weights, self.run)
        name = f"{self.name}/{data_name(len(units))}"
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
                source = self.again.get(key, key)
                block = self.reader.read(source, start, shape)
                certificate.require_finite(block, source, str(self.source))
                native = certificate.native_entry(source, start, block)
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
                        **({"again": True} if key in self.again else {}),
                    }
                )
                advance(self._bytes(box))
        return {"entry": file.entry(), "parts": data.parts, "values": values, "rows": rows}

    def _start_there(self, key: str, start: Shape) -> Shape:
        return (start[0], 0, 0) if key.endswith(_EXPERTS) else start

    def coverage(self, records: list[Record]) -> None:
        rows = [row for record in records for row in record["rows"]]
        once = {key: shape for key, shape in self.shapes.items() if key not in self.again}
        twice = {self.again[key]: shape for key, shape in self.shapes.items() if key in self.again}
        certificate.require_coverage([row for row in rows if "again" not in row], (), once, str(self.source))
        certificate.require_coverage([row for row in rows if "again" in row], (), twice, str(self.source))

    def finish(self, output: Path, records: list[Record]) -> dict[str, FileEntry]:
        step = output / self.name
        files = {Path(record["name"]).name: record["entry"] for record in records}
        parts = [StoredPart(*part) for record in records for part in record["parts"]]
        values = [StoredPart(*part) for record in records for part in record["values"]]
        files[index.NAME] = write_index(step, self._tensors_there(), parts, values)
        half = _HALF[self.dtype]
        common = exporting.common(self.run, transformer_impl=self.impl, half=half, continued=self.continued)
        files |= write_common(step, common)
        result = {f"{self.name}/{name}": entry for name, entry in files.items()}
        latest = exporting.RELEASE if self.continued is None else str(self._iteration())
        result[folder.LATEST] = write_bytes(output / folder.LATEST, latest.encode())
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
        step = output / self.name
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
