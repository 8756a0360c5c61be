"""Checkpoints of Megatron-LM: what they hold in terms of our tensors, and the readers of torch_dist and torch.

torch reads tensors and plain values under restriction. Megatron-LM's files hold more: `args` is a Namespace with
members of the engine's enumerations, and random states are arrays of numpy's. The classes that such a file names are
listed before it is read. Each of a known package is read as a record that runs nothing, and is imported nowhere; a file
that names anything else is refused.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint import index, step_reader
from megatron_moe.checkpoint.index import StoredBytes, UntrustedError
from megatron_moe.checkpoint.step_reader import Section, StepReader
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.family import DEEPSEEK
from megatron_moe.hf.mapping import mapping
from megatron_moe.hf.tensors import dtype_name
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.hashing import FileEntry
from megatron_moe_tools.megatron_lm import dialect

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_COMMON_VALUE = "common_state/shard_0_1"
"""Where megatron-core 0.19 keeps the plain values that older releases write into `common.pt`."""
_EXPERTS = (".mlp.experts.weight1", ".mlp.experts.weight2")
_SMALL = (index.NAME, step_reader.COMMON, "metadata.json")
_NAMESPACE = "argparse.Namespace"
_PACKAGES = frozenset(
    "megatron transformer_engine modelopt torch numpy argparse collections enum pathlib signal datetime functools "
    "_io _codecs".split()
)
"""Packages whose classes and functions are read as records."""
_PLAIN = frozenset(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "slice", "complex"))


@dataclass(frozen=True)
class Part:
    """A box of one of our tensors that a checkpoint of Megatron-LM stores in one place.

    name: the stored tensor, or the box of it, as certificates name it. start, shape: the box in our tensor. dtype: as
    stored. read: returns the elements as a tensor of `shape`, which may be a view.
    """

    name: str
    start: Shape
    shape: Shape
    dtype: str
    read: Callable[[], Tensor]


@dataclass
class Contents:
    """The tensors of a checkpoint by our keys, those of the optimizer too.

    parts: our key -> its parts. dropped: stored name -> why it is left out. copies: our key -> further parts that have
    to equal what `parts` has, because several processes store them. wrong: errors for the user, a line each. unmapped:
    stored names of the optimizer's state that is not stored by weights.
    """

    parts: dict[str, list[Part]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    copies: dict[str, list[Part]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unmapped: list[str] = field(default_factory=list)

    def add(self, key: str, part: Part) -> None:
        """Add a part of one of our tensors, or a copy of one that is there."""
        parts = self.parts.setdefault(key, [])
        if any(other.start == part.start for other in parts):
            parts = self.copies.setdefault(key, [])
        parts.append(part)


class MegatronCheckpoint(ABC):
    """A checkpoint of Megatron-LM: one step, opened, its small values read.

    args: the arguments of the command that wrote it, by name: those that are plain values. common: the other plain
    values. vocabulary_rows: of the embedding table, those of padding too; None without it. iteration, consumed_samples:
    how far the run had come. files: by name. notes: what a user should know. doubts: why its files may not be those of
    the ranks that they are named after.
    """

    form = ""
    args: dict[str, Any]
    common: dict[str, Any]
    files: dict[str, Path]
    vocabulary_rows: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.doubts: list[str] = []

    @abstractmethod
    def contents(self, shapes: Mapping[str, Shape]) -> Contents:
        """Return what is stored by our keys, for a model of tensors of these shapes."""

    def _read_settings(self) -> None:
        """Take what describes the model and the run from `common`."""
        args = self.common.get("args")
        if not isinstance(args, argparse.Namespace):
            raise ConfigError(f"--load {self.path}: has no `args`, and so is no checkpoint of Megatron-LM's")
        self.args = dict(vars(args))
        counts = (self.common.get("iteration"), self.args.get("consumed_train_samples"))
        self.iteration, self.consumed_samples = (n if type(n) is int and n >= 0 else 0 for n in counts)


def tensors_of(run: Run) -> tuple[dict[str, Shape], frozenset[str]]:
    """Return the shapes of a model's tensors by our keys, and the keys of those that are fp32 whatever its dtype."""
    table = mapping(run, DEEPSEEK)
    return table.shapes, frozenset(piece.key for piece in table.pieces if piece.fp32)


# ---- Files of torch.save, read without running any of them.


