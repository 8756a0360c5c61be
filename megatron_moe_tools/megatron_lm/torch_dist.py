"""Reads Megatron-LM's format torch_dist: tensors in parts, an index, and plain values in `common.pt` or in a part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_moe.checkpoint import index, pickles
from megatron_moe.checkpoint.index import StoredBytes, UntrustedError
from megatron_moe.checkpoint.step_reader import Section, StepReader
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.hashing import FileEntry
from megatron_moe_tools.megatron_lm import archives, names
from megatron_moe_tools.megatron_lm.contents import EMBEDDING, Contents, MegatronCheckpoint, Part, arguments

_COMMON_VALUE = "common_state/shard_0_1"
"""Where megatron-core 0.19 keeps the plain values that older releases write into `common.pt`."""
_EXPERTS = (".mlp.experts.weight1", ".mlp.experts.weight2")


class TorchDist(MegatronCheckpoint):
    """A step in the format torch_dist.

    Raises:
        ConfigError: it is damaged or harmful, or has no arguments.
    """

    form = "torch_dist"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        found = {file.name: file for file in sorted(path.iterdir()) if file.is_file()}
        self._intact: set[StoredBytes] = set()
        self.files = {name: file for name, file in found.items() if name in _SMALL or name.endswith(".distcp")}
        try:
            sizes = {name: FileEntry(bytes=file.stat().st_size, sha256="") for name, file in self.files.items()}
            self._index = index.read(path, sizes, listed_in=str(path), with_plans=True)
            self._reader = StepReader(path, self._index)
            self.common = self._values()
        except (UntrustedError, OSError) as error:
            raise ConfigError(f"--load {path}: refused: {error}") from None
        self.args = arguments(self.common, path)

    def _values(self) -> dict[str, Any]:
        if pickles.COMMON in self.files:
            content = archives.read_file(self.files[pickles.COMMON])
        elif (place := self._index.values.get(_COMMON_VALUE)) is not None:
            with open(self.path / place.file, "rb") as file:
                file.seek(place.offset)
                content = archives.read_bytes(file.read(place.length), f"{_COMMON_VALUE} in {place.file}")
            content = content[0] if isinstance(content, list) and len(content) == 1 else content
        else:
            raise UntrustedError(f"it has neither {pickles.COMMON} nor {_COMMON_VALUE}")
        if not isinstance(content, dict):
            raise UntrustedError("its plain values are no dictionary")
        return content

    def vocabulary_rows(self) -> int:
        if (table := self._index.tensors.get(EMBEDDING)) is None:
            raise ConfigError(f"--load {self.path}: has no tensor {EMBEDDING}: it is not a GPT model of megatron-core")
        return table.shape[0]

    def contents(self, shapes: Mapping[str, Shape]) -> Contents:
        result = Contents()
        for stored in (*self._index.tensors, *self._index.values):
            if (reason := names.dropped(stored)) is not None:
                result.dropped[stored] = reason
            elif stored.startswith("optimizer.") and names.ours(stored).state is None:
                result.unmapped.append(stored)
            elif stored in self._index.values:
                result.wrong.append(f"{stored}: a value that is no tensor, of which nothing is known here")
            else:
                self._add(result, stored, shapes)
        return result

    def _add(self, result: Contents, stored: str, shapes: Mapping[str, Shape]) -> None:
        name, tensor = names.ours(stored), self._index.tensors[stored]
        layers: list[int | None] = [*range(tensor.shape[0])] if name.stacked and tensor.shape else [None]
        for layer in layers:
            key = name.key if layer is None else name.key.replace("{}", str(layer))
            at: Shape = () if layer is None else (layer,)
            whole = shapes.get(key)
            box = tensor.shape[len(at) :]
            if whole is None:
                result.add(name.full_key.replace("{}", str(layer)), self._part(stored, at, (0,) * len(box), box, box))
                continue
            if name.state is not None and not _fits(name, box, whole):
                result.unmapped.append(stored)
                return
            if not _fits(name, box, whole):
                wanted = f"{key} of the model has {list(whole)}"
                result.wrong.append(f"{stored}: {list(box)} does not fit: {wanted}")
                continue
            full = key if name.state is None else f"optimizer.state.{name.state}.{key}"
            for within, start, shape in _boxes(name, box, whole):
                result.add(full, self._part(stored, (*at, *within), start, shape, box))

    def _require_intact(self, stored: str) -> None:
        """Check the checksums of a tensor's parts, once."""
        for part in self._index.tensors[stored].parts:
            if part.place in self._intact:
                continue
            try:
                with open(self.path / part.place.file, "rb") as file:
                    archives.require_intact(Section(file, part.place), f"{stored} in {part.place.file}")
            except (UntrustedError, OSError) as error:
                raise ConfigError(f"--load {self.path}: refused: {error}") from None
            self._intact.add(part.place)

    def _part(self, stored: str, at: Shape, start: Shape, shape: Shape, box: Shape) -> Part:
        """Return a part of ours that is a box of a stored tensor: one element of its first axes, which `at` numbers."""
        tensor = self._index.tensors[stored]
        first = (*at, *(0,) * (len(tensor.shape) - len(at)))
        extent = (*(1,) * len(at), *tensor.shape[len(at) :])

        def read() -> Tensor:
            self._require_intact(stored)
            return self._reader.read(stored, first, extent).reshape(shape)

        shown = f"{stored}[{', '.join(map(str, at))}]" if at else stored
        return Part(shown, start if start else (0,) * len(shape), shape, tensor.dtype, read)


_SMALL = (index.NAME, pickles.COMMON, "metadata.json")


def _fits(name: names.Name, box: Shape, whole: Shape) -> bool:
    """Return whether a stored tensor, without its axis of layers, has the elements that our tensor wants of it."""
    count = math.prod(whole)
    if name.expert is not None:
        count //= whole[0]
    if name.half is not None:
        count //= 2
    experts = name.key.endswith(_EXPERTS)
    plain = name.expert is None and name.half is None and not experts
    if plain:
        return box == whole
    same_first = name.expert is not None or name.half is not None or box[:1] == whole[:1]
    return math.prod(box) == count and box[-1:] == whole[-1:] and same_first


def _boxes(name: names.Name, box: Shape, whole: Shape) -> Iterator[tuple[Shape, Shape, Shape]]:
    """Yield where in the stored tensor, from where on in ours, and of which shape: experts one by one."""
    zeros = (0,) * (len(whole) - 1)
    if name.key.endswith(_EXPERTS):
        inner = whole[1:]
        if name.half is not None:
            yield (), (name.expert or 0, name.half, *zeros[1:]), (1, 1, *inner[1:])
        elif name.expert is not None:
            yield (), (name.expert, *zeros), (1, *inner)
        else:
            for expert in range(whole[0]):
                yield (expert,), (expert, *zeros), (1, *inner)
    elif name.half is not None:
        yield (), (name.half * whole[0] // 2, *zeros), (whole[0] // 2, *whole[1:])
    else:
        yield (), (0,) * len(whole), whole
