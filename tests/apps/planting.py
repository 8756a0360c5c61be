"""How conversion errors are planted: each helper breaks one place of the importing path until the test is over."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.hf import source
from megatron_moe.hf.mapping import Mapping, Piece
from megatron_moe.hf.tensors import TensorReader

PARITY, COVERAGE = "parity", "coverage"

EXPERTS = r"tokens go to other experts"
WEIGHTS = r"weights of the same experts differ"
LOGITS = r"logits differ by"
UNUSED, MISSING, SHAPE = r"unexpected: ", r"missing: ", r"shape \[.*\], its configuration says"

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Plant:
    """An error. caught: by what. reason: a regular expression that finds something in what was said."""

    name: str
    case: str
    breaks: Break
    reason: str
    caught: str = PARITY

    def __str__(self) -> str:
        return f"{self.name}, {self.case}".replace(" ", "-")


def renamed(rename: Callable[[str], str]) -> Break:
    """The table names other tensors of the folder; all of them once, so that coverage has nothing to say."""
    return _table(lambda piece: replace(piece, hf=tuple(rename(name) for name in piece.hf)))


def swapped(one: str, other: str, only: str = "") -> Break:
    """Two parts of names exchanged, in names that `only` finds something in."""

    def exchange(name: str) -> str:
        if not re.search(only, name):
            return name
        return re.sub(f"{re.escape(one)}|{re.escape(other)}", lambda m: other if m[0] == one else one, name)

    return renamed(exchange)


def experts(number: Callable[[int], int], only: str = "") -> Break:
    """Experts numbered otherwise."""

    def renumber(name: str) -> str:
        if not re.search(only, name):
            return name
        return re.sub(r"experts\.(\d+)\.", lambda m: f"experts.{number(int(m[1]))}.", name)

    return renamed(renumber)


def layers(order: dict[int, int], only: str = "") -> Break:
    """Layers numbered otherwise."""

    def renumber(name: str) -> str:
        if not re.search(only, name):
            return name
        return re.sub(r"layers\.(\d+)\.", lambda m: f"layers.{order.get(int(m[1]), int(m[1]))}.", name)

    return renamed(renumber)


def without(pattern: str) -> Break:
    """The table lacks pieces."""
    return _table(lambda piece: None if any(re.search(pattern, name) for name in piece.hf) else piece)


def _table(edit: Callable[[Piece], Piece | None]) -> Break:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = source.mapping

        def broken(*arguments: Any) -> Mapping:
            table = original(*arguments)
            edited = [edit(piece) for piece in table.pieces]
            return replace(table, pieces=tuple(piece for piece in edited if piece is not None))

        patch.setattr(source, "mapping", broken)

    return plant


def settings(**changes: Any) -> Break:
    """config.json translated otherwise."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = source.settings_of

        def broken(*arguments: Any) -> Any:
            told = original(*arguments)
            return replace(told, flat={**told.flat, **changes})

        patch.setattr(source, "settings_of", broken)

    return plant


def numbers(pattern: str, change: Callable[[Tensor], Tensor]) -> Break:
    """Tensors of the folder changed while they are read, whose names a pattern finds something in."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = TensorReader.read

        def broken(self: TensorReader, name: str, *rest: Any) -> Tensor:
            tensor = original(self, name, *rest)
            return change(tensor.clone()) if re.search(pattern, name) else tensor

        patch.setattr(TensorReader, "read", broken)

    return plant


def replaced(owner: Any, name: str, value: Any) -> Break:
    """Anything else: an attribute of a class or module."""
    return lambda patch: patch.setattr(owner, name, value)


def all_of(*breaks: Break) -> Break:
    """Several at once, that are one error."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for one in breaks:
            one(patch)

    return plant


# ---- changes of a tensor


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def rolled(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 0)


def element(at: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[at] = value
        return tensor

    return change


def in_rows(count: int, order: Callable[[int], list[int]]) -> Callable[[Tensor], Tensor]:
    """Rows of each run of `count` in another order."""

    def change(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, count))[:, order(count)].flatten(0, 1).contiguous()

    return change


def halves_interleaved(width: int) -> list[int]:
    """0, width / 2, 1, width / 2 + 1, ...: what a rotary layout by halves becomes when it is taken for one by pairs."""
    return torch.arange(width).view(2, -1).t().flatten().tolist()


def reversed_rows(width: int) -> list[int]:
    return list(range(width))[::-1]
