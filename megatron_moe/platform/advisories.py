"""Reports which known engine defects a run's flags meet, for `--list-advisories`. Loads no torch.

The defects are in `engine_defects.yaml`. Whether an engine has one is decided by its version; tests run the engine's
own code, and fail where that is wrong in a version that this project is tested with.
"""

from __future__ import annotations

import importlib.metadata
import re

from megatron_moe.config.schema import Run
from megatron_moe.platform.defects import NEWEST, OLDEST, Defect, Version, known_defects

TESTED = (OLDEST, NEWEST)
"""Versions of megatron-core that the tests are run on."""


def engine_version() -> Version:
    """Return megatron-core's version, for example (0, 16, 1), from its metadata, without importing it."""
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("megatron-core"))[:3])


def defects_met(run: Run, world_size: int, version: Version) -> list[Defect]:
    """Return the defects that are in this engine and that these flags meet, in the order of the file."""
    return [
        defect
        for defect in known_defects()
        if defect.is_present(version) and defect.is_met(run, world_size) and defect.treatment != "not used"
    ]


def start_lines(version: Version) -> list[str]:
    """Return what a run reports at its start: the engine, and whether it was tested. Its defects ask for nothing."""
    return [*untested(version), f"engine: megatron-core {dotted(version)}"]


def untested(version: Version) -> list[str]:
    """Return one line where the engine is not a version that the tests are run on, none otherwise."""
    if version in TESTED:
        return []
    names = " and ".join(dotted(tested) for tested in TESTED)
    return [
        f"megatron-core {dotted(version)} was not tested with this project, {names} were; which defects it has is "
        "taken from the releases they were fixed in"
    ]


def dotted(version: Version) -> str:
    """Return (0, 16, 1) as 0.16.1."""
    return ".".join(map(str, version))


def text(run: Run, world_size: int, version: Version) -> str:
    """Return the whole table for `--list-advisories`: the defects that are met first, with what is done and where."""
    known, met = known_defects(), defects_met(run, world_size, version)
    lines = [f"megatron-core {dotted(version)}, {len(met)} of {len(known)} known defects meet these flags"]
    lines += [*untested(version), ""]
    for defect in met:
        lines += [*_entry(defect), ""]
    lines += ["not met by these flags, not in this engine, or in a part of it that is not used:", ""]
    for defect in known:
        if defect not in met:
            lines += [*_entry(defect), f"    here: {_why_not_met(defect, version)}", ""]
    return "\n".join(lines[:-1])


def _entry(defect: Defect) -> list[str]:
    where = f" ({', '.join(defect.where)})" if defect.where else ""
    return [
        f"{defect.id}  {defect.title}",
        f"    megatron-core: {defect.releases()}; {defect.source}",
        f"    {defect.treatment}: {defect.how}{where}",
    ]


def _why_not_met(defect: Defect, version: Version) -> str:
    if not defect.is_present(version):
        return "not in this engine"
    return "that part of the engine is not used" if defect.treatment == "not used" else "these flags do not meet it"
