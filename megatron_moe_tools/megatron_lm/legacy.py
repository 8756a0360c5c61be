"""Reads Megatron-LM's older format, `--ckpt-format torch`: a file of torch.save per tensor, pipeline and expert rank.

    iter_0000010/mp_rank_TP[_PP][_EP]/model_optim_rng.pt

Each file has its rank's part of the model, with layers and experts counted from 0 in each file. A tensor of a rank is a
box of the model's, or two: gate and up of a gated layer are split each by itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_moe.checkpoint.index import UntrustedError
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.tensors import dtype_name
from megatron_moe.hf.transforms import Shape
from megatron_moe_tools.megatron_lm import names
from megatron_moe_tools.megatron_lm.checkpoint import (
    EMBEDDING,
    OUTPUT,
    Contents,
    MegatronCheckpoint,
    Part,
    arguments,
    read_archive,
    require_intact,
)

_FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?", re.ASCII)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_GATED = ("mlp.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight")
_BY_COLUMNS = ("linear_proj.weight", "mlp.linear_fc2.weight", "mlp.shared_experts.linear_fc2.weight")
_NORM = "decoder.final_layernorm.weight"
_EXPERTS = ".mlp.experts.weight"

Box = tuple[Shape, Shape, Tensor]
"""Start and shape in our tensor, and the view of the rank's tensor that has the elements."""


@dataclass(frozen=True)
class RankFile:
    """One rank's file: its place in the layout, and its chunks of the model by virtual stage."""

    name: str
    tensor: int
    pipeline: int
    expert: int
    chunks: tuple[Mapping[str, Any], ...]


