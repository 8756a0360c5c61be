"""How a setting is declared: one dataclass field with what the command line and a resumed run need to know of it."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import Any


def flag(default: Any, help: str, *, free: bool = False, reported: bool = True, **shown: Any) -> Any:
    """Declare a field with its default and what others need to know of it; lists are tuples.

    Args:
        free: see `free`. reported: whether a resumed run says that it differs from the checkpoint's.
        shown: choices; spelling, the flag's name where Megatron-LM's differs from the field's; unit.
    """
    absent = {"choices": None, "spelling": None, "unit": ""}
    assert shown.keys() <= absent.keys(), shown
    return field(default=default, metadata={"help": help, "free": free, "reported": reported, **absent, **shown})


free = partial(flag, free=True)
"""Runs that share a checkpoint may differ in it: it changes neither a weight's shape nor its meaning."""
mute = partial(flag, reported=False)
"""A resumed run does not say that it differs from the checkpoint's: it names a folder, a file or a mode."""
