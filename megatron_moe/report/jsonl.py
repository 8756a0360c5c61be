"""metrics.jsonl: one line per step, exact, also after any number of kills and resumes; and its neighbours.

A run that continues from step k cuts every line after k before it writes the first new one, because those weights are
gone. A line is flushed to the system when its step is reported, which survives a kill, and is on the disk
before a checkpoint is published (`Sink.flush`), which survives a power cut: so the lines up to a checkpoint exist
wherever the checkpoint does. Lines that are missing all the same, because the file is another one, are reported.

metrics.eval.jsonl has the evaluations, and is cut likewise. metrics.events.jsonl has what happened, and is never cut:
what a killed attempt met is kept, and its lines name the attempt.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import finite
from megatron_moe.report.health import Health, LayerHealth, LoadHealth
from megatron_moe.report.metric import added_metrics, metrics
from megatron_moe.report.records import EvalRecord, EventRecord, SourceStep, StepRecord
from megatron_moe.report.run_info import Totals, info_path, read_info
from megatron_moe.report.sink import Sink

# The JSON form of records.

_EVENT_KEYS = ("time", "run_id", "attempt", "iteration", "kind", "text")


def to_json(record: StepRecord | EvalRecord | EventRecord) -> dict[str, Any]:
    """Return a dict that `json.dumps(..., allow_nan=False)` takes; NAME_hex hold the exact bits of floats."""
    if isinstance(record, EventRecord):
        line = {name: getattr(record, name) for name in _EVENT_KEYS}
        line.update(record.facts)
    elif isinstance(record, EvalRecord):
        line = dataclasses.asdict(record)
        line["bits_per_byte"] = record.bits_per_byte
        line["loss_hex"] = float(record.loss).hex()
    else:
        line = record.values()
        if record.health is not None:
            line["health"] = dataclasses.asdict(record.health)
        line["sources"] = {name: dataclasses.asdict(source) for name, source in record.sources.items()}
        for metric in metrics():
            if metric.exact and line.get(metric.name) is not None:
                line[f"{metric.name}_hex"] = float(line[metric.name]).hex()
    return finite(line)


def step_from_json(line: dict[str, Any]) -> StepRecord:
    """Return the record that `to_json` made the line of, also where the loss was NaN or infinite."""
    values = dict(line)
    for metric in metrics():
        if metric.exact and f"{metric.name}_hex" in values:
            values[metric.name] = float.fromhex(values.pop(f"{metric.name}_hex"))
    if (health := values.get("health")) is not None:
        layers = {}
        for number, layer in health["layers"].items():
            load = LoadHealth(**layer["load"]) if layer["load"] is not None else None
            layers[int(number)] = LayerHealth(**{**layer, "load": load})
        values["health"] = Health(**{**health, "layers": layers})
    for name in ("tokens_per_expert", "dropped_per_expert"):
        values[name] = {int(layer): counts for layer, counts in (values.get(name) or {}).items()}
    values["sources"] = {name: SourceStep(**facts) for name, facts in (values.get("sources") or {}).items()}
    values["mtp_losses"] = [math.nan if loss is None else loss for loss in values.get("mtp_losses") or ()]
    extra: dict[str, Any] = {metric.name: None for metric in added_metrics()}
    for name in line:
        if name in values and name not in _STEP_KEYS:
            extra[name] = values.pop(name)
    return StepRecord(**values, extra=extra)


_STEP_KEYS = {field.name for field in dataclasses.fields(StepRecord)} - {"extra"}


def eval_from_json(line: dict[str, Any]) -> EvalRecord:
    """Return the record that `to_json` made the line of."""
    values = {field.name: line[field.name] for field in dataclasses.fields(EvalRecord) if field.name in line}
    if "loss_hex" in line:
        values["loss"] = float.fromhex(line["loss_hex"])
    return EvalRecord(**values)


# The files.


def evaluations_path(metrics_file: Path) -> Path:
    """Return the file of the evaluations: metrics.eval.jsonl for metrics.jsonl, which holds the steps."""
    return metrics_file.with_name(f"{metrics_file.stem}.eval{metrics_file.suffix}")


def events_path(metrics_file: Path) -> Path:
    """Return the file of the events: metrics.events.jsonl for metrics.jsonl."""
    return metrics_file.with_name(f"{metrics_file.stem}.events{metrics_file.suffix}")


def read_steps(metrics_file: Path, after: int = 0) -> Iterator[StepRecord]:
    """Yield the steps of a metrics file after an iteration, in order; those before are not parsed."""
    for line in _lines(metrics_file, after):
        if line["iteration"] > after:
            yield step_from_json(line)


def read_evaluations(metrics_file: Path) -> Iterator[EvalRecord]:
    """Yield the evaluations that belong to a metrics file, in order; none where there was none."""
    if evaluations_path(metrics_file).exists():
        for line in _lines(evaluations_path(metrics_file)):
            yield eval_from_json(line)


def read_events(metrics_file: Path) -> Iterator[EventRecord]:
    """Yield the events that belong to a metrics file, in the order in which they happened; none where there is none."""
    if events_path(metrics_file).exists():
        for facts in _lines(events_path(metrics_file)):
            known = {name: facts.pop(name) for name in _EVENT_KEYS}
            yield EventRecord(**known, facts=facts)


def require_metrics(path: Path) -> None:
    """Refuse a file that does not begin as metrics do, or whose neighbours do not; each may be missing or empty.

    Ranks that do not write check it, too: an error that rank 0 alone finds later would leave them waiting.

    Raises:
        ConfigError: the message names the flag.
    """
    lines = (path, evaluations_path(path), events_path(path))
    for part in (*lines, info_path(path)):
        if part.exists() and not (part.is_file() and os.access(part, os.R_OK | os.W_OK)):
            raise ConfigError(
                f"--metrics-file {path}: {part.name} is no file that may be read and written; move it away, or name "
                "another metrics file"
            )
    for part in lines:
        if part.exists():
            next(_lines(part), None)
    read_info(path)


class JsonlSink(Sink):
    """Appends a line per step to `path`, and lines for evaluations and events to its neighbours; each is flushed.

    A run that was killed leaves lines after its last checkpoint. When the run continues from iteration k those lines
    are cut before the first new one is written, but for events. A run that starts at 0 keeps older files, that about
    the run among them, as `NAME.previous`, if there is a step in them.

    Raises:
        ConfigError: `path` exists and holds something other than metrics; it is left as it was.
    """

    def __init__(self, path: Path, start_iteration: int) -> None:
        self.artifact: Path = path
        self.cut_lines = 0
        """Lines of an abandoned incarnation that were removed at the start."""
        self.missing = 0
        """Steps up to `start_iteration` that the file has no line of."""
        self.totals = Totals()
        """Of the steps up to `start_iteration`."""
        steps, evaluations, events = path, evaluations_path(path), events_path(path)
        # All files are read before one is changed.
        counted_steps = _count(steps, start_iteration, self.totals)
        counted_evaluations, counted_events = _count(evaluations, start_iteration), _count(events, None)
        if start_iteration == 0:
            about = [part for part in (info_path(path), events) if part.exists()]
            records = [part for part in (evaluations, path) if part.exists() and part.stat().st_size]
            # The steps last: where a kill interrupts this, the next start goes on with it.
            for part in [*about, *records]:
                if records:
                    os.replace(part, part.with_name(f"{part.name}.previous"))
                else:  # a start without one step has left it
                    part.unlink()
        else:
            self.cut_lines = _cut(steps, counted_steps) + _cut(evaluations, counted_evaluations)
            _cut(events, counted_events)  # a line that a kill tore apart
        self.missing = start_iteration - counted_steps.kept
        path.parent.mkdir(parents=True, exist_ok=True)
        self._files = {steps: open(steps, "a", encoding="utf-8")}  # noqa: SIM115 (open as long as the run)
        """Those that have a line; that of the steps is there from the start."""
        # Later ones were cut, and earlier ones are not made again.
        self._evaluated = {_identity(one) for one in read_evaluations(path) if one.iteration == start_iteration}

    def has_evaluated(self, split: str) -> bool:
        """Return whether an earlier attempt has evaluated a split with the weights that this one starts from."""
        return any(one[1] == split for one in self._evaluated)

    def _append(self, path: Path, record: StepRecord | EvalRecord | EventRecord) -> None:
        if path not in self._files:
            self._files[path] = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._files[path].write(json.dumps(to_json(record), allow_nan=False) + "\n")
        self._files[path].flush()

    def step(self, record: StepRecord) -> None:
        self._append(self.artifact, record)

    def evaluation(self, record: EvalRecord) -> None:
        """Write an evaluation once: a run that was killed after its last evaluation repeats it after a restart."""
        if _identity(record) not in self._evaluated:
            self._evaluated = {one for one in self._evaluated if one[0] == record.iteration} | {_identity(record)}
            self._append(evaluations_path(self.artifact), record)

    def event(self, record: EventRecord) -> None:
        self._append(events_path(self.artifact), record)

    def flush(self) -> None:
        for file in self._files.values():
            if not file.closed:
                os.fsync(file.fileno())

    def close(self, summary: dict[str, Any] | None) -> None:
        for file in self._files.values():
            file.close()


class EvaluationsSink(Sink):
    """Appends the evaluations of a run that trains nothing to a metrics file's neighbour; no line is taken back."""

    def __init__(self, metrics_file: Path) -> None:
        self.artifact: Path = evaluations_path(metrics_file)
        self.artifact.parent.mkdir(parents=True, exist_ok=True)
        metrics_file.touch()  # from which pictures are drawn
        self._file = open(self.artifact, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)

    def evaluation(self, record: EvalRecord) -> None:
        self._file.write(json.dumps(to_json(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self, summary: dict[str, Any] | None) -> None:
        self._file.close()


def _identity(record: EvalRecord) -> tuple[int, str, int, str]:
    return record.iteration, record.split, record.tokens, float(record.loss).hex()


def _lines(path: Path, after: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the lines of `path` as dicts. A last line cut short by a kill is left out; other bad lines are errors.

    Steps up to the iteration `after` are left out where the beginning of a line is enough to recognize them.
    """
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if after and (head := _HEAD.match(raw)) and int(head[1]) <= after:
                continue
            line = _line(path, number, raw)
            if line is not None:
                yield line


def _line(path: Path, number: int, raw: bytes) -> dict[str, Any] | None:
    """Return a line as a dict; None for a last one cut short by a kill, which alone can lack its end."""
    if not raw.endswith(b"\n") and raw.startswith(b"{"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        line = None
    if not isinstance(line, dict) or not isinstance(line.get("iteration"), int):
        raise ConfigError(
            f"--metrics-file {path}: line {number} is not a line of metrics; name a file of its own for each run"
        )
    return line


# The beginning of a line as `to_json` writes it. What follows grows with layers x experts, to 80 KB with 58 x 256, and
# is not needed to continue a run: a file of a million such lines is read in minutes, and parsed in half an hour.
_HEAD = re.compile(rb'\{"iteration": (\d+), "[^{\[]*?"tokens": (\d+), "seconds": (\d+(?:\.\d+)?(?:e[+-]?\d+)?), ')
_START = b'{"iteration": '


class _Lines(NamedTuple):
    """The lines of a file, a torn one included, and those that are kept, which come first."""

    all: int
    kept: int
    bytes_kept: int


def _count(path: Path, up_to: int | None, totals: Totals | None = None) -> _Lines:
    """Count the lines of a file, and those before the first one that is after `up_to`; without it, but for a torn one.

    Args:
        totals: gets the lines that are kept, which are of steps.

    Raises:
        ConfigError: a line is not one of metrics.
    """
    kept = total = size = 0
    in_front = True
    if not path.exists():
        return _Lines(0, 0, 0)
    with open(path, "rb") as file:
        for raw in file:
            total += 1
            whole = totals is not None and raw.endswith(b"}\n") and raw.find(_START, 1) < 0
            if whole and (head := _HEAD.match(raw)):
                iteration, tokens, seconds = int(head[1]), int(head[2]), float(head[3])
            else:
                line = _line(path, total, raw)
                if line is None:
                    continue
                iteration, tokens, seconds = line["iteration"], line.get("tokens", 0), line.get("seconds", 0.0)
            in_front = in_front and (up_to is None or iteration <= up_to)
            if in_front:
                kept += 1
                size += len(raw)
                if totals is not None:
                    totals.add(iteration, tokens, seconds)
    return _Lines(total, kept, size)


def _cut(path: Path, lines: _Lines) -> int:
    """Cut off the lines that are not kept, which needs no space, as a copy would; return their number."""
    if lines.kept < lines.all:
        with open(path, "r+b") as file:
            file.truncate(lines.bytes_kept)
            os.fsync(file.fileno())
    return lines.all - lines.kept
