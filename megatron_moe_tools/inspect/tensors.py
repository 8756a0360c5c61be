"""Statistics and differences of a step's tensors, part by part: no model, no process group, memory for a few parts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_moe.checkpoint.index import Tensor
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe.config.errors import ConfigError
from megatron_moe_tools.inspect.steps import DamagedError

_BLOCK = 1 << 22
"""Number of elements that are widened to fp64 at a time."""


def opened(step: Path) -> StepReader:
    """Return a reader of a step's tensors.

    Raises:
        DamagedError: its index or its manifest is damaged or harmful.
    """
    try:
        return StepReader(step)
    except ConfigError as error:
        raise DamagedError(str(error)) from error


def keys(reader: StepReader, pattern: str | None) -> list[str]:
    """Return the sorted keys of a step that a regular expression matches anywhere; all without one."""
    return sorted(key for key in reader.index.tensors if pattern is None or re.search(pattern, key))


# stats.


@dataclass
class Stats:
    """The statistics of a tensor's finite numbers, computed in fp64, and the count of those that are not finite.

    squares is the sum of squared distances from the mean.
    """

    count: int = 0
    nans: int = 0
    infs: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    squares: float = field(default=0.0, repr=False)

    def add(self, values: torch.Tensor) -> None:
        """Add more numbers, of any shape and type."""
        for block in _blocks(values):
            wide = block.double()
            finite = wide[torch.isfinite(wide)]
            nans = int(torch.isnan(wide).sum())
            self.nans += nans
            self.infs += wide.numel() - finite.numel() - nans
            if finite.numel():
                self._merge(finite)

    def _merge(self, values: torch.Tensor) -> None:
        """Merge the moments of two samples, after Chan, Golub and LeVeque (1983)."""
        count, mean = values.numel(), float(values.mean())
        squares, total = float((values - mean).square().sum()), self.count + values.numel()
        distance = mean - self.mean
        self.squares += squares + distance * distance * self.count * count / total
        self.mean += distance * count / total
        self.count = total
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))

    def facts(self) -> dict[str, Any]:
        """Return the statistics as plain values; None where there is no finite number."""
        result: dict[str, Any] = dict.fromkeys(("min", "max", "mean", "std"))
        if self.count > 0:
            result |= {"min": self.low, "max": self.high, "mean": self.mean}
            result["std"] = math.sqrt(self.squares / self.count)
        return {**result, "nan": self.nans, "inf": self.infs}


def stats(reader: StepReader, key: str) -> dict[str, Any]:
    """Return shape, type and statistics of one tensor.

    Raises:
        ConfigError: a part of it is not what the index says.
    """
    tensor, result = reader.index.tensors[key], Stats()
    for part in tensor.parts:
        result.add(reader.read(key, part.start, part.shape))
    return {"key": key, "dtype": tensor.dtype, "shape": list(tensor.shape), **result.facts()}


# diff.


def diff(first: StepReader, second: StepReader, key: str) -> dict[str, Any]:
    """Return how a tensor differs between two steps, which may be split into other parts; `equal` means to the bit.

    Raises:
        ConfigError: a part is not what its index says.
    """
    one, two = first.index.tensors.get(key), second.index.tensors.get(key)
    result: dict[str, Any] = {"key": key, "equal": False}
    if one is None or two is None:
        return {**result, "only_in": str((second if one is None else first).step)}
    if one.dtype != two.dtype:
        result["dtypes"] = [one.dtype, two.dtype]
    if one.shape != two.shape:
        return {**result, "shapes": [list(one.shape), list(two.shape)]}
    different, largest = 0, 0.0
    for mine, others in _boxes(first, second, key, one, two):
        count, distance = _distance(mine, others)
        different, largest = different + count, max(largest, distance)
    result["equal"] = different == 0 and one.dtype == two.dtype
    return result if result["equal"] else {**result, "different": different, "max_difference": largest}


def _boxes(
    first: StepReader, second: StepReader, key: str, one: Tensor, two: Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same boxes of a tensor from two steps; together they cover all of it."""
    for part in one.parts:
        for other in two.parts:
            low = [max(a, b) for a, b in zip(part.start, other.start)]
            high = [min(a + m, b + n) for a, m, b, n in zip(part.start, part.shape, other.start, other.shape)]
            if all(a < b for a, b in zip(low, high)):
                start, shape = tuple(low), tuple(b - a for a, b in zip(low, high))
                yield first.read(key, start, shape), second.read(key, start, shape)


def _distance(one: torch.Tensor, two: torch.Tensor) -> tuple[int, float]:
    """Return how many elements differ, and by how much at most; infinite if one is NaN and the other is not."""
    count, largest = 0, 0.0
    for a, b in zip(_blocks(one), _blocks(two)):
        if a.dtype == b.dtype:
            unequal = (_bits(a) != _bits(b)).any(-1)
            count += int(unequal.sum())
            if not unequal.any():
                continue
        x, y = a.double(), b.double()
        apart = torch.where(torch.isnan(x) & torch.isnan(y) | (x == y), 0.0, (x - y).abs())
        count += int((apart != 0).sum()) if a.dtype != b.dtype else 0
        largest = max(largest, float(torch.nan_to_num(apart, nan=math.inf, posinf=math.inf).max()))
    return count, largest


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, [elements, bytes]."""
    return values.reshape(-1, 1).contiguous().view(torch.uint8)


def _blocks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = values.reshape(-1)
    return iter(flat.split(_BLOCK)) if flat.numel() else iter(())
