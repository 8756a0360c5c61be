"""The tool of every patch: an attribute that has another value for a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owners: Iterable[Any], **values: Any) -> Iterator[None]:
    """Give attributes of these objects other values for the block, and put the old ones back, also after an error.

    An attribute that an object has from its class is deleted from the object afterwards. An object that is named twice
    is changed once: chunks of a model share their configuration.
    """
    before = [(owner, {name: vars(owner)[name] for name in values if name in vars(owner)}) for owner in owners]
    try:
        for owner, _ in before:
            for name, value in values.items():
                setattr(owner, name, value)
        yield
    finally:
        for owner, earlier in before:
            for name in values:
                if name in earlier:
                    setattr(owner, name, earlier[name])
                elif name in vars(owner):
                    delattr(owner, name)