class LegacyTorch(MegatronCheckpoint):
    """A step in the format torch.

    Raises:
        ConfigError: a file is missing, damaged or harmful, or of a release whose layout is another.
    """

    form = "torch"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        folders = {entry.name: found for entry in sorted(path.iterdir()) if (found := _FOLDER.fullmatch(entry.name))}
        self.files = {f"{name}/{_FILE}": path / name / _FILE for name in folders}
        content = {name: self._read(file) for name, file in zip(folders, self.files)}
        self.common = next(iter(content.values()))
        self.args = arguments(self.common, path)
        version = self.common.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < 3:
            raise ConfigError(
                f"--load {path}: checkpoint_version {version}: packs queries, keys and values in another order; 3.0 is "
                "read: load it with Megatron-LM and save it again"
            )
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        self._tp, self._pp, self._ep = (self._size(name) for name in sizes)
        self._ranks = [self._rank(name, found, content[name]) for name, found in folders.items()]
        self._require_all_ranks()
        self._compare_places(content)
        self._optimizers = [f"{name}: optimizer" for name, one in content.items() if "optimizer" in one]

    def _read(self, file: str) -> dict[str, Any]:
        try:
            content = read_archive(self.files[file])
            with open(self.files[file], "rb") as archive:
                require_intact(archive, file)
        except (UntrustedError, OSError) as error:
            raise ConfigError(f"--load {self.path}: refused: {file}: {error}") from None
        if not isinstance(content, dict) or not any(re.fullmatch(r"model\d*", str(key)) for key in content):
            raise ConfigError(f"--load {self.path}: {file} has no `model`: it is no checkpoint of Megatron-LM's")
        return content

    def _size(self, name: str) -> int:
        size = self.args.get(name, 1)
        if type(size) is not int or size < 1:
            raise ConfigError(f"--load {self.path}: its arguments say --{name.replace('_', '-')} {size!r}")
        return size

    def _rank(self, name: str, found: re.Match[str], content: dict[str, Any]) -> RankFile:
        numbers = [int(number) for number in found.groups() if number is not None]
        tensor, rest = numbers[0], numbers[1:]
        pipeline = rest.pop(0) if rest and self._pp > 1 else 0
        expert = rest.pop(0) if rest and self._ep > 1 else 0
        if rest or tensor >= self._tp or pipeline >= self._pp or expert >= self._ep:
            raise ConfigError(
                f"--load {self.path}: {name} does not belong to TP {self._tp}, PP {self._pp} and EP {self._ep} of its "
                "arguments"
            )
        keys = sorted((key for key in content if re.fullmatch(r"model\d*", str(key))), key=lambda key: (len(key), key))
        return RankFile(name, tensor, pipeline, expert, tuple(content[key] for key in keys))

    def _require_all_ranks(self) -> None:
        there = {(one.tensor, one.pipeline) for one in self._ranks}
        missing = [f"TP rank {t}, PP rank {p}" for t in range(self._tp) for p in range(self._pp) if (t, p) not in there]
        experts = {(one.expert, one.pipeline) for one in self._ranks}
        missing += [
            f"EP rank {e}, PP rank {p}" for e in range(self._ep) for p in range(self._pp) if (e, p) not in experts
        ]
        if missing:
            raise ConfigError(
                f"--load {self.path}: files are missing: of {'; '.join(missing[:5])} (mp_rank_TP_PP_EP; its arguments "
                f"say TP {self._tp}, PP {self._pp}, EP {self._ep})"
            )

    def _compare_places(self, content: Mapping[str, dict[str, Any]]) -> None:
        """Compare the places that files are named after with what they hold of the processes that wrote them.

        Raises:
            ConfigError: they are of several steps, or the first or last pipeline stage is another.
        """
        steps = {one.get("iteration"): name for name, one in content.items()}
        if len(steps) > 1:
            shown = ", ".join(f"{name} of iteration {step}" for step, name in list(steps.items())[:2])
            raise ConfigError(f"--load {self.path}: its files are of several steps: {shown}; bring them all from one")
        for one in self._ranks:
            first, last = one.chunks[0], one.chunks[-1]
            if (one.pipeline == 0 and EMBEDDING not in first) or (one.pipeline == self._pp - 1 and _NORM not in last):
                raise ConfigError(
                    f"--load {self.path}: {one.name} is not of PP rank {one.pipeline}: it has no "
                    f"{EMBEDDING if one.pipeline == 0 else _NORM}; files were exchanged: bring them back"
                )
        if len(self._ranks) == 1:
            return
        args = {name: vars(one.get("args", argparse.Namespace())) for name, one in content.items()}
        ranks = {name: one.get("rank") for name, one in args.items()}
        if len(set(ranks.values())) == 1 or not all(type(rank) is int for rank in ranks.values()):
            self.notes.append(
                "its files do not say which rank wrote each: the names mp_rank_* alone put them in order, and exchanged"
                " files would not be noticed"
            )
            return
        for one in self._ranks:
            if (place := self._place(args[one.name])) != (one.tensor, one.pipeline, one.expert):
                self.doubts.append(
                    f"{one.name}: was written by rank {ranks[one.name]}, which is TP rank {place[0]}, PP rank "
                    f"{place[1]}, EP rank {place[2]}: files were exchanged or copied"
                )

    def _place(self, args: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return TP, PP and EP rank of the process that wrote a file, by Megatron-LM's order of ranks."""
        rank, context = args["rank"], args.get("context_parallel_size") or 1
        per_stage = max((args.get("world_size") or 1) // self._pp, 1)
        pipeline = rank // per_stage
        if args.get("use_tp_pp_dp_mapping"):
            pipeline = rank // (self._tp * context) % self._pp
        expert_tensor = args.get("expert_tensor_parallel_size") or self._tp
        return rank % self._tp, pipeline, rank // expert_tensor % self._ep

    def vocabulary_rows(self) -> int:
        for one in self._ranks:
            table = one.chunks[0].get(EMBEDDING)
            if isinstance(table, Tensor) and table.dim() == 2:
                return int(table.shape[0]) * self._tp
        raise ConfigError(f"--load {self.path}: has no tensor {EMBEDDING}: it is not a GPT model of megatron-core")

    def contents(self, shapes: Mapping[str, Shape]) -> Contents:
        result = Contents(unmapped=list(self._optimizers))
        offsets = self._first_layers()
        seen: set[tuple[str, Shape]] = set()
        for one in sorted(self._ranks, key=lambda one: (one.pipeline, one.expert, one.tensor)):
            for number, chunk in enumerate(one.chunks):
                for name, value in chunk.items():
                    stored = str(name)
                    where = f"{one.name}: {stored}"
                    if (reason := names.dropped(stored)) is not None:
                        result.dropped[where] = reason
                    elif isinstance(value, Tensor):
                        if layer := _LAYER.match(stored):
                            in_model = offsets[one.pipeline, number] + int(layer[1])
                            stored = f"decoder.layers.{in_model}.{stored[layer.end() :]}"
                        self._add(result, seen, one, stored, where, value, shapes)
                    elif value is not None:
                        result.wrong.append(f"{where}: {type(value).__name__}, of which nothing is known here")
        return result

    def _first_layers(self) -> dict[tuple[int, int], int]:
        """Return the number of the first layer of each (pipeline rank, chunk): virtual stages go around the ranks."""
        of_rank = {one.pipeline: one for one in self._ranks}
        chunks = {len(one.chunks) for one in self._ranks}
        if len(chunks) != 1:
            raise ConfigError(f"--load {self.path}: its files have different numbers of virtual stages")
        first, result = 0, {}
        for chunk in range(chunks.pop()):
            for rank in range(self._pp):
                result[rank, chunk] = first
                found = (_LAYER.match(name) for name in of_rank[rank].chunks[chunk])
                first += len({match[1] for match in found if match})
        return result

    def _add(
        self,
        result: Contents,
        seen: set[tuple[str, Shape]],
        one: RankFile,
        stored: str,
        where: str,
        value: Tensor,
        shapes: Mapping[str, Shape],
    ) -> None:
        key, shape = names.ours(stored).key, shapes.get(names.ours(stored).key)
        if shape is None and key == OUTPUT and shapes:  # the last stage's copy of a tied table
            key, shape = EMBEDDING, shapes[EMBEDDING]
        if shape is None:
            result.add(key, _part(where, (0,) * value.dim(), tuple(value.shape), value))
            return
        boxes = self._expert_boxes if _EXPERTS in f".{key}" else self._boxes
        try:
            for start, extent, view in boxes(one, stored, value, shape):
                into = result.copies if (key, start) in seen else result.parts
                into.setdefault(key, []).append(_part(where, start, extent, view))
                seen.add((key, start))
        except _Misfit:
            result.wrong.append(f"{where}: {list(value.shape)} does not fit: {key} of the model has {list(shape)}")

    def _boxes(self, one: RankFile, stored: str, value: Tensor, shape: Shape) -> Iterator[Box]:
        """Yield the boxes of a tensor that is no routed expert's."""
        start, extent = [0] * len(shape), list(shape)
        if tuple(value.shape) == shape:
            yield tuple(start), shape, value
            return
        key = names.ours(stored).key
        axis = 1 if key.endswith(_BY_COLUMNS) and len(shape) == 2 else 0
        extent[axis] //= self._tp
        if list(value.shape) != extent or extent[axis] * self._tp != shape[axis]:
            raise _Misfit
        if not key.endswith(_GATED):
            start[axis] = one.tensor * extent[axis]
            yield tuple(start), tuple(extent), value
            return
        rows = extent[0] // 2
        for half in range(2):
            view = value[half * rows : (half + 1) * rows]
            yield (half * shape[0] // 2 + one.tensor * rows, 0), tuple(view.shape), view

    def _expert_boxes(self, one: RankFile, stored: str, value: Tensor, shape: Shape) -> Iterator[Box]:
        """Yield the boxes of the experts in a tensor: one of them, or all of a rank in one matrix."""
        up = len(shape) == 4  # [E, 2, F, H], and [E, H, F] for down
        experts, width, hidden = shape[0] // self._ep, shape[2], shape[1]
        if up:
            width, hidden = 2 * shape[2], shape[3]
        number = names.ours(stored).expert
        matrices = {number or 0: value}
        if number is None:  # matrices that multiply rows from the right: [e, in, out]
            inputs = hidden if up else value.shape[0] // experts
            if inputs == 0 or value.numel() % (experts * inputs):
                raise _Misfit
            matrices = dict(enumerate(value.reshape(experts, inputs, -1).transpose(1, 2)))
        part = value.numel() // (len(matrices) * hidden)  # rows of [2 F / ETP, H], columns of [H, F / ETP]
        split = width // part if part else 0
        if value.numel() != len(matrices) * hidden * part or part * split != width or split not in (1, self._tp):
            raise _Misfit
        rank = one.tensor if split > 1 else 0
        for local, matrix in matrices.items():
            expert = one.expert * experts + local
            if not up:
                yield (expert, 0, rank * part), (1, hidden, part), matrix
                continue
            rows = part // 2
            for half in range(2):
                view = matrix[half * rows : (half + 1) * rows]
                yield (expert, half, rank * rows, 0), (1, 1, rows, hidden), view


class _Misfit(Exception):
    """A tensor does not have the shape that its rank should have."""


def _part(where: str, start: Shape, extent: Shape, view: Tensor) -> Part:
    return Part(where, start, extent, dtype_name(view.dtype), lambda: view.detach().reshape(extent))
