"""Holding a run to its contract: every tensor's dtype, at every boundary where one could change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from megatron_moe.precision.contract import PrecisionError

_SHOWN = 10


class HeldTensor(NamedTuple):
    """A tensor that the contract speaks of: its name, what it is ("weight", "Adam moment"), its dtype, and the one it
    must have."""

    name: str
    what: str
    dtype: torch.dtype
    wanted: torch.dtype


class PrecisionGuard:
    """Checks tensors against the contract and remembers where everything was still right.

    So a violation is told with the stretch of the run in which it came about: between the last boundary at which the
    tensor was right (or first seen) and the one at which it was wrong.
    """

    def __init__(self) -> None:
        self._right_at: dict[tuple[str, str], str] = {}

    def check(self, boundary: str, tensors: Iterable[HeldTensor]) -> int:
        """Compare all `tensors`.

        Args:
            boundary: where the run stands, for messages ("wrapping", "iteration 200").

        Returns:
            How many tensors were checked.

        Raises:
            PrecisionError: naming each tensor that broke the contract (the first ten), what it is, its dtype and the
                right one, and the boundaries between which it changed.
        """
        broken, checked = [], 0
        for held in tensors:
            checked += 1
            if held.dtype == held.wanted:
                self._right_at[held.name, held.what] = boundary
            else:
                broken.append(self._told(held, boundary))
        if broken:
            rest = [f"and {len(broken) - _SHOWN} more"] if len(broken) > _SHOWN else []
            raise PrecisionError(f"precision contract broken at {boundary}: " + "; ".join([*broken[:_SHOWN], *rest]))
        return checked

    def _told(self, held: HeldTensor, boundary: str) -> str:
        right_at = self._right_at.get((held.name, held.what))
        since = f"changed between {right_at} and {boundary}" if right_at else f"so from the start, {boundary}"
        return f"{held.name} ({held.what}) is {held.dtype}, must be {held.wanted}: {since}"