class Record:
    """What a file says of an object of a class that is not imported: what it was made of, and its restored state."""

    def __new__(cls, *arguments: Any) -> Record:
        """Make a record of an object, whatever its class would have done."""
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.arguments}"


def read_archive(source: Path | io.BytesIO, name: str) -> Any:
    """Return what a file of torch.save holds, mapped if it is a path. Raises UntrustedError: it is harmful."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception as error:  # whatever an archive made for it can raise
        raise UntrustedError(f"{name} is damaged, or no file of torch.save: {step_reader.words(error)}") from None
    unknown = sorted(one for one in named if one.split(".")[0] not in _PACKAGES and one not in _PLAIN)
    if unknown:
        raise UntrustedError(f"{name} refers to {', '.join(unknown[:3])}, which has no place in a checkpoint")
    known: list[Any] = [(argparse.Namespace, _NAMESPACE)]
    known += [(type(one.rpartition(".")[2], (Record,), {}), one) for one in named if one != _NAMESPACE]
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(source, map_location="cpu", mmap=isinstance(source, Path), weights_only=True)
    except Exception as error:  # whatever a pickle or an archive made for it can raise
        raise UntrustedError(f"{name} is damaged or harmful: {step_reader.words(error)}") from None


def require_intact(file: Any, name: str) -> None:
    """Check the checksums of an open archive of torch.save. Raises UntrustedError: it is damaged, or no archive."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    # zipfile's errors for a changed header, by which a record seems encrypted or compressed in an unknown way.
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise UntrustedError(f"{name} is damaged: {str(error)[:100]}") from None
    if damaged is not None:
        raise UntrustedError(f"{name} is damaged: {damaged} does not have the checksum (CRC-32) it was written with")


# ---- The format torch_dist: tensors in parts, an index, and plain values in `common.pt` or in a part.


class TorchDist(MegatronCheckpoint):
    """A step in the format torch_dist. Raises ConfigError: it is damaged or harmful, or has no arguments."""

    form = "torch_dist"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._intact: set[StoredBytes] = set()
        self.files = {}
        for file in sorted(path.iterdir()):
            if file.is_file() and (file.name in _SMALL or file.name.endswith(".distcp")):
                self.files[file.name] = file
        try:
            sizes = {name: FileEntry(bytes=file.stat().st_size, sha256="") for name, file in self.files.items()}
            self._index = index.read(path, sizes, listed_in=str(path), with_plans=True)
            self._reader = StepReader(path, self._index)
            if step_reader.COMMON in self.files:
                content = read_archive(self.files[step_reader.COMMON], step_reader.COMMON)
            elif (place := self._index.values.get(_COMMON_VALUE)) is not None:
                with open(path / place.file, "rb") as opened:
                    opened.seek(place.offset)
                    data = io.BytesIO(opened.read(place.length))
                content = read_archive(data, f"{_COMMON_VALUE} in {place.file}")
                if isinstance(content, list) and len(content) == 1:
                    content = content[0]
            else:
                raise UntrustedError(f"it has neither {step_reader.COMMON} nor {_COMMON_VALUE}")
            if not isinstance(content, dict):
                raise UntrustedError("its plain values are no dictionary")
        except (UntrustedError, OSError) as error:
            raise ConfigError(f"--load {path}: refused: {error}") from None
        self.common = content
        table = self._index.tensors.get(EMBEDDING)
        if table is not None:
            self.vocabulary_rows = table.shape[0]
        self._read_settings()

    def contents(self, shapes: Mapping[str, Shape]) -> Contents:
        result = Contents()
        for stored in (*self._index.tensors, *self._index.values):
            if (reason := dialect.dropped(stored)) is not None:
                result.dropped[stored] = reason
            elif stored.startswith("optimizer.") and dialect.ours(stored).state is None:
                result.unmapped.append(stored)
            elif stored in self._index.values:
                result.wrong.append(f"{stored}: a value that is no tensor, of which nothing is known here")
            else:
                self._add(result, stored, shapes)
        return result

    def _add(self, result: Contents, stored: str, shapes: Mapping[str, Shape]) -> None:
        name, tensor = dialect.ours(stored), self._index.tensors[stored]
        places: list[Shape] = [()]
        if name.stacked and tensor.shape:
            places = list(zip(range(tensor.shape[0])))
        for at in places:
            key = name.key.replace("{}", str(at[0])) if at else name.key
            full, box, whole = replace(name, key=key).full_key, tensor.shape[len(at) :], shapes.get(key)
            boxes = [((), (0,) * len(box), box)] if whole is None else _boxes(name, box, whole)
            if boxes is None and name.state is not None:
                result.unmapped.append(stored)
                return
            if boxes is None:
                result.wrong.append(f"{stored}: {list(box)} does not fit: {key} of the model has {list(whole or ())}")
                continue
            for within, start, shape in boxes:
                result.add(full, self._part(stored, (*at, *within), start, shape))

    def _part(self, stored: str, at: Shape, start: Shape, shape: Shape) -> Part:
        """Return a part of ours that is a box of a stored tensor: one element of its first axes, which `at` numbers."""
        tensor = self._index.tensors[stored]
        first = (*at, *(0,) * (len(tensor.shape) - len(at)))
        extent = (*(1,) * len(at), *tensor.shape[len(at) :])

        def read() -> Tensor:
            for part in tensor.parts:
                if part.place in self._intact:  # its checksums were checked
                    continue
                try:
                    with open(self.path / part.place.file, "rb") as file:
                        require_intact(Section(file, part.place), f"{stored} in {part.place.file}")
                except (UntrustedError, OSError) as error:
                    raise ConfigError(f"--load {self.path}: refused: {error}") from None
                self._intact.add(part.place)
            return self._reader.read(stored, first, extent).reshape(shape)

        shown = stored
        if at:
            shown += f"[{', '.join(map(str, at))}]"
        return Part(shown, start, shape, tensor.dtype, read)


