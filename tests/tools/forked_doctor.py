"""The doctor's ranks without a fresh interpreter for each of them, on the package or on a copy of it.

A rank that is forked with the engine loaded takes the package's modules from the copy, all but those of KEPT: they have
adapted the engine while it was imported, which happens once in a process.
"""

import sys
from pathlib import Path
from typing import Any

from megatron_moe.config import setting
from megatron_moe_tools.launch.local_ranks import RankFailure
from tests.helpers.gloo_pool import CaseFailed, GlooPool
from tests.helpers.ranks import RankParent

PACKAGE = "megatron_moe"
KEPT = ("config", "platform")
"""Subpackages that are not taken from a copy: the one that adapts the engine, and the one that it imports."""


def take_from(folder: str) -> None:
    """Import the package's modules from its copy in `folder` from now on."""
    kept = tuple(f"{PACKAGE}.{room}" for room in KEPT)
    for name in list(sys.modules):
        if name.startswith((f"{PACKAGE}.", f"{PACKAGE}_tools.")) and not f"{name}.".startswith(
            tuple(f"{one}." for one in kept)
        ):
            del sys.modules[name]
    for known in vars(setting).values():
        if isinstance(known, setting.Registry):  # which is kept, and filled anew by the copy's modules
            known._entries = dict.fromkeys(known._entries)
    for package in (PACKAGE, f"{PACKAGE}_tools"):
        if package in sys.modules:
            sys.modules[package].__path__ = [str(Path(folder) / package)]


def measured_into(argument: dict[str, Any], package: str | None) -> str:
    """What the doctor's own ranks do with a request."""
    from megatron_moe.training import step
    from megatron_moe_tools.doctor import measure

    assert package is None or all(Path(module.__file__).is_relative_to(package) for module in (measure, step))
    return measure.measure_into(argument)


class ForkedRanks:
    """Stands in for the doctor's `LocalRanks`: its ranks are forked, and run the copy of the package in `package`."""

    def __init__(self, parent: RankParent, seconds: float, folder: Path, package: Path | None = None) -> None:
        self._pool = GlooPool(parent, seconds, package=package)
        self._package = None if package is None else str(package)
        self.folder = folder

    def __exit__(self, *_: Any) -> None:
        self._pool.close()

    def call(self, argument: dict[str, Any], ranks: int) -> list[str]:
        """Return the path of every rank's record."""
        try:
            return self._pool.run(ranks, measured_into, argument=argument, package=self._package)
        except CaseFailed as failure:
            raise RankFailure(str(failure)) from failure
