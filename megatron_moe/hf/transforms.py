"""Transforms between the tensors of a Hugging Face folder and ours, each in both directions.

A transform moves elements without changing them, so that it can be undone bit for bit, whatever the dtype. It has the
shapes of both sides, so that a folder is checked against its own configuration before anything is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

    hf_shapes: tuple[Shape, ...]
    native_shape: Shape

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


class Copy(Transform):
    """A transform for a tensor that is the same on both sides."""

    def __init__(self, shape: Shape) -> None:
        self.hf_shapes, self.native_shape = (shape,), shape

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return [block]


class Reshape(Transform):
    """A transform of a tensor of one shape <-> its elements, in their order, in another."""

    def __init__(self, hf_shape: Shape, native_shape: Shape) -> None:
        self.hf_shapes, self.native_shape = (hf_shape,), native_shape

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].reshape(self.native_shape)

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return [block.reshape(self.hf_shapes[0])]


class GateThenUp(Transform):
    """A transform of gate [F, H] and up [F, H] <-> the gate's rows, then those of up: [2 F, H]."""

    def __init__(self, width: int, hidden: int) -> None:
        self.hf_shapes, self.native_shape = ((width, hidden),) * 2, (2 * width, hidden)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.cat(list(tensors))

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return list(block.chunk(2))


class ExpertGateUp(Transform):
    """A transform of gate [F, H] and up [F, H] of an expert <-> its block [1, 2, F, H] of the layer's experts."""

    def __init__(self, width: int, hidden: int) -> None:
        self.hf_shapes, self.native_shape = ((width, hidden),) * 2, (1, 2, width, hidden)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.stack(list(tensors)).unsqueeze(0)

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return list(block[0].unbind(0))


class ExpertDown(Transform):
    """A transform of down [H, F] of an expert <-> its block [1, H, F] of the layer's experts."""

    def __init__(self, width: int, hidden: int) -> None:
        self.hf_shapes, self.native_shape = ((hidden, width),), (1, hidden, width)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unsqueeze(0)

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return [block[0]]


class ExpertsGateUp(Transform):
    """A transform of gate and up of all experts [E, ..., 2 F], channel by channel in turn, <-> [E, 2, F, ...].

    Args:
        experts: E. width: F.
        rest: the input's width (weights), or nothing (biases).
    """

    def __init__(self, experts: int, width: int, *rest: int) -> None:
        self.hf_shapes, self.native_shape = ((experts, *rest, 2 * width),), (experts, 2, width, *rest)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(-1, (-1, 2)).movedim(-1, 1).movedim(-1, 2).contiguous()

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return [block.movedim(2, -1).movedim(1, -1).flatten(-2)]


class ExpertsDown(Transform):
    """A transform of down of all experts [E, F, H] <-> [E, H, F]."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        self.hf_shapes, self.native_shape = ((experts, width, hidden),), (experts, hidden, width)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(1, 2).contiguous()

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return [block.transpose(1, 2).contiguous()]


class QueryKeyValue(Transform):
    """A transform of q [n d, ...], k [g d, ...] and v [g d, ...] <-> groups of n / g queries, a key and a value.

    Args:
        heads: n. groups: g. head_size: d.
        rest: the input's width (weights), or nothing (biases).
    """

    def __init__(self, heads: int, groups: int, head_size: int, *rest: int) -> None:
        queries, keys = (heads * head_size, *rest), (groups * head_size, *rest)
        self.hf_shapes, self.native_shape = (queries, keys, keys), ((heads + 2 * groups) * head_size, *rest)
        self.groups, self.rows = groups, (heads // groups * head_size, head_size, head_size)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in tensors], dim=1).flatten(0, 1)

    def to_hf(self, block: Tensor) -> list[Tensor]:
        parts = block.unflatten(0, (self.groups, -1)).split(self.rows, dim=1)
        return [part.flatten(0, 1) for part in parts]


class FusedQueryKeyValue(QueryKeyValue):
    """A transform of one tensor of all queries, then all keys and all values <-> what `QueryKeyValue` makes of three.

    Args:
        heads, groups, head_size, rest: see `QueryKeyValue`.
    """

    def __init__(self, heads: int, groups: int, head_size: int, *rest: int) -> None:
        super().__init__(heads, groups, head_size, *rest)
        self.parts = [shape[0] for shape in self.hf_shapes]
        self.hf_shapes = (self.native_shape,)

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        return super().to_native(tensors[0].split(self.parts))

    def to_hf(self, block: Tensor) -> list[Tensor]:
        import torch

        return [torch.cat(super().to_hf(block))]


class Vocabulary(Transform):
    """A transform of a table [V, H] <-> the table with rows of zeros after it, which no token selects: [padded, H]."""

    def __init__(self, size: int, padded: int, hidden: int) -> None:
        self.hf_shapes, self.native_shape = ((size, hidden),), (padded, hidden)
        self.size = size

    def to_native(self, tensors: Sequence[Tensor]) -> Tensor:
        (table,) = tensors
        if table.shape == self.native_shape:
            return table
        import torch

        return torch.cat([table, table.new_zeros(self.native_shape[0] - self.size, table.shape[1])])

    def to_hf(self, block: Tensor) -> list[Tensor]:
        return [block[: self.size]]
