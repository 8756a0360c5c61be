"""Launching a Triton kernel: not for an empty grid, and not for tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Seen = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Takes a kernel, its arguments and its constants."""

_seeing: list[Seen] = []


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on a grid. Nothing runs where the grid is empty, or on the meta device, where a run is planned."""
    if not min(grid):
        return
    for see in _seeing:
        see(kernel, arguments, constants)
    if not any(isinstance(one, Tensor) and one.is_meta for one in arguments):
        kernel[tuple(grid)](*arguments, **constants)


@contextmanager
def launches_seen_by(see: Seen) -> Iterator[None]:
    """Call `see` before each launch of the block, also of one that has no memory to work on."""
    _seeing.append(see)
    try:
        yield
    finally:
        _seeing.remove(see)
