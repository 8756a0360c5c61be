"""A model's tensors, written block by block; none is left out, none written twice, and what is not finite is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.conversion.transforms import Shape


@dataclass(frozen=True)
class Block:
    """A box of one of the model's tensors.

    key: of the tensor. start: the box's first element in it. values: in the dtype they were stored in.
    name: of what they were made of, as messages show it.
    """

    key: str
    start: Shape
    values: Tensor
    name: str


@torch.no_grad()
def fill(held: Mapping[str, Tensor], blocks: Iterable[Block], where: str, rows: Mapping[str, int]) -> None:
    """Copy blocks into a model's tensors, which have NaN in them until they are written.

    Args:
        held: the tensors by key; their dtype stays, and values are widened or rounded to it.
        blocks: boxes that do not overlap.
        where: the checkpoint, as messages name it.
        rows: of the tables that are padded here, and maybe elsewhere by other counts, how many rows are tokens. What
            stands behind them is padding there, left out, and zero here.

    Raises:
        ConfigError: a tensor is left out or written in part, a block is of no tensor or outside of it, or holds a
            number that is not finite.
    """
    written = dict.fromkeys(held, 0)
    for key, tensor in held.items():
        tensor.fill_(torch.nan)
        if key in rows:
            tensor[rows[key] :] = 0
            written[key] += tensor[rows[key] :].numel()
    for block in blocks:
        if block.key not in held:
            raise ConfigError(f"{where}: {block.name}: the model has no tensor {block.key}")
        tensor, values = held[block.key], block.values
        if block.key in rows:
            values = values[: max(rows[block.key] - block.start[0], 0)]
        ends = [first + count for first, count in zip(block.start, values.shape)]
        if len(ends) != tensor.dim() or any(end > count for end, count in zip(ends, tensor.shape) if values.numel()):
            raise ConfigError(
                f"{where}: {block.name}: {list(values.shape)} at {list(block.start)} does not lie in {block.key}, "
                f"which has the shape {list(tensor.shape)}"
            )
        if not torch.isfinite(values).all():
            raise ConfigError(f"{where}: {block.name} holds NaN or infinity: it is damaged, or was saved after a fault")
        if values.numel():
            tensor[tuple(slice(first, end) for first, end in zip(block.start, ends))].copy_(values)
        written[block.key] += values.numel()
    wrong = [key for key, count in written.items() if count != held[key].numel()]
    if wrong:
        shown = ", ".join(f"{key} ({written[key]} of {held[key].numel()} elements)" for key in wrong[:10])
        raise ConfigError(f"{where}: {len(wrong)} tensors of the model are not written once: {shown}")
