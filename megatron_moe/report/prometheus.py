"""`--prometheus-file`: the present metrics in Prometheus' text format, for node_exporter's textfile collector.

https://prometheus.io/docs/instrumenting/exposition_formats
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.io.files import replace_text
from megatron_moe.report.metric import metrics
from megatron_moe.report.records import EvalRecord, EventRecord, StepRecord
from megatron_moe.report.sink import Sink

PREFIX = "megatron_moe_"
SECONDS_BETWEEN_WRITES = 1.0
"""Prometheus scrapes every few seconds; steps may take less than one of them."""

Labels = tuple[tuple[str, str], ...]


@dataclass
class _Family:
    """The samples of one name."""

    help: str
    kind: str = "gauge"
    samples: dict[Labels, float] = field(default_factory=dict)

    def text(self, name: str) -> str:
        lines = [f"# HELP {name} {_escaped(self.help)}", f"# TYPE {name} {self.kind}"]
        for labels, value in self.samples.items():
            inside = ",".join(f'{key}="{_escaped(text, quotes=True)}"' for key, text in labels)
            if inside:
                inside = f"{{{inside}}}"
            lines.append(f"{name}{inside} {_number(value)}")
        return "\n".join(lines) + "\n"


class PrometheusSink(Sink):
    """Replaces `path` as a whole with what is known of the run now.

    Each number of a line of metrics.jsonl is a gauge `megatron_moe_KEY`, if KEY is ASCII, which keeps its last known
    value. A file that cannot be written is one warning, and the run goes on.

    Args:
        about: what the run is, as in metrics.run.json: `run_id` and `attempt`.
        warn: takes a warning.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self.artifact: Path = path
        self._warn, self._has_warned, self._written = warn, False, -math.inf
        self._slow: dict[tuple[str, bool], Labels] = {}
        labels = tuple((name, str(about[name])) for name in ("run_id", "attempt"))
        self._families = {
            "run_info": _Family("The run and its attempt.", samples={labels: 1.0}),
            "running": _Family("1 until the attempt ends; a process that was killed leaves it.", samples={(): 1.0}),
            "skipped_steps_total": _Family("Steps of this attempt that were not applied.", "counter", {(): 0.0}),
            "last_step_timestamp_seconds": _Family("When the last step was reported, since the epoch."),
            "evaluation_loss": _Family("Loss of the last evaluation, nats per token."),
            "slow_rank": _Family("1 for a rank that --log-straggler names."),
            "rank_seconds": _Family("Seconds per step of each rank, by part."),
        }

    def step(self, record: StepRecord) -> None:
        families = self._families
        units = {metric.name: metric.unit for metric in metrics()}
        for name, value in record.values().items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name.isascii():
                family = families.setdefault(name, _Family(units.get(name) or name.replace("_", " ")))
                family.samples = {(): float(value)}
        families["skipped_steps_total"].samples[()] += record.skipped
        families["last_step_timestamp_seconds"].samples[()] = time.time()
        for part, seconds in record.rank_seconds.items():
            for rank, value in enumerate(seconds):
                families["rank_seconds"].samples[("rank", str(rank)), ("part", part)] = value
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self._write()

    def evaluation(self, record: EvalRecord) -> None:
        self._families["evaluation_loss"].samples[(("split", record.split),)] = record.loss
        self._write()

    def event(self, record: EventRecord) -> None:
        if record.kind == "slow":
            rank, phase = str(record.facts["rank"]), str(record.facts["phase"])
            # A rank may be slow in its steps, in one phase of them at a time, and in saving.
            self._slow.pop((rank, phase == "save"), None)
            if not record.facts["ended"]:
                cause = "experts" if record.facts["experts"] else "rank"
                host = str(record.facts["host"])
                labels = ("rank", rank), ("host", host), ("phase", phase), ("cause", cause)
                self._slow[rank, phase == "save"] = labels
            self._families["slow_rank"].samples = dict.fromkeys(self._slow.values(), 1.0)
            self._write()

    def end(self, ending: str) -> None:
        self._end()

    def on_abort(self, ending: str, fault: str | None) -> None:
        self._end()

    def _end(self) -> None:
        self._families["running"].samples[()] = 0.0
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        text = ""
        for name, family in self._families.items():
            if family.samples:
                text += family.text(PREFIX + name)
        try:
            self.artifact.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.artifact, text, synced=False)  # nobody reads it after a crash, and steps would wait
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"--prometheus-file {self.artifact} cannot be written ({error}); trying again")


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    """Return a number as Go's ParseFloat reads it."""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))
