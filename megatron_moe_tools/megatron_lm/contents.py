"""What a checkpoint of Megatron-LM holds, in terms of our tensors: the parts that each is made of."""

from __future__ import annotations

import argparse
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_moe.checkpoint import index
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.schema import Run
from megatron_moe.hf.families import DEEPSEEK
from megatron_moe.hf.mapping import mapping
from megatron_moe.hf.transforms import Shape

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


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
        """Add a part of one of our tensors."""
        self.parts.setdefault(key, []).append(part)


@dataclass(frozen=True)
class Progress:
    """How far the run had come that wrote a checkpoint: steps, and sequences consumed."""

    iteration: int
    consumed_samples: int


class MegatronCheckpoint(ABC):
    """A checkpoint of Megatron-LM: one step, opened, its small values read.

    Attributes:
        path: the step's folder.
        args: the arguments of the command that wrote it, by name: those that are plain values.
        common: the other plain values, by name.
        files: its files by name.
        notes: what a user should know.
        doubts: why its files may not be those of the ranks that they are named after.
    """

    form = ""
    args: dict[str, Any]
    common: dict[str, Any]
    files: dict[str, Path]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.doubts: list[str] = []

    @abstractmethod
    def vocabulary_rows(self) -> int:
        """Return the rows of the embedding table, those of padding too."""

    @abstractmethod
    def contents(self, shapes: Mapping[str, Shape]) -> Contents:
        """Return what is stored, by our keys.

        Args:
            shapes: the shapes of the model's tensors, by our keys.
        """

    @property
    def progress(self) -> Progress:
        """How far the run had come."""
        numbers = [self.common.get("iteration"), self.args.get("consumed_train_samples")]
        iteration, samples = (number if type(number) is int and number >= 0 else 0 for number in numbers)
        return Progress(iteration, samples)


def require_complete(
    contents: Contents, shapes: Mapping[str, Shape], where: str, *, with_optimizer: bool
) -> dict[str, Shape]:
    """Check that a checkpoint has exactly the tensors of a model, each element once.

    Returns:
        The shapes of what is converted, by key: the model's, then the optimizer's.

    Raises:
        ConfigError: tensors are missing, unknown or of another shape; the message lists them.
    """
    wanted = dict(shapes)
    if with_optimizer:
        wanted |= {key: shapes[weight_of(key)] for key in sorted(contents.parts) if weight_of(key) in shapes}
    wrong = [*contents.wrong]
    wrong += [f"missing: {key}" for key in wanted if key not in contents.parts]
    wrong += [
        f"the model of its arguments has no {key} ({contents.parts[key][0].name})"
        for key in sorted(contents.parts.keys() - wanted.keys())
        if with_optimizer or not key.startswith("optimizer.")
    ]
    for key in wanted.keys() & contents.parts.keys():
        wrong += _defects(key, contents.parts[key], wanted[key])
    if wrong:
        raise ConfigError(
            listing(f"{where}: its tensors are not those of the model that its arguments describe:", wrong)
        )
    return wanted


def weight_of(key: str) -> str:
    """Return the weight that a key of the optimizer belongs to, or the key itself."""
    return key.split(".", 3)[3] if key.startswith("optimizer.state.") else key


def _defects(key: str, parts: list[Part], shape: Shape) -> list[str]:
    boxes = [index.TensorPart(part.start, part.shape, index.StoredBytes("", 0, 0)) for part in parts]
    outside = [
        f"{part.name}: {list(part.shape)} from {list(part.start)} on is not within {key}, which has {list(shape)}"
        for part in parts
        if len(part.shape) != len(shape) or any(a + n > b for a, n, b in zip(part.start, part.shape, shape))
    ]
    if outside:
        return outside
    filled = sum(math.prod(part.shape) for part in parts)
    if filled != math.prod(shape) or index.overlap(boxes):
        return [f"{key}: {filled} of {math.prod(shape)} elements in {len(parts)} parts, each to be there once"]
    return []


def tensors_of(run: Run) -> tuple[dict[str, Shape], frozenset[str]]:
    """Return the shapes of a model's tensors by our keys, and the keys of those that are fp32 whatever its dtype."""
    table = mapping(run, DEEPSEEK)
    return table.shapes, frozenset(piece.key for piece in table.pieces if piece.fp32)


def arguments(common: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments among the plain values of a checkpoint.

    Raises:
        ConfigError: there are none.
    """
    args = common.get("args")
    if not isinstance(args, argparse.Namespace):
        raise ConfigError(
            f"--load {path}: has no `args`, by which Megatron-LM says what the model is: it is not one of its "
            "checkpoints"
        )
    return dict(vars(args))
