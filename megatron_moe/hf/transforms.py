"""Transforms between the tensors of a Hugging Face folder and ours, each in both directions.

A transform moves elements without changing them, so that it can be undone bit for bit, whatever the dtype. It has the
shapes of both sides, so that a folder is checked against its own configuration before anything is written.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # names and shapes are known without torch, and checked before it is loaded
    from torch import Tensor

Shape = tuple[int, ...]


class Transform(ABC):
    """A transform between tensors of a Hugging Face folder and one block of ours.

    Attributes:
        hf_shapes: shapes of the tensors on Hugging Face's side, in order.
        native_shape: shape of the block on our side.
    """

    @property
    @abstractmethod
    def hf_shapes(self) -> tuple[Shape, ...]: ...

    @property
    @abstractmethod
    def native_shape(self) -> Shape: ...

    @abstractmethod
    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the block made of tensors of `hf_shapes`, in their dtype."""

    @abstractmethod
    def to_hf(self, block: Tensor) -> list[Tensor]:
        """Return the tensors made of a block of `native_shape`, in its dtype. They may be views of it."""

    @property
    def name(self) -> str:
        """Name of the transform in conversion certificates."""
        return type(self).__name__


@dataclass(frozen=True)
class Copy(Transform):
    """A transform for a tensor that is the same on both sides."""

    shape: Shape

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    @property
    def native_shape(self) -> Shape:
        return self.shape

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return [block]


@dataclass(frozen=True)
class GateThenUp(Transform):
    """A transform of gate [F, H] and up [F, H] <-> the gate's rows, then those of up: [2 F, H]."""

    width: int
    hidden: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.width, self.hidden),) * 2

    @property
    def native_shape(self) -> Shape:
        return (2 * self.width, self.hidden)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.cat(list(tensors))

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return list(block.split(self.width))


@dataclass(frozen=True)
class ExpertGateUp(Transform):
    """A transform of gate [F, H] and up [F, H] of an expert <-> its block [1, 2, F, H] of the layer's experts."""

    width: int
    hidden: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.width, self.hidden),) * 2

    @property
    def native_shape(self) -> Shape:
        return (1, 2, self.width, self.hidden)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.stack(list(tensors)).unsqueeze(0)

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return list(block[0].unbind(0))


@dataclass(frozen=True)
class ExpertDown(Transform):
    """A transform of down [H, F] of an expert <-> its block [1, H, F] of the layer's experts."""

    width: int
    hidden: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.hidden, self.width),)

    @property
    def native_shape(self) -> Shape:
        return (1, self.hidden, self.width)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unsqueeze(0)

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return [block[0]]


@dataclass(frozen=True)
class QueryKeyValue(Transform):
    """A transform of q [n d, ...], k [g d, ...] and v [g d, ...] <-> groups of n / g queries, a key and a value.

    heads: n. groups: g. head_size: d. width: that of the input (weights), or None (biases).
    """

    heads: int
    groups: int
    head_size: int
    width: int | None

    def _rows(self, heads: int) -> Shape:
        return (heads * self.head_size,) if self.width is None else (heads * self.head_size, self.width)

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self._rows(self.heads), self._rows(self.groups), self._rows(self.groups))

    @property
    def native_shape(self) -> Shape:
        return self._rows(self.heads + 2 * self.groups)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in tensors], dim=1).flatten(0, 1)

    def to_hf(self, block: Tensor) -> list[Tensor]:
        query_rows = self.heads // self.groups * self.head_size
        sizes = (query_rows, self.head_size, self.head_size)
        parts = block.unflatten(0, (self.groups, -1)).split(sizes, dim=1)
        return [part.flatten(0, 1) for part in parts]


@dataclass(frozen=True)
class Vocabulary(Transform):
    """A transform of a table [V, H] <-> the table with rows of zeros after it, which no token selects: [padded, H]."""

    size: int
    padded: int
    hidden: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.size, self.hidden),)

    @property
    def native_shape(self) -> Shape:
        return (self.padded, self.hidden)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        (table,) = tensors
        if self.padded == self.size:
            return table
        import torch

        return torch.cat([table, table.new_zeros(self.padded - self.size, self.hidden)])

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return [block[: self.size]]


def elements(shape: Shape) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(shape)
