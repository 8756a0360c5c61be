"""Errors that a test has to notice: planted in a copy of the package one at a time, tests beside it.

`planted_errors.yaml` is the list. This file reads it, plants, and writes the table of docs/reliability.md:

    python -m tests.soak.planted_errors
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".yaml")
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- planted errors: written by `python -m tests.soak.planted_errors` -->", "<!-- end -->"
AREAS = (
    "routing",
    "losses",
    "auxiliary losses",
    "expert bias",
    "optimizer",
    "schedule",
    "clipping",
    "loss scaling",
    "multi-token prediction",
    "shared experts",
    "precision",
    "sharding",
    "kernels",
    "gpu",
    "offload",
)
SECONDS = 600


@dataclass(frozen=True)
class Plant:
    """One error.

    error: what is wrong, in words. file: under megatron_moe/. right, wrong: the text and what takes its place.
    noticed_by: a test's node id without parameters, or `doctor` and its flags. raises: the exception that the test
    fails with, where it is no assertion: the package's own check has noticed the error first. needs: a module without
    which the test is skipped.
    """

    error: str
    area: str
    file: str
    right: str
    wrong: str
    noticed_by: str
    raises: str | None = None
    needs: str | None = None

    @property
    def can_be_noticed(self) -> bool:
        """Whether this environment has what the test needs."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    @property
    def by_doctor(self) -> bool:
        """Whether it takes several layouts to see it."""
        return self.noticed_by.startswith("doctor ")

    def in_place(self, text: str) -> str:
        """The file's text with the error in it."""
        assert text.count(self.right) == 1, f"{self.file}: not once: {self.right!r}"
        return text.replace(self.right, self.wrong)


def plants() -> list[Plant]:
    """The list, in its order: by area."""
    rows: dict[str, list[dict[str, Any]]] = yaml.load(LIST.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return [Plant(area=area, **{key.replace(" ", "_"): row[key] for key in row}) for area in rows for row in rows[area]]


def copied(folder: Path, plant: Plant | None) -> Path:
    """A copy of package and tests, the error in it; byte code comes along, so that a start takes no longer."""
    for name in ("megatron_moe", "tests", "tools", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pretrain_moe.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    if plant is not None:
        file = folder / "megatron_moe" / plant.file
        file.write_text(plant.in_place(file.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def outcome(folder: Path, tests: list[str]) -> dict[str, Any]:
    """Run tests of a copy against that copy; see `failure_report` for what comes back."""
    report = folder / "report.json"
    done = _run(
        folder, ["-m", "pytest", "-q", "-x", "-p", "tests.soak.failure_report", *tests], PLANTED_REPORT=str(report)
    )
    assert report.exists(), done.stdout + done.stderr
    told: dict[str, Any] = json.loads(report.read_text())
    assert Path(told["package"]).is_relative_to(folder), f"{told['package']} was tested instead of the copy"
    return {**told, "output": done.stdout[-4000:]}


def doctors_differences(folder: Path, flags: str) -> tuple[int, str]:
    """How many quantities differ between a layout and one process, by the copy's doctor; and what it said."""
    report = folder / "report.json"
    done = _run(folder, ["tools/doctor.py", *flags.split(), "--steps", "1", "--json", str(report)])
    layouts = json.loads(report.read_text())["layouts"] if report.exists() else []
    return sum(len(layout.get("differences", [])) for layout in layouts), done.stdout + done.stderr


def _run(folder: Path, arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


def what_is_wrong(plant: Plant, folder: Path) -> str | None:
    """Why the error does not count as noticed; None if it does."""
    copied(folder, plant)
    if plant.by_doctor:
        differences, said = doctors_differences(folder, plant.noticed_by.removeprefix("doctor "))
        return None if differences else f"the doctor finds no difference: {said[-2000:]}"
    told = outcome(folder, [plant.noticed_by])
    failures = told["failures"]
    if not failures:
        return f"{told['ran']} tests ran, and none failed"
    if any(_is_its_own_reason(plant, failure) for failure in failures):
        return None
    return f"failed for another reason: {failures[0]['when']}, {failures[0]['kinds'][0]}: {failures[0]['text'][-800:]}"


def _is_its_own_reason(plant: Plant, failure: dict[str, Any]) -> bool:
    """Whether a test failed by an assertion of its own, or by the exception that the list names."""
    kinds, text = failure["kinds"], failure["text"]
    if failure["when"] != "call":
        return False
    if plant.raises is not None:  # what a rank raised is in the text of CaseFailed
        return plant.raises in kinds or ("CaseFailed" in kinds and plant.raises in text)
    return ("AssertionError" in kinds and "CaseFailed" not in kinds) or "DID NOT RAISE" in text


def table() -> str:
    """The table of docs/reliability.md: areas, and in each the errors with what notices them."""
    lines = ["| planted error | in `megatron_moe/` | noticed by, in `tests/` |", "|---|---|---|"]
    for area in AREAS:
        lines.append(f"| **{area}** | | |")
        for plant in plants():
            if plant.area == area:
                by = plant.noticed_by.removeprefix("tests/").replace("::", ": ")
                lines.append(f"| {plant.error} | {plant.file} | {by} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table that the list makes."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
