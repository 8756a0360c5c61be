"""The page of runs: their states as JSON in one HTML file, with its program and style, and nothing from a network.

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
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from megatron_moe.io.files import finite, replace_text
from megatron_moe.io.texts import duration_text
from megatron_moe.report.metric import metrics
from megatron_moe.report.records import EvalRecord, StepRecord
from megatron_moe.report.sink import Sink
from megatron_moe_tools.report.run_state import RunState, seconds_of

# ---- what a reader has to know first: how a run ended, what is good in it, and what needs attention

_SILENT_SECONDS, _SILENT_STEPS = 300.0, 20.0
_EVEN, _UNEVEN, _COLLAPSED = 1.5, 2.5, 0.25
_MANY_SKIPPED, _MUCH_LOST, _ENOUGH_STEPS = 0.01, 0.05, 100
_SKIPPED_IN_A_ROW, _SKIPPED_IN_A_ROW_FP16 = 3, 40  # fp16's loss scale falls from 2^32 to 1 in that many
_MOST_TEXT = 200
_LEVELS = ("bad", "attention", "good")


@dataclass(frozen=True)
class RunFinding:
    """Something to know about a run, of a level of `_LEVELS`.

    chart: which chart shows it. do: what helps. page: where the documentation describes it.
    """

    level: str
    text: str
    chart: str
    do: str = ""
    page: str = ""


def status_of(state: RunState) -> dict[str, str]:
    """Return `state` (finished, running, stopped, killed, failed, empty or unknown) and `text` for people.

    A run whose last attempt has no ending is running until its files have been silent for five minutes, and for twenty
    of its steps.
    """
    attempts = state.info.get("attempts") or []
    if not state.count and not attempts:
        return {"state": "empty", "text": "no step yet"}
    at = _at(state) or "before its first step"
    if not attempts:
        return {"state": "unknown", "text": f"{at}; it has no metrics.run.json, which says how a run ended"}
    ending = attempts[-1].get("ending")
    if ending is not None:
        for word in ("finished", "stopped", "failed"):
            if str(ending).startswith(word):
                return {"state": word, "text": f"{at}{str(ending)[len(word) :]}"}
        return {"state": "stopped", "text": f"{at}: {ending}"}
    heard = [seconds_of(state.last.get("time")), *(seconds_of(attempt.get("start_time")) for attempt in attempts)]
    with suppress(OSError):
        heard.append(state.metrics_file.stat().st_mtime)
    latest = max(filter(None, heard), default=-math.inf)
    silent = max(0.0, time.time() - latest)
    silence = duration_text(silent)
    if silent > max(_SILENT_SECONDS, _SILENT_STEPS * state.seconds / max(state.count, 1)):
        return {"state": "killed", "text": f"{at}: no ending was written, and nothing for {silence}"}
    return {"state": "running", "text": f"{at}, last heard of {silence} ago"}


def findings(state: RunState, status: dict[str, str]) -> list[RunFinding]:
    """Return what is good in a run and what needs attention, the worst first."""
    found = [*_of_steps(state), *_of_loss(state, status), *_of_experts(state)]
    attempts = state.info.get("attempts") or []
    if len(attempts) > 1:
        killed = sum(attempt.get("ending") is None for attempt in attempts[:-1])
        text = f"{len(attempts)} attempts, {killed} of them killed"
        found.append(RunFinding("attention" if killed else "good", text, "attempts", "", "guides/faults.md"))
    if state.event_counts["fault"]:
        last = ""
        for event in state.events:
            if event["kind"] == "fault":
                last = event["text"]
        if len(last) > _MOST_TEXT:
            last = f"{last[:_MOST_TEXT]}..."
        text = f"{_count(state.event_counts['fault'], 'fault')} recorded, the last: {last}"
        found.append(RunFinding("attention", text, "events", "the table of events has each", "guides/faults.md"))
    if status["state"] in ("failed", "killed"):
        how = {"failed": "failed", "killed": "was killed"}[status["state"]]
        do = "the same command goes on from the last checkpoint, where --save and --load are given"
        text = f"the last attempt {how} {_at(state)}".rstrip()
        found.append(RunFinding("bad", text, "attempts", do, "guides/faults.md"))
    return sorted(found, key=lambda finding: _LEVELS.index(finding.level))


def _at(state: RunState) -> str:
    return f"at iteration {state.last['iteration']:,}" if state.last else ""


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def _of_steps(state: RunState) -> list[RunFinding]:
    watch, found = state.watch, []
    if watch.not_finite:
        count = _count(watch.not_finite, "step")
        text = f"{count} had a loss that is NaN or infinite, the first at {watch.first_not_finite:,}"
        do = "see which batch, and whether --on-nan skips it"
        found.append(RunFinding("bad", text, "loss", do, "guides/faults.md#nan-and-infinity"))
    if watch.skipped:  # fp16 begins with some while its loss scale falls, others are faults
        text = f"{_count(watch.skipped, 'step')} of {state.count:,} skipped, the last at {watch.last_skipped or 0:,}"
        fp16 = (state.info.get("all_flags") or {}).get("fp16") or state.last.get("loss_scale", 1.0) != 1.0
        often = watch.skipped > _MANY_SKIPPED * state.count
        level, chart = "bad" if often else "attention", "grad_norm"
        do = "their loss or gradient was not finite: the events say where; a lower --lr helps if it is not the data"
        if watch.skipped_in_a_row > (_SKIPPED_IN_A_ROW_FP16 if fp16 else _SKIPPED_IN_A_ROW):
            last = _count(watch.skipped_in_a_row, "step")
            text = f"the last {last} were all skipped: nothing is learnt any more ({text})"
            level, do = "bad", "go back to a checkpoint before them, with a lower --lr"
        elif fp16:
            level, chart = "attention" if often else "good", "loss_scale"
            do = (
                "fp16 skips a few while it looks for its loss scale; many later mean overflow: try bf16 or a lower --lr"
            )
        found.append(RunFinding(level, text, chart, do, "guides/precision.md#a-step-is-a-transaction"))
    if state.count and not watch.not_finite and not watch.skipped:
        found.append(RunFinding("good", "every step was finite and applied", "loss"))
    if watch.spike_count:
        places = ", ".join(f"{iteration:,}" for iteration, _ in list(watch.spikes)[-5:])
        text = f"the loss jumped {_count(watch.spike_count, 'time')}, last at {places}"
        do = "--loss-spike-factor keeps the batch of such a step; a lower --lr or more warm-up helps"
        found.append(RunFinding("attention", text, "loss", do, "guides/faults.md#what-happens-and-the-flag-for-it"))
    if watch.norm_spikes:
        text = f"the gradient norm was over 8 times its median at {_count(watch.norm_spikes, 'step')}"
        found.append(RunFinding("attention", text, "grad_norm", "look at the loss at the same steps"))
    if state.seconds and watch.seconds_lost > _MUCH_LOST * state.seconds:
        lost = f"{duration_text(watch.seconds_lost)} of {duration_text(state.seconds)}"
        text = f"{_count(watch.slow, 'slow step')} cost {lost}"
        do = "--timing-log-level 1 says which part of a step is slow"
        found.append(RunFinding("attention", text, "seconds", do, "internals/gpu_paths.md#host-synchronisation"))
    if state.bad_lines:
        found.append(
            RunFinding("attention", f"{_count(state.bad_lines, 'line')} of its files could not be read", "loss")
        )
    return found


def _of_loss(state: RunState, status: dict[str, str]) -> list[RunFinding]:
    losses = [loss for loss in state.series.rows().get("loss", {}).get("mean", []) if loss is not None]
    if not losses:
        return []
    which, now = "the validation loss", state.last_evaluation.get("valid", {}).get("loss")
    if now is None:
        which, now = "the loss", losses[-1]
    found = []
    entropy = (state.info.get("facts") or {}).get("unigram_entropy")
    if isinstance(entropy, (int, float)):
        if now < entropy:
            found.append(RunFinding("good", f"{which} is {entropy - now:.3f} below the unigram entropy", "loss"))
        else:
            text = f"{which}, {now:.3f}, is {now - entropy:.3f} above the unigram entropy: no context is used yet"
            late = state.count > _ENOUGH_STEPS and status["state"] == "finished"
            do = "normal in the first steps; later, check data, tokenizer and --lr"
            found.append(RunFinding("bad" if late else "attention", text, "loss", do))
    if losses[-1] > losses[0] and len(losses) > 1:
        text = f"the loss rose from {losses[0]:.3f} to {losses[-1]:.3f}"
        found.append(RunFinding("bad", text, "loss", "a lower --lr, more warm-up, or a check of the data"))
    elif len(losses) > 1:
        found.append(RunFinding("good", f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}", "loss"))
    return found


def _of_experts(state: RunState) -> list[RunFinding]:
    load = state.experts.load()
    if load is None:
        return []
    page, layers, found = "guides/balancing.md", state.loads.layers, []
    dead = state.experts.dead().sum(axis=1)
    if dead.any():
        worst = int(dead.argmax())
        count = _count(int(dead.sum()), "expert")
        text = f"{count} got no token lately, {int(dead[worst])} of them in layer {layers[worst]}"
        do = "raise --moe-router-bias-update-rate or the coefficient of an auxiliary loss"
        found.append(RunFinding("bad", text, "experts", do, page))
    shares = load / np.maximum(load.sum(axis=1, keepdims=True), 1e-9)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    effective = np.exp(-(shares * logs).sum(axis=1)) / load.shape[1]
    peak = load.max(axis=1)
    worst = int(peak.argmax())
    if effective.min() < _COLLAPSED:
        lowest = int(effective.argmin())
        text = f"layer {layers[lowest]} uses {100 * effective[lowest]:.0f} % of its experts: its load has collapsed"
        do = "go back to a checkpoint before it, with stronger balancing"
        found.append(RunFinding("bad", text, "experts", do, page))
    elif peak[worst] > _UNEVEN:
        text = f"the fullest expert of layer {layers[worst]} gets {peak[worst]:.2f} times the mean"
        found.append(
            RunFinding("attention", text, "loads", "normal in the first steps; later, stronger balancing", page)
        )
    elif peak[worst] < _EVEN and not dead.any():
        text = f"experts are evenly loaded: at most {peak[worst]:.2f} times the mean (layer {layers[worst]})"
        found.append(RunFinding("good", text, "loads"))
    return found


# ---- the page

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
    by_source = state.source_loads
    loads = {}
    for source, table in by_source.loads().items():
        loads[source] = table.round(3).tolist()
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
        "sourceLoads": {"layers": by_source.layers, "iterations": list(by_source.iterations), "loads": loads},
        "layer": state.layer,
        "expertsOfLayer": state.experts_of_layer.as_json(),
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
