"""Launching a Triton kernel: not for an empty grid, and not for tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on a grid. Nothing runs where the grid is empty, or on the meta device, where a run is planned."""
    if min(grid) and not any(isinstance(one, Tensor) and one.is_meta for one in arguments):
        kernel[tuple(grid)](*arguments, **constants)
