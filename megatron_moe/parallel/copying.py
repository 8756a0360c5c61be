"""Copies of modules that hold process groups, and what is said where one cannot be made."""

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
    the optimizer, which would be copied with it, whole. Pickling, and with it `torch.save` of the whole module, is
    refused for the same reason.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for module in self.modules():  # type: ignore[attr-defined]
            for group in _groups_of(module):
                memo[id(group)] = group
            config = vars(module).get("config")
            if config is not None:
                memo[id(config)] = config
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __copy__(self) -> Any:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled where a process group would have to go along.

        Raises:
            TypeError: saying what to save instead.
        """
        for module in self.modules():  # type: ignore[attr-defined]
            if next(_groups_of(module), None) is not None:
                raise TypeError(
                    f"a whole {type(self).__name__} cannot be pickled, nor saved with torch.save: it holds process "
                    "groups, which exist in this process only. Save module.state_dict() and load it into a module that "
                    "is built anew, or write a checkpoint that any layout can read (sharded_state_dict(), or --save)"
                )
        return super().__reduce_ex__(protocol)


def _groups_of(module: torch.nn.Module) -> Iterator[ProcessGroup]:
    for value in vars(module).values():
        yield from _groups(value, _DEPTH)


def _groups(value: Any, depth: int) -> Iterator[ProcessGroup]:
    if isinstance(value, ProcessGroup):
        yield value
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, torch.Tensor)):
        for inner in vars(value).values():
            yield from _groups(inner, depth - 1)
