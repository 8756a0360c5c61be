"""Runs the stages one after another, shows what they do, and writes the reports."""

import contextlib
import importlib
import json
import os
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.processes import Child
from tests.gpu.stage import FAIL, IMPOSSIBLE, PASS, STATUSES, Stage
from tests.gpu.stages import DRY_SECONDS, Plan

SCHEMA = 1


def run(plans: Sequence[Plan], out: Path, dry: bool) -> int:
    """Run the stages and return the exit status; `out` gets report.json, and a folder for each stage."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with _imagined() if dry else contextlib.nullcontext():
        whole = _new_report(dry)
        for plan in plans:
            result = _run_stage(plan, out, dry)
            whole["stages"].append(result)
            whole["seconds"] = round(time.monotonic() - began, 1)
            (out / "report.json.new").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            os.replace(out / "report.json.new", out / "report.json")
            _say(f"stage {plan.number:>2} {plan.name}: {result['status']} ({result['seconds']:.0f} s)")
            for check in result["checks"]:
                if check["status"] == FAIL:
                    _say(f"         {check['name']}: {check['figures']}, at most {check['bound']}; {check['reason']}")
    _say(f"{_summary(whole)}; {out / 'report.json'}")
    return 1 if any(one["status"] == FAIL for one in whole["stages"]) else 0


def _new_report(dry: bool) -> dict[str, Any]:
    from megatron_moe.report.run_info import versions

    return {
        "schema": SCHEMA,
        "dry": dry,
        "began": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": {"interpreter": sys.executable, "kernel": platform.release()},
        "versions": versions(),
        "taken_from_wheels": os.environ.get("MEGATRON_MOE_GPU_WHEELS", "").split(),
        "stages": [],
    }


def _summary(report: dict[str, Any]) -> str:
    stages = Counter(one["status"] for one in report["stages"])
    checks = Counter(check["status"] for one in report["stages"] for check in one["checks"])
    said = "; ".join(
        f"{what}: " + ", ".join(f"{count[status]} {status}" for status in STATUSES if count[status])
        for what, count in (("stages", stages), ("checks", checks))
    )
    return f"{'a dry run, no GPU; ' if report['dry'] else ''}{said}; {report['seconds']:.0f} s"


@contextlib.contextmanager
def _imagined() -> Any:
    """Imagine a device in this process; stages and their ranks are forked from it, with all that is loaded."""
    from tests.helpers import cuda_on_cpu

    cuda_on_cpu.install()
    with cuda_on_cpu.Mode():
        import torch

        torch.set_num_threads(1)
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
        while child.wait(0.1) is None and time.monotonic() - began < limit:
            doing = _doing(notes) or doing
            if doing != shown:
                _say(f"stage {plan.number:>2} {plan.name}, {time.monotonic() - began:3.0f} s: {doing}")
                shown = doing
        status = child.wait(0)
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
        # Failed if a check did; not possible here if none was.
        "status": next(one for one in (FAIL, PASS, IMPOSSIBLE) if any(check["status"] == one for check in checks)),
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


def _lines(notes: Path) -> list[dict[str, Any]]:
    if not notes.exists():
        return []
    whole = notes.read_text(encoding="utf-8").rpartition("\n")[0]  # the last line may be on its way
    return [json.loads(line) for line in whole.splitlines()]


def _doing(notes: Path) -> str:
    return next((line["doing"] for line in reversed(_lines(notes)) if "doing" in line), "")


def _say(text: str) -> None:
    print(text, flush=True)
