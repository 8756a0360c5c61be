"""Convert a checkpoint of Megatron-LM's to a native step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_moe.checkpoint import folder, origin
from megatron_moe.checkpoint.pickles import PER_PART
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.fields import all_fields
from megatron_moe.config.schema import flatten, replace
from megatron_moe.hf.folder import ALLOW, CERTIFICATE
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import new_file, write_json
from megatron_moe.io.hashing import FileEntry
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row, expected
from megatron_moe_tools.convert.convert import Advance, Conversion, ConversionOptions, OutputFile, Record, model_words
from megatron_moe_tools.convert.to_native import (
    DataFile,
    StoredPart,
    data_name,
    file_order,
    native_state,
    seal,
    write_common,
    write_index,
)
from megatron_moe_tools.megatron_lm import optimizer
from megatron_moe_tools.megatron_lm.contents import MegatronCheckpoint, Part, require_complete, tensors_of
from megatron_moe_tools.megatron_lm.settings import run_of

Block = tuple[str, Shape, Shape, tuple[Part, ...], tuple[Part, ...]]
"""A block of one of our tensors: key, start, shape, the parts that fill it, and parts that have to equal it."""
_EXPERTS = (".experts.weight1", ".experts.weight2")
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)


class FromMegatron(Conversion):
    """A conversion from Megatron-LM to native.

    Args:
        given: settings of the command line, which go before the checkpoint's, by field.

    Raises:
        ConfigError: the model is none of those here, or the tensors are not those of its arguments.
    """

    direction: ClassVar[str] = "Megatron-LM to native"

    def __init__(self, checkpoint: MegatronCheckpoint, options: ConversionOptions, given: dict[str, Any]) -> None:
        super().__init__(checkpoint.path, options)
        self.checkpoint, self.given = checkpoint, given
        where = f"--load {checkpoint.path}"
        self.run, self.notes = run_of(checkpoint.args, given, checkpoint.vocabulary_rows(), where)
        self.notes += checkpoint.notes
        self._doubt(checkpoint.doubts)
        weights, self.fp32 = tensors_of(self.run)
        self.contents = checkpoint.contents(weights)
        self.dtype = options.dtype or self._one_dtype(weights, where)
        self.step = self._step(where)
        half = self.dtype != torch.float32
        self.shapes = dict(weights)
        if self.step is not None:
            self.shapes |= optimizer.wanted_keys(weights, self.fp32, half=half)
        require_complete(self.contents, self.shapes, where, with_optimizer=self.step is not None)
        flags = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}, torch.float32: {}}
        self.run = replace(self.run, **flags[self.dtype])
        if self.step is not None:
            self.run = replace(self.run, **optimizer.settings_of(checkpoint.args))
        self.iteration = 0 if self.step is None else checkpoint.progress.iteration
        self.inputs = dict(checkpoint.files)
        self._warn_of_rounded()
        self.units = self._planned()
        kept = "weights alone" if self.step is None else f"with the optimizer after {self.step} updates"
        self.notes.append("random states are left out: a run makes new ones from --seed")
        self.summary = f"{model_words(self.run, f'--ckpt-format {checkpoint.form}', dtype_name(self.dtype))}; {kept}"

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "given": {name: str(value) for name, value in self.given.items()}}

    def _doubt(self, doubts: Iterable[str]) -> None:
        """Refuse a checkpoint whose files may be those of other ranks, or warn where that is allowed."""
        for words in doubts:
            if not self.options.allow_suspicious_weights:
                raise ConfigError(
                    f"--load {self.source}: {words}; bring the files back from their source, or take them as they are "
                    f"with {ALLOW}"
                )
            self.warnings.append(f"WARNING: {words}: taken as it is")

    def wanted_inputs(self) -> dict[str, FileEntry] | None:
        """Return what the certificate beside the step lists, where a conversion wrote the step."""
        if not (self.source.parent / CERTIFICATE).is_file():
            return None
        listed = folder.read_json(self.source.parent / CERTIFICATE)["output"]["files"]
        prefix = f"{self.source.name}/"
        return {name.removeprefix(prefix): entry for name, entry in listed.items() if name.startswith(prefix)}

    def _one_dtype(self, weights: dict[str, Shape], where: str) -> torch.dtype:
        found: dict[str, list[str]] = {}
        for key in weights:
            for part in () if key in self.fp32 else self.contents.parts.get(key, ()):
                found.setdefault(part.dtype, []).append(part.name)
        dtypes = [getattr(torch, name) for name in found]
        if len(dtypes) != 1 or dtypes[0] not in _WEIGHTS:
            examples = "; ".join(f"{name}: {len(names)}, {names[0]}" for name, names in found.items()) or "none"
            raise ConfigError(
                f"{where}: its weights are of {len(found)} dtypes, and a model here has one ({examples}); give the one "
                "that all are to have: --dtype {bf16,fp16,fp32}"
            )
        return dtypes[0]

    def _step(self, where: str) -> int | None:
        """Return the number of the optimizer's updates, and None where it is left out or not there."""
        keys = [key for key in self.contents.parts if key.startswith("optimizer.")]
        if not (keys or self.contents.unmapped):
            self.notes.append("it has no optimizer: weights alone are converted")
            return None
        if self.options.no_optim:
            self.notes.append("--no-optim: the optimizer's state is left out")
            return None
        if self.options.dtype is not None:
            raise ConfigError(
                "--dtype: the optimizer's main weights belong to weights of their own dtype; add --no-optim"
            )
        half = None if self.dtype == torch.float32 else dtype_name(self.dtype)
        optimizer.require_mapped(self.contents, self.checkpoint, half)
        if half is None:  # the main weights of an fp32 run are its weights, which it may store once more
            for key in [key for key in keys if key.startswith(f"{optimizer.STATE}{optimizer.MAIN}.")]:
                weight = key.removeprefix(f"{optimizer.STATE}{optimizer.MAIN}.")
                self.contents.copies.setdefault(weight, []).extend(self.contents.parts.pop(key))
        return optimizer.step_of(self.checkpoint.common, where)

    def _warn_of_rounded(self) -> None:
        for key in sorted(self.fp32):
            for part in self.contents.parts[key]:
                if part.dtype != "float32":
                    self.warnings.append(
                        f"PRECISION WARNING: {part.name} is {part.dtype} in {self.source}, must be float32: it was "
                        "rounded before it was saved; converted as it is and kept in float32 from now on"
                    )

    def _dtype_of(self, key: str) -> torch.dtype:
        return torch.float32 if key in self.fp32 or key.startswith(optimizer.STATE) else self.dtype

    def _planned(self) -> list[OutputFile]:
        files: dict[Any, list[Block]] = {}
        for key, shape in self.shapes.items():
            files.setdefault(file_order(key), []).extend(self._blocks(key, shape))
        units = []
        for number, order in enumerate(sorted(files)):
            size = sum(self._bytes(block) for block in files[order])
            name = f"{folder.step_folder(Path(), self.iteration)}/{data_name(number)}"
            units.append(OutputFile(name, size, tuple(files[order])))
        return units

    def _blocks(self, key: str, shape: Shape) -> list[Block]:
        """Return the blocks of a tensor: one per expert, other tensors whole."""
        zeros, parts, copies = (0,) * len(shape), self.contents.parts[key], self.contents.copies.get(key, [])
        if not key.endswith(_EXPERTS):
            return [(key, zeros, shape, tuple(parts), tuple(copies))]
        of_expert: dict[int, list[Part]] = {}
        again: dict[int, list[Part]] = {}
        for chosen, found in ((of_expert, parts), (again, copies)):
            for part in found:
                chosen.setdefault(part.start[0], []).append(part)
        return [
            (key, (expert, *zeros[1:]), (1, *shape[1:]), tuple(of_expert[expert]), tuple(again.get(expert, ())))
            for expert in range(shape[0])
        ]

    def _bytes(self, block: Block) -> int:
        return math.prod(block[2]) * self._dtype_of(block[0]).itemsize + PER_PART

    def write(self, unit: OutputFile, output: Path, advance: Advance) -> Record:
        rows: list[Row] = []
        with new_file(output / unit.name) as file:
            data = DataFile(file)
            for key, start, shape, parts, copies in unit.content:
                block, entries = self._filled(key, start, shape, parts)
                self._require_equal(block, start, copies, key)
                data.add(key, start, block)
                before = " and ".join(sorted({part.dtype for part in parts}))
                native = certificate.native_entry(key, start, block)
                rows.append(
                    {"native": native, "cast": certificate.cast_name(before, native["dtype"]), "megatron": entries}
                )
                advance(self._bytes((key, start, shape, parts, copies)))
        return {"entry": file.entry(), "parts": data.parts, "rows": rows}

    def _filled(self, key: str, start: Shape, shape: Shape, parts: tuple[Part, ...]) -> tuple[Tensor, list[Row]]:
        """Return a block with the elements of its parts, and these parts' entries of a row."""
        dtype = self._dtype_of(key)
        block, entries = torch.empty(shape, dtype=dtype), []
        for part in parts:
            values = part.read()
            certificate.require_finite(values, part.name, str(self.source))
            shown = {"start": list(part.start), "shape": list(part.shape), "dtype": part.dtype}
            entry: Row = {"name": part.name, **shown, "sha256": sha256(values)}
            values = certificate.cast(values, dtype, part.name)
            if dtype_name(dtype) != part.dtype:
                entry["sha256_as_written"] = sha256(values)
            block[_within(part, start)] = values
            entries.append(entry)
        return block, entries

    def _require_equal(self, block: Tensor, start: Shape, copies: tuple[Part, ...], key: str) -> None:
        for part in copies:
            if not torch.equal(certificate.cast(part.read(), block.dtype, part.name), block[_within(part, start)]):
                raise ConfigError(
                    f"{self.source}: {part.name} differs from the same numbers of {key} in another place, which are "
                    "one tensor of the model"
                )

    def coverage(self, records: list[Record]) -> None:
        rows = [row for record in records for row in record["rows"]]
        certificate.require_coverage(rows, (), self.shapes, str(self.source))
        used = [
            (row["native"]["key"], entry["name"], tuple(entry["start"])) for row in rows for entry in row["megatron"]
        ]
        wanted = {(key, part.name, part.start) for key in self.shapes for part in self.contents.parts[key]}
        wrong = [f"{name} ({key})" for key, name, _ in sorted(wanted.symmetric_difference(used))]
        if wrong or len(used) != len(wanted):
            raise ConfigError(listing(f"{self.source}: not every tensor is converted exactly once:", wrong))
        self._doubt(_repeated(rows))

    def finish(self, output: Path, records: list[Record]) -> dict[str, FileEntry]:
        step = folder.step_folder(output, self.iteration)
        files = {Path(record["name"]).name: record["entry"] for record in records}
        parts = [StoredPart(*part) for record in records for part in record["parts"]]
        tensors = {key: (dtype_name(self._dtype_of(key)), shape) for key, shape in self.shapes.items()}
        files[".metadata"] = write_index(step, tensors, parts, ())
        common = {} if self.step is None else {"optimizer": optimizer.plain_values(self.run, self.step)}
        files |= write_common(step, common)
        files[folder.CONFIG] = write_json(step / folder.CONFIG, self._config())
        files[folder.STATE] = write_json(step / folder.STATE, self._state())
        return seal(output, self.iteration, files)

    def _config(self) -> dict[str, Any]:
        """Return what is known of the run that wrote the checkpoint: its model, and what its optimizer's groups say."""
        known = {name for name, field in all_fields().items() if field.section in ("model", "moe")}
        known |= {"bf16", "fp16", *(() if self.step is None else optimizer.settings_of(self.checkpoint.args))}
        return {name: value for name, value in flatten(self.run).items() if name in known}

    def _state(self) -> dict[str, Any]:
        progress = self.checkpoint.progress
        about = {"form": self.checkpoint.form, "iteration": progress.iteration, "samples": progress.consumed_samples}
        state = {**native_state(self.run, self.warnings), origin.MEGATRON: about}
        if self.step is None:
            return state
        moved = {"iteration": self.iteration, "consumed_samples": progress.consumed_samples, "has_optimizer": True}
        return {**state, **moved, "scheduler": optimizer.scheduler(self.run, self.iteration)}

    def check(self, output: Path, records: list[Record], advance: Advance) -> None:
        step = folder.step_folder(output, self.iteration)
        back = StepReader(step)
        if {key: tensor.shape for key, tensor in back.index.tensors.items()} != self.shapes:
            raise ConfigError(f"{step}: its tensors are not those of the model; nothing was published")
        for row in (row for record in records for row in record["rows"]):
            native = row["native"]
            key, start = native["key"], tuple(native["start"])
            block = back.read(key, start, tuple(native["shape"]))
            certificate.require_same(sha256(block), native["sha256"], key, "it reads otherwise than it was written")
            for entry in row["megatron"]:
                box = tuple(slice(a - b, a - b + n) for a, b, n in zip(entry["start"], start, entry["shape"]))
                certificate.require_same(sha256(block[box]), expected(entry), entry["name"], f"{key} gives another one")
            advance(block.nbytes)

    def facts(self, records: list[Record]) -> dict[str, Any]:
        dropped = dict(self.contents.dropped)
        if self.step is None:
            left = [key for key in self.contents.parts if key.startswith("optimizer.")]
            dropped |= {part.name: "the optimizer's" for key in left for part in self.contents.parts[key]}
            dropped |= dict.fromkeys(self.contents.unmapped, "the optimizer's")
        read = {"args", "iteration", "checkpoint_version", "content_metadata", "optimizer"}
        for name in sorted(map(str, self.checkpoint.common.keys() - read)):
            if not re.fullmatch(r"model\d*", name):
                dropped[name] = "plain values of a run: its successor has its own, by its flags"
        return {
            "format": self.checkpoint.form,
            "dtype": dtype_name(self.dtype),
            "optimizer_updates": self.step,
            "iteration": self.checkpoint.progress.iteration,
            "dropped": dict(sorted(dropped.items())),
            "copies": sorted(part.name for parts in self.contents.copies.values() for part in parts),
            "settings_given": sorted(self.given),
        }


def _repeated(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the matrices of weights that are there twice, as copies of a rank's file or of an expert are."""
    first: dict[str, str] = {}
    for row in rows:
        for entry in row["megatron"]:
            if len(entry["shape"]) < 2 or row["native"]["key"].startswith("optimizer."):
                continue
            place = f"{entry['name']} (from {entry['start']} on)"
            if (other := first.setdefault(entry["sha256"], place)) != place:
                yield f"{place} equals {other}, as if a rank's file or an expert were there twice"


def _within(part: Part, start: Shape) -> tuple[slice, ...]:
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(part.start, start, part.shape))
