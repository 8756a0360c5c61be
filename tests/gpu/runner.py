"""Runs the stages one after another, shows what they do, and writes the reports."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu import report
from tests.gpu.processes import Child
from tests.gpu.stage import FAIL, IMPOSSIBLE, PASS, Stage
from tests.gpu.stages import DRY_SECONDS, Plan

_POLL_SECONDS = 0.1


def run(plans: Sequence[Plan], out: Path, dry: bool) -> int:
    """Run the stages and return the exit status; `out` gets report.json, and a folder for each stage."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    whole = report.new(dry)
    with _imagined() if dry else contextlib.nullcontext():
        for plan in plans:
            result = _run_stage(plan, out, dry)
            whole["stages"].append(result)
            report.write(whole, out, time.monotonic() - began)
            _say(f"stage {plan.number:>2} {plan.name}: {result['status']} ({result['seconds']:.0f} s)")
            for check in result["checks"]:
                if check["status"] == FAIL:
                    _say(f"         {check['name']}: {report.shown(check)}")
    _say(f"{report.summary(whole)}; {out / 'report.json'}")
    return 1 if any(one["status"] == FAIL for one in whole["stages"]) else 0


@contextlib.contextmanager
def _imagined() -> Any:
    """Imagine a device in this process; stages and their ranks are forked from it, with all that is loaded."""
    from tests.helpers import cuda_on_cpu

    cuda_on_cpu.install()
    with cuda_on_cpu.Mode():
        import torch

        torch.set_num_threads(1)
        import megatron_moe.apps.doctor.default_layouts
        import megatron_moe.apps.doctor.measure
        import megatron_moe.training.run  # noqa: F401

        yield


def _run_stage(plan: Plan, out: Path, dry: bool) -> dict[str, Any]:
    folder = out / f"stage{plan.number:02}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    notes, limit = folder / "notes.jsonl", DRY_SECONDS if dry else plan.seconds
    began = time.monotonic()
    # A stage that asks what time is left ends a little before it is cut.
    child = Child(perform, (plan.function, str(notes), str(folder), dry, limit - 3), folder / "log.txt", dry, {})
    doing, shown = "starting", ""
    try:
        while child.wait(_POLL_SECONDS) is None and time.monotonic() - began < limit:
            doing = _doing(notes) or doing
            if doing != shown:
                _say(f"stage {plan.number:>2} {plan.name}, {time.monotonic() - began:3.0f} s: {doing}")
                shown = doing
        status = child.status
    finally:
        child.end()
    checks = [line for line in _lines(notes) if "name" in line]
    if status is None:
        checks.append(_own("the stage's time", f"cut after {limit} s, during: {_doing(notes) or doing}"))
    elif status != 0:
        checks.append(_own("the stage's process", f"status {status}: {child.last_output()}"))
    elif not checks:
        checks.append(_own("the stage's process", "it ended without a check"))
    return {
        "number": plan.number,
        "name": plan.name,
        "status": _status(checks),
        "seconds": round(time.monotonic() - began, 1),
        "limit": limit,
        "cut": status is None,
        "unseen": plan.unseen if dry else "",
        "checks": checks,
    }


def perform(function: str, notes: str, folder: str, dry: bool, seconds: float) -> None:
    stage = Stage(Path(notes), Path(folder), dry, seconds)
    stage.doing("loading torch and the engine")
    import megatron_moe  # noqa: F401  (before the engine)

    module, _, name = function.partition(":")
    getattr(importlib.import_module(f"tests.gpu.{module}"), name)(stage)


def _own(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "status": FAIL, "reason": reason, "figures": {}, "bound": None}


def _status(checks: list[dict[str, Any]]) -> str:
    """Return a stage's status: failed if a check did; not possible here if none was."""
    found = {check["status"] for check in checks}
    if FAIL in found:
        return FAIL
    return PASS if PASS in found else IMPOSSIBLE


def _lines(notes: Path) -> list[dict[str, Any]]:
    if not notes.exists():
        return []
    whole = notes.read_text(encoding="utf-8").rpartition("\n")[0]  # the last line may be on its way
    return [json.loads(line) for line in whole.splitlines()]


def _doing(notes: Path) -> str:
    return next((line["doing"] for line in reversed(_lines(notes)) if "doing" in line), "")


def _say(text: str) -> None:
    print(text, flush=True)