def _boxes(name: dialect.Name, box: Shape, whole: Shape) -> list[tuple[Shape, Shape, Shape]] | None:
    """Return where in the stored tensor, from where on in ours, and of which shape: experts one by one.

    None where the stored tensor, without its axis of layers, does not have the elements that ours wants of it.
    """
    zeros, inner, half = (0,) * (len(whole) - 1), whole[1:], name.half or 0
    if not name.key.endswith(_EXPERTS) and name.half is None:
        return [((), (0,) * len(whole), whole)] if box == whole else None
    if not name.key.endswith(_EXPERTS):
        found: list[tuple[Shape, Shape, Shape]] = [((), (half * whole[0] // 2, *zeros), (whole[0] // 2, *inner))]
    elif name.half is not None:
        found = [((), (name.expert or 0, half, *zeros[1:]), (1, 1, *inner[1:]))]
    elif name.expert is not None:
        found = [((), (name.expert, *zeros), (1, *inner))]
    elif box[:1] == whole[:1]:
        found = [((expert,), (expert, *zeros), (1, *inner)) for expert in range(whole[0])]
    else:
        return None
    count = sum(math.prod(shape) for _, _, shape in found)
    if math.prod(box) != count or box[-1:] != whole[-1:]:
        return None
    return found


# ---- The older format torch: a file of torch.save per tensor, pipeline and expert rank.
#
#     iter_0000010/mp_rank_TP[_PP][_EP]/model_optim_rng.pt
#
# Each file has its rank's part of the model, with layers and experts counted from 0 in each file. A tensor of a rank is
# a box of the model's, or two: gate and up of a gated layer are split each by itself.

_FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?", re.ASCII)
_MODEL = re.compile(r"model\d*")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_GATED = ("mlp.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight")
_BY_COLUMNS = ("linear_proj.weight", "mlp.linear_fc2.weight", "mlp.shared_experts.linear_fc2.weight")
_NORM = "decoder.final_layernorm.weight"
_EXPERT_WEIGHTS = ".mlp.experts.weight"

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
    """A step in the format torch. Raises ConfigError: a file is missing, damaged, harmful, or of another release."""

    form = "torch"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        folders, content, self.files = {}, {}, {}
        for entry in sorted(path.iterdir()):
            if found := _FOLDER.fullmatch(entry.name):
                folders[entry.name] = found
                self.files[f"{entry.name}/{_FILE}"] = entry / _FILE
        for name, file in zip(folders, self.files):
            content[name] = self._read(file)
        self.common = next(iter(content.values()))
        self._read_settings()
        rows = 0
        for of_rank in content.values():
            for key in filter(_MODEL.fullmatch, map(str, of_rank)):
                table = of_rank[key].get(EMBEDDING)
                if not rows and isinstance(table, Tensor) and table.dim() == 2:
                    rows = int(table.shape[0])
        version = self.common.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < 3:
            raise ConfigError(
                f"--load {path}: checkpoint_version {version}: packs queries, keys and values in another order; 3.0 is "
                "read: load it with Megatron-LM and save it again"
            )
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        for name in sizes:
            if type(size := self.args.get(name, 1)) is not int or size < 1:
                raise ConfigError(f"--load {self.path}: its arguments say --{name.replace('_', '-')} {size!r}")
        self._tp, self._pp, self._ep = map(self.args.get, sizes, (1, 1, 1))
        self.vocabulary_rows = rows * self._tp or None
        self._ranks, there, missing = [], set[tuple[str, int, int]](), []
        self._optimizers: list[str] = []
        for name, found in folders.items():
            one = self._rank(name, found, content[name])
            self._ranks.append(one)
            if "optimizer" in content[name]:
                self._optimizers.append(f"{name}: optimizer")
            there |= {("TP", one.tensor, one.pipeline), ("EP", one.expert, one.pipeline)}
        for kind, ranks in (("TP", self._tp), ("EP", self._ep)):
            for place in itertools.product((kind,), range(ranks), range(self._pp)):
                if place not in there:
                    missing.append("{} rank {}, PP rank {}".format(*place))
        if missing:
            raise ConfigError(
                f"--load {self.path}: files are missing: of {'; '.join(missing[:5])} (mp_rank_TP_PP_EP; its arguments "
                f"say TP {self._tp}, PP {self._pp}, EP {self._ep})"
            )
        self._compare_places(content)

    def _read(self, file: str) -> dict[str, Any]:
        try:
            content = read_archive(self.files[file], _FILE)
            with open(self.files[file], "rb") as archive:
                require_intact(archive, file)
        except (UntrustedError, OSError) as error:
            raise ConfigError(f"--load {self.path}: refused: {file}: {error}") from None
        if not isinstance(content, dict) or not any(map(_MODEL.fullmatch, map(str, content))):
            raise ConfigError(f"--load {self.path}: {file} has no `model`: it is no checkpoint of Megatron-LM's")
        return content

    def _rank(self, name: str, found: re.Match[str], content: dict[str, Any]) -> RankFile:
        numbers = list(map(int, filter(None, found.groups())))
        tensor, rest, pipeline, expert = numbers[0], numbers[1:], 0, 0
        if rest and self._pp > 1:
            pipeline = rest.pop(0)
        if rest and self._ep > 1:
            expert = rest.pop(0)
        if rest or tensor >= self._tp or pipeline >= self._pp or expert >= self._ep:
            raise ConfigError(f"--load {self.path}: {name} is not of TP {self._tp}, PP {self._pp}, EP {self._ep}")
        keys = sorted(filter(_MODEL.fullmatch, map(str, content)), key=lambda key: (len(key), key))
        return RankFile(name, tensor, pipeline, expert, tuple(map(content.__getitem__, keys)))

    def _compare_places(self, content: Mapping[str, dict[str, Any]]) -> None:
        """Compare the names of files with what they hold of their ranks. Raises ConfigError: a stage is another."""
        steps = {one.get("iteration"): name for name, one in content.items()}
        if len(steps) > 1:
            shown = ", ".join(f"{name} of iteration {step}" for step, name in list(steps.items())[:2])
            raise ConfigError(f"--load {self.path}: its files are of several steps: {shown}; bring them all from one")
        for one in self._ranks:
            lacks_table = one.pipeline == 0 and EMBEDDING not in one.chunks[0]
            if lacks_table or (one.pipeline == self._pp - 1 and _NORM not in one.chunks[-1]):
                lost = EMBEDDING if lacks_table else _NORM
                raise ConfigError(
                    f"--load {self.path}: {one.name} is not of PP rank {one.pipeline}: it has no {lost}; files were "
                    "exchanged: bring them back"
                )
        if len(self._ranks) == 1:
            return
        args, ranks = {}, {}
        for name, file in content.items():
            args[name] = vars(file.get("args", argparse.Namespace()))
            ranks[name] = args[name].get("rank")
        if len(set(ranks.values())) == 1 or set(map(type, ranks.values())) != {int}:
            self.notes.append(
                "its files do not say which rank wrote each: the names mp_rank_* alone put them in order, and exchanged"
                " files would not be noticed"
            )
            return
        for one in self._ranks:
            # the process that wrote the file, by Megatron-LM's order of ranks
            wrote, rank, context = args[one.name], ranks[one.name], args[one.name].get("context_parallel_size") or 1
            pipeline = rank // max((wrote.get("world_size") or 1) // self._pp, 1)
            if wrote.get("use_tp_pp_dp_mapping"):
                pipeline = rank // (self._tp * context) % self._pp
            expert_tensor = wrote.get("expert_tensor_parallel_size") or self._tp
            place = (rank % self._tp, pipeline, rank // expert_tensor % self._ep)
            if place != (one.tensor, one.pipeline, one.expert):
                self.doubts.append(
                    f"{one.name}: was written by rank {ranks[one.name]}, which is TP rank {place[0]}, PP rank "
                    f"{place[1]}, EP rank {place[2]}: files were exchanged or copied"
                )

    def contents(self, shapes: Mapping[str, Shape]) -> Contents:
        result = Contents(unmapped=list(self._optimizers))
        # The number of the first layer of each (pipeline rank, chunk): virtual stages go around the ranks.
        of_rank, chunks = {}, set()
        for one in self._ranks:
            of_rank[one.pipeline] = one
            chunks.add(len(one.chunks))
        if len(chunks) != 1:
            raise ConfigError(f"--load {self.path}: its files have different numbers of virtual stages")
        first, offsets = 0, {}
        for number in range(chunks.pop()):
            for rank in range(self._pp):
                offsets[rank, number] = first
                layers = set()
                for name in of_rank[rank].chunks[number]:
                    if layer := _LAYER.match(name):
                        layers.add(layer[1])
                first += len(layers)
        for one in sorted(self._ranks, key=lambda one: (one.pipeline, one.expert, one.tensor)):
            for number, chunk in enumerate(one.chunks):
                for name, value in chunk.items():
                    stored = str(name)
                    where = f"{one.name}: {stored}"
                    if (reason := dialect.dropped(stored)) is not None:
                        result.dropped[where] = reason
                    elif isinstance(value, Tensor):
                        if layer := _LAYER.match(stored):
                            in_model = offsets[one.pipeline, number] + int(layer[1])
                            stored = f"decoder.layers.{in_model}.{stored[layer.end() :]}"
                        self._add(result, one, stored, where, value, shapes)
                    elif value is not None:
                        result.wrong.append(f"{where}: {type(value).__name__}, of which nothing is known here")
        return result

    def _add(
        self,
        result: Contents,
        one: RankFile,
        stored: str,
        where: str,
        value: Tensor,
        shapes: Mapping[str, Shape],
    ) -> None:
        key, shape = dialect.ours(stored).key, shapes.get(dialect.ours(stored).key)
        if shape is None and key == OUTPUT and shapes:  # the last stage's copy of a tied table
            key, shape = EMBEDDING, shapes[EMBEDDING]
        if shape is None:
            result.add(key, _part(where, (0,) * value.dim(), tuple(value.shape), value))
            return
        boxes = self._expert_boxes if _EXPERT_WEIGHTS in f".{key}" else self._boxes
        try:
            for start, extent, view in boxes(one, stored, value, shape):
                result.add(key, _part(where, start, extent, view))
        except _Misfit:
            result.wrong.append(f"{where}: {list(value.shape)} does not fit: {key} of the model has {list(shape)}")

    def _boxes(self, one: RankFile, stored: str, value: Tensor, shape: Shape) -> Iterator[Box]:
        """Yield the boxes of a tensor that is no routed expert's."""
        start, extent = [0] * len(shape), list(shape)
        if tuple(value.shape) == shape:
            yield tuple(start), shape, value
            return
        key = dialect.ours(stored).key
        axis = int(key.endswith(_BY_COLUMNS) and len(shape) == 2)
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
        number = dialect.ours(stored).expert
        matrices = {number or 0: value}
        if number is None:  # matrices that multiply rows from the right: [e, in, out]
            inputs = hidden if up else value.shape[0] // experts
            if inputs == 0 or value.numel() % (experts * inputs):
                raise _Misfit
            matrices = dict(enumerate(value.reshape(experts, inputs, -1).transpose(1, 2)))
        part = value.numel() // (len(matrices) * hidden)  # rows of [2 F / ETP, H], columns of [H, F / ETP]
        split = width // max(part, 1)
        if value.numel() != len(matrices) * hidden * part or part * split != width or split not in (1, self._tp):
            raise _Misfit
        rank = one.tensor * (split > 1)
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
