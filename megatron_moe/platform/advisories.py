"""Which known defects of the engine a run's flags meet, told at its start and by `--list-advisories`. No torch.

The defects themselves stand in `router_defects.py` and `engine_defects.py`. Whether an engine has one goes by its
version; tests run the engine's own code, and fail where that is not so in a version that this project is tested with.
"""

from __future__ import annotations

import importlib.metadata
import re

from megatron_moe.config.schema import Run
from megatron_moe.platform.defect import NEWEST, OLDEST, Defect
from megatron_moe.platform.engine_defects import FOUND_DEFECTS, RUNNING_DEFECTS
from megatron_moe.platform.router_defects import ROUTER_DEFECTS

DEFECTS: tuple[Defect, ...] = (*ROUTER_DEFECTS, *RUNNING_DEFECTS, *FOUND_DEFECTS)

TESTED = (OLDEST, NEWEST)
"""Versions of megatron-core that the tests are run on."""


def engine_version() -> tuple[int, ...]:
    """megatron-core's version, for example (0, 16, 1); read from its metadata, without importing it."""
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("megatron-core"))[:3])


def applying(run: Run, world_size: int, version: tuple[int, ...], *, cuda: bool | None = None) -> list[Defect]:
    """The defects that are in this engine and that these flags meet, in the order of the table.

    Args:
        cuda: whether there is a CUDA device; with None, defects of a machine without one count as met.
    """
    return [
        defect
        for defect in DEFECTS
        if defect.present(version)
        and defect.meets(run, world_size)
        and not (cuda and defect.without_cuda_only)
        and defect.treatment != "not used"
    ]


def start_lines(run: Run, world_size: int, version: tuple[int, ...], *, cuda: bool) -> list[str]:
    """What a person reads at the start of a run: whether this engine was tested, and a line per defect that is met."""
    found = applying(run, world_size, version, cuda=cuda)
    return [*untested(version), *(f"engine defect {d.id}: {d.title}; {d.treatment}: {d.how}" for d in found)]


def untested(version: tuple[int, ...]) -> list[str]:
    """One line where the engine is not a version that the tests are run on, none otherwise."""
    if version in TESTED:
        return []
    names = " and ".join(dotted(tested) for tested in TESTED)
    return [
        f"megatron-core {dotted(version)} was not tested with this project, {names} were; which defects it has is "
        "taken from the releases they were fixed in"
    ]


def dotted(version: tuple[int, ...]) -> str:
    """(0, 16, 1) as 0.16.1."""
    return ".".join(map(str, version))


def text(run: Run, world_size: int, version: tuple[int, ...]) -> str:
    """The whole table for `--list-advisories`: those that apply first, each with what is done and where."""
    met = applying(run, world_size, version)
    rest = [defect for defect in DEFECTS if defect not in met]
    lines = [f"megatron-core {dotted(version)}, {len(met)} of {len(DEFECTS)} known defects meet these flags", ""]
    lines[1:1] = untested(version)
    for defect in met:
        lines += [*_entry(defect), ""]
    lines += ["not met by these flags, not in this engine, or in a part of it that is not used:", ""]
    for defect in rest:
        why = "not in this engine" if not defect.present(version) else _unmet(defect)
        lines += [*_entry(defect), f"    here: {why}", ""]
    return "\n".join(lines[:-1])


def _entry(defect: Defect) -> list[str]:
    where = ", ".join(dict.fromkeys(file for file, _ in defect.where))
    return [
        f"{defect.id}  {defect.title}",
        f"    megatron-core: {defect.versions()}; {defect.source}",
        f"    {defect.treatment}: {defect.how}" + (f" ({where})" if where else ""),
    ]


def _unmet(defect: Defect) -> str:
    return "that part of the engine is not used" if defect.treatment == "not used" else "these flags do not meet it"
