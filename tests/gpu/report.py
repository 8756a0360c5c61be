"""The report: JSON of everything that was checked and measured."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.stage import STATUSES

SCHEMA = 1
_PACKAGES = ("torch", "megatron-core", "triton", "transformer-engine", "numpy", "psutil")


def new(dry: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "dry": dry,
        "began": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "seconds": 0.0,
        "machine": {"python": sys.version.split()[0], "interpreter": sys.executable, "kernel": platform.release()},
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "taken_from_wheels": os.environ.get("MEGATRON_MOE_GPU_WHEELS", "").split(),
        "stages": [],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def write(report: dict[str, Any], folder: Path, seconds: float) -> None:
    report["seconds"] = round(seconds, 1)
    new_file = folder / "report.json.new"
    new_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(new_file, folder / "report.json")


def summary(report: dict[str, Any]) -> str:
    stages = Counter(one["status"] for one in report["stages"])
    checks = Counter(check["status"] for one in report["stages"] for check in one["checks"])
    said = "; ".join(
        f"{what}: " + ", ".join(f"{count[status]} {status}" for status in STATUSES if count[status])
        for what, count in (("stages", stages), ("checks", checks))
    )
    return f"{'a dry run, no GPU; ' if report['dry'] else ''}{said}; {report['seconds']:.0f} s"


def shown(check: dict[str, Any]) -> str:
    """Return a check's figures, bound and reason in one text."""
    figures = ", ".join(f"{key} {_number(value)}" for key, value in check["figures"].items())
    bound = "" if check["bound"] is None else f" (at most {_number(check['bound'])})"
    return "; ".join(filter(None, (figures + bound, check["reason"])))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
