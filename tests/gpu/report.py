"""The report: JSON of everything, and one HTML page that needs nothing else."""

from __future__ import annotations

import html
import json
import os
import platform
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA = 1
_PACKAGES = ("torch", "megatron-core", "triton", "transformer-engine", "numpy", "psutil")
_COLOURS = {"pass": "#137333", "fail": "#c5221f", "not possible here": "#6b6b6b"}


def new(dry: bool) -> dict[str, Any]:
    """Return a report without stages."""
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
    """Write report.json and report.html, each at once."""
    report["seconds"] = round(seconds, 1)
    for name, text in (("report.json", json.dumps(report, indent=1) + "\n"), ("report.html", page(report))):
        new_file = folder / f"{name}.new"
        new_file.write_text(text, encoding="utf-8")
        os.replace(new_file, folder / name)


def summary(report: dict[str, Any]) -> str:
    """Return the stages' and checks' states in one line."""
    stages = Counter(one["status"] for one in report["stages"])
    checks = Counter(check["status"] for one in report["stages"] for check in one["checks"])
    said = "; ".join(
        f"{what}: " + ", ".join(f"{count[status]} {status}" for status in _COLOURS if count[status])
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


def page(report: dict[str, Any]) -> str:
    """Return the HTML page."""
    what = "a dry run: the device was imagined, on a CPU" if report["dry"] else "on a GPU"
    facts = {**report["machine"], **report["versions"]}
    if report["taken_from_wheels"]:
        facts["taken from wheels/gpu"] = ", ".join(report["taken_from_wheels"])
    rows = "".join(f"<tr><td>{_text(key)}</td><td>{_text(value)}</td></tr>" for key, value in facts.items())
    stages = "".join(_stage(one) for one in report["stages"])
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>make gpu</title><style>"
        "body{font:15px/1.45 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#202124}"
        "table{border-collapse:collapse;width:100%}"
        "td{border-top:1px solid #ddd;padding:.25rem .6rem;vertical-align:top}"
        "td:first-child{white-space:nowrap}summary{cursor:pointer;font-weight:600;padding:.3rem 0}"
        "pre{white-space:pre-wrap;margin:0;font:13px/1.4 ui-monospace,monospace}.unseen{color:#6b6b6b}</style>"
        f"<h1>make gpu, {_text(what)}</h1><p>{_text(report['began'])}. {_text(summary(report))}</p>"
        f"<table>{rows}</table>{stages}</html>"
    )


def _stage(stage: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{_state(check['status'])}</td><td>{_text(check['name'])}</td>"
        f"<td><pre>{_text(shown(check))}</pre></td></tr>"
        for check in stage["checks"]
    )
    unseen = (
        f"<p class=unseen>What this dry run does not show: {_text(stage['unseen'])}.</p>" if stage["unseen"] else ""
    )
    opened = " open" if stage["status"] == "fail" else ""
    return (
        f"<details{opened}><summary>{stage['number']} {_text(stage['name'])}: {_state(stage['status'])}, "
        f"{stage['seconds']:.0f} s</summary>{unseen}<table>{rows}</table></details>"
    )


def _state(status: str) -> str:
    return f"<span style='color:{_COLOURS[status]}'>{_text(status)}</span>"


def _text(value: Any) -> str:
    return html.escape(str(value))
