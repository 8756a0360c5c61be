"""Copies of modules that hold process groups."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup

_DEPTH = 4
"""Groups lie in a module, in a record of groups, in a dispatcher's record, or in that of the one it wraps."""


class CopiesShareGroups:
    """Mixin for `torch.nn.Module`: a deepcopy has tensors of its own, and the process groups and the engine's
    configuration of the original.

    A process group is a handle on connections, of which there cannot be a second. The configuration holds functions of
    the optimizer, which would be copied with it, whole.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for module in self.modules():  # type: ignore[attr-defined]
            for value in vars(module).values():
                for group in _groups(value, _DEPTH):
                    memo[id(group)] = group
            config = vars(module).get("config")
            if config is not None:
                memo[id(config)] = config
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def _groups(value: Any, depth: int) -> Iterator[ProcessGroup]:
    if isinstance(value, ProcessGroup):
        yield value
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, torch.Tensor)):
        for inner in vars(value).values():
            yield from _groups(inner, depth - 1)
