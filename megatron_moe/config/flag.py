"""The declaration of a setting: a dataclass field with what the command line and a resumed run need to know of it."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import Any


def flag(default: Any, help: str, *, free: bool = False, reported: bool = True, **shown: Any) -> Any:
    """Declare a field with its default and what others need to know of it; lists are tuples.

    Args:
        free: see `free`. reported: whether a resumed run reports that it differs from the checkpoint's.
        shown: choices; spelling, the flag's name where Megatron-LM's differs from the field's; unit.
    """
    absent = {"choices": None, "spelling": None, "unit": ""}
    assert shown.keys() <= absent.keys(), shown
    return field(default=default, metadata={"help": help, "free": free, "reported": reported, **absent, **shown})


free = partial(flag, free=True)
"""Declare a field in which runs that share a checkpoint may differ: no weight's shape or meaning depends on it."""
mute = partial(flag, reported=False)
"""Declare a field whose change a resumed run does not report: it names a folder, a file or a mode."""
