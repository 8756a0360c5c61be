"""Copying and pickling of modules that refer to process groups."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup

_DEPTH = 4
"""A group is an attribute of a module, of a record of groups, of a dispatcher's record, or of the one it wraps."""


class CopiesShareGroups:
    """A mixin for `torch.nn.Module` whose deepcopies share the original's process groups and engine configuration.

    A deepcopy has its own tensors. A process group is a handle on connections, which cannot be copied. The
    configuration refers to functions of the optimizer, so that a copy of it would copy the optimizer. Pickling, and
    with it `torch.save` of the whole module, is refused for the same reason.
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
        """Refuse to pickle a module that refers to a process group.

        Raises:
            TypeError: the module refers to one; the message says what to save instead.
        """
        for module in self.modules():  # type: ignore[attr-defined]
            if next(_groups_of(module), None) is not None:
                raise TypeError(
                    f"a whole {type(self).__name__} cannot be pickled, nor saved with torch.save: it refers to process "
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
