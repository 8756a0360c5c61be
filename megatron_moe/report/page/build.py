"""The page itself: the states of runs as JSON in one HTML file, with its program and style, and nothing from a network.

The data is in an element that no browser runs, with every `<` escaped, and the page's policy lets only the scripts and
styles run whose hash it names: nothing in a run's names, flags or messages can become code.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_moe.io.files import finite, replace_text
from megatron_moe.report.metric import metrics
from megatron_moe.report.page.files import RunState
from megatron_moe.report.page.verdict import findings, status_of

_SCRIPTS, _STYLES = ("uPlot.iife.min.js", "charts.js", "report.js"), ("uPlot.min.css", "report.css")


def write_page(path: Path, states: Sequence[RunState], names: Sequence[str], *, every: float | None = None) -> None:
    """Write the page of runs, atomically; `every` is after how many seconds it is written again while a run goes on."""
    replace_text(path, page(states, names, every=every))


def page(states: Sequence[RunState], names: Sequence[str], *, every: float | None = None) -> str:
    """Return the page of runs as HTML."""
    titles = unique(names)
    data = {
        "runs": [run_data(state, title) for state, title in zip(states, titles)],
        "units": {metric.name: metric.unit for metric in metrics() if metric.unit},
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "every": every,
    }
    text = json.dumps(finite(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts, styles = [_asset(name) for name in _SCRIPTS], [_asset(name) for name in _STYLES]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "base-uri 'none'; form-action 'none'"
    )
    title = html.escape(", ".join(titles))
    head = "".join(f"<style>{style}</style>\n" for style in styles)
    body = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<!-- The charts are drawn by uPlot.\n{html.escape(_asset('uPlot.LICENSE'), quote=False)}-->\n"
        f"<title>{title} - megatron_moe</title>\n{head}</head><body>\n"
        '<main id="page"><noscript>This page draws its charts with JavaScript.</noscript></main>\n'
        f'<script type="application/json" id="data">{text}</script>\n{body}</body></html>\n'
    )


def run_data(state: RunState, name: str) -> dict[str, Any]:
    """Return what the page shows of one run, as plain values."""
    status = status_of(state)
    series = {key: columns for key, columns in state.course.rows().items() if not key.startswith(("loss_hex",))}
    x = {
        axis: series.pop(key, {"mean": []})
        for axis, key in (("iteration", "iteration"), ("tokens", "total_tokens"), ("hours", "hours"))
    }
    info = {key: state.info[key] for key in state.info if key != "attempts"}
    last = {key: value for key, value in state.last.items() if not isinstance(value, (dict, list))}
    return {
        "name": name,
        "status": status,
        "findings": findings(state, status),
        "info": info,
        "attempts": state.info.get("attempts") or [],
        "steps": state.count,
        "repeated": state.repeated,
        "seconds": state.seconds,
        "tokens": state.tokens,
        "width": state.course.width,
        "last": last,
        "x": x,
        "series": series,
        "skipped": state.course.sums("skipped"),
        "notFinite": state.course.sums("not_finite"),
        "evaluations": {split: course.rows() for split, course in state.evaluations.items()},
        "loads": state.loads.as_json(("load", "dead")),
        "health": state.health.as_json(),
        "experts": state.experts.as_json(),
        "clipped": [state.watch.clipped, state.watch.norms],
        "spikes": list(state.watch.spikes),
        "saves": list(state.saves),
        "events": list(state.events),
        "eventCounts": dict(state.event_counts),
    }


def unique(names: Sequence[str]) -> list[str]:
    """Return the names with a number behind those that came before."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def _asset(name: str) -> str:
    return resources.files("megatron_moe.report.page").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
