"""The page itself: the states of runs as JSON in one HTML file, with its program and style, and nothing from a network.

The data is in an element that no browser runs, with every `<` escaped, and the page's policy lets only the scripts and
styles run whose hash it names: nothing in a run's names, flags or messages can become code.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_moe.io.files import finite, replace_text
from megatron_moe.report.metric import metrics
from megatron_moe.report.records import EvalRecord, StepRecord
from megatron_moe.report.sink import Sink
from megatron_moe_tools.report.findings import findings, status_of
from megatron_moe_tools.report.run_state import RunState

_LEAST_SECONDS, _TIMES_ITS_COST = 30.0, 50.0
_MOST_SECONDS_TO_READ = 1.0
_SCRIPTS, _STYLES = ("uPlot.iife.min.js", "charts.js", "report.js"), ("uPlot.min.css", "report.css")


def write_page(path: Path, states: Sequence[RunState], names: Sequence[str], *, every: float | None = None) -> None:
    """Write the page of runs, atomically; `every` is after how many seconds it is written again while a run trains."""
    titles = unique(names)
    data = {
        "runs": list(map(run_data, states, titles)),
        "units": {metric.name: metric.unit for metric in metrics() if metric.unit},
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "every": every,
    }
    text = json.dumps(finite(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    head = body = script_hashes = style_hashes = ""
    for style in map(_asset, _STYLES):
        head += f"<style>{style}</style>\n"
        style_hashes += f" {_hash(style)}"
    for script in map(_asset, _SCRIPTS):
        body += f"<script>{script}</script>\n"
        script_hashes += f" {_hash(script)}"
    policy = (
        f"default-src 'none'; script-src{script_hashes}; style-src{style_hashes}; base-uri 'none'; form-action 'none'"
    )
    title = html.escape(", ".join(titles))
    replace_text(
        path,
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<!-- The charts are drawn by uPlot.\n{html.escape(_asset('uPlot.LICENSE'), quote=False)}-->\n"
        f"<title>{title} - megatron_moe</title>\n{head}</head><body>\n"
        '<main id="page"><noscript>This page draws its charts with JavaScript.</noscript></main>\n'
        f'<script type="application/json" id="data">{text}</script>\n{body}</body></html>\n',
    )


def run_data(state: RunState, name: str) -> dict[str, Any]:
    """Return what the page shows of one run, as plain values."""
    status, series = status_of(state), state.series.rows()
    x = {}
    for axis, key in (("iteration", "iteration"), ("tokens", "total_tokens"), ("hours", "hours")):
        x[axis] = series.pop(key, {"mean": []})
    info = dict(state.info)
    attempts = info.pop("attempts", None) or []
    return {
        "name": name,
        "status": status,
        "findings": list(map(asdict, findings(state, status))),
        "info": info,
        "attempts": attempts,
        "steps": state.count,
        "repeated": state.repeated,
        "seconds": state.seconds,
        "tokens": state.tokens,
        "width": state.series.width,
        "last": {key: value for key, value in state.last.items() if not isinstance(value, (dict, list))},
        "x": x,
        "series": series,
        "skipped": state.series.sums("skipped"),
        "notFinite": state.series.sums("not_finite"),
        "evaluations": {split: evaluated.rows() for split, evaluated in state.evaluations.items()},
        "loads": state.loads.as_json(("load", "dead")),
        "health": state.health.as_json(),
        "experts": state.experts.as_json(),
        "clipped": [state.watch.clipped, state.watch.norms],
        "spikes": list(state.watch.spikes),
        "saves": list(state.saves),
        "events": list(state.events),
        "eventCounts": dict(state.event_counts),
    }


def run_name(metrics_file: Path) -> str:
    """Return what a page calls a run: its folder, or the name of a metrics file that has one of its own."""
    if metrics_file.name != "metrics.jsonl":
        return metrics_file.stem
    return metrics_file.resolve().parent.name or metrics_file.stem


def unique(names: Sequence[str]) -> list[str]:
    """Return the names with a number behind those that came before."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


class PageSink(Sink):
    """Writes the page of the run that goes on: at its start, while it trains, and when its ending is known.

    The files are read as they grow, and what was read once is kept. Between two pages are at least 30 seconds, and 50
    times what the last one took, so that pages take less than 2 % of the time. After a restart the steps before it are
    read a second at a time, at the same pace, and the first page is written when all are.

    Args:
        path: the page.
        metrics_file: the file of --metrics-file; its sink comes before this one.
        warn: takes the text where a page cannot be written, once. The run goes on, and the next page is tried.
    """

    def __init__(self, path: Path, metrics_file: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._warned = path, warn, False
        self._state, self._every, self._next = RunState(metrics_file), _LEAST_SECONDS, 0.0

    def start(self, facts: dict[str, Any]) -> None:
        self._write()

    def step(self, record: StepRecord) -> None:
        self._write_where_it_is_time()

    def evaluation(self, record: EvalRecord) -> None:
        self._write_where_it_is_time()

    def end(self, ending: str) -> None:
        self._write(math.inf)

    def on_abort(self, ending: str, fault: str | None) -> None:
        # Its own state: the run's thread may be using the other. Of a file too long to read the page before stays.
        state = RunState(self._state.metrics_file)
        with suppress(Exception):
            if state.update(_MOST_SECONDS_TO_READ):
                write_page(self._path, [state], [run_name(state.metrics_file)])

    def _write_where_it_is_time(self) -> None:
        if time.monotonic() >= self._next:
            self._write()

    def _write(self, most_seconds: float = _MOST_SECONDS_TO_READ) -> None:
        start = time.monotonic()
        try:
            if not self._state.update(most_seconds):
                self._next = time.monotonic() + _TIMES_ITS_COST * most_seconds
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_page(self._path, [self._state], [run_name(self._state.metrics_file)], every=self._every)
            self.artifact = self._path
        except Exception as error:  # whatever it is, a page is not worth the run
            self.artifact = None
            if not self._warned:
                self._warned = True
                self._warn(f"--report-file {self._path} was not written ({type(error).__name__}: {error})")
        now = time.monotonic()
        self._every = max(_LEAST_SECONDS, _TIMES_ITS_COST * (now - start))
        self._next = now + self._every


def _asset(name: str) -> str:
    return resources.files("megatron_moe_tools.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
