"""The files of a run, read as a stream into bounded memory: what a page of the run shows, up to the last line written.

Lines are taken as they are: older files lack keys, other programs' files have more, a last line may be torn.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron_moe.report.jsonl import evaluations_path, events_path
from megatron_moe.report.run_info import read_info
from megatron_moe_tools.report.course import Course, LayerCourse
from megatron_moe_tools.report.watch import StepWatch

_ROOM, _ROOM_OF_LOADS, _ROOM_OF_HEALTH = 1000, 150, 60
_WINDOW, _DEAD_STEPS = 100, 20
_NO_SERIES = {"iteration", "tokens_per_expert", "dropped_per_expert", "health", "seconds_left", "attempt", "tokens"}
_WORST = {"effective_experts": min, "flip_rate": max, "margin_mean": min, "margin_p5": min, "max_logit": max,
          "bias_min": min, "bias_max": max}  # fmt: skip
_OF_A_LAYER = (*_WORST, "bias_mean")
_OF_ROUNDING = ("first_moment_rounding", "second_moment_rounding", "update_rounding")


class GrowingLines:
    """The lines of a file that grows; a line is taken when its end is there."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.bad = 0
        """Lines that are not JSON objects with an iteration."""

    def was_cut(self) -> bool:
        """Return whether the file is shorter than what was read: another attempt took lines back."""
        return self._path.exists() and self._path.stat().st_size < self._offset

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the lines since the last call."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._offset += len(raw)
                try:
                    line = json.loads(raw)
                except ValueError:
                    line = None
                if isinstance(line, dict) and isinstance(line.get("iteration"), int):
                    yield line
                else:
                    self.bad += 1


class RunState:
    """Everything that a page shows of one run, kept up to date by `update`."""

    def __init__(self, metrics_file: Path) -> None:
        self.metrics_file = metrics_file
        self._begin()

    def _begin(self) -> None:
        self._steps, self._evaluated = (
            GrowingLines(self.metrics_file),
            GrowingLines(evaluations_path(self.metrics_file)),
        )
        self._happened = GrowingLines(events_path(self.metrics_file))
        self.course, self.evaluations = Course(_ROOM), dict[str, Course]()
        self.loads, self.health = LayerCourse(_ROOM_OF_LOADS), LayerCourse(_ROOM_OF_HEALTH)
        self.experts = ExpertWindow()
        self.watch = StepWatch()
        self.events: deque[dict[str, Any]] = deque(maxlen=400)
        self.saves: deque[int] = deque(maxlen=400)
        self.event_counts: Counter[str] = Counter()
        self.info: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.last_evaluation: dict[str, dict[str, Any]] = {}
        self.count = self.repeated = 0
        self.tokens, self.seconds = 0.0, 0.0
        self._start: float | None = None

    @property
    def bad_lines(self) -> int:
        """Return how many lines of the run's files could not be read."""
        return self._steps.bad + self._evaluated.bad + self._happened.bad

    def update(self, most_seconds: float = math.inf) -> bool:
        """Read what the files have more than at the last call; all of it where lines were taken back.

        Args:
            most_seconds: how long to read steps; the next call goes on.

        Returns:
            Whether all was read.

        Raises:
            ConfigError: the file about the run is something else, see `run_info.read_info`.
        """
        if self._steps.was_cut() or self._evaluated.was_cut():
            self._begin()
        self.info = read_info(self.metrics_file)
        self.watch.clip = (self.info.get("all_flags") or {}).get("clip_grad")
        until = time.monotonic() + most_seconds
        for line in self._steps.new():
            self._step(line)
            if time.monotonic() > until:
                return False
        for line in self._evaluated.new():
            self._evaluation(line)
        for line in self._happened.new():
            self._event(line)
        return True

    def _step(self, line: dict[str, Any]) -> None:
        iteration = line["iteration"]
        if self.last and iteration <= self.last["iteration"]:
            self.repeated += 1
            for kept in (self.course, self.loads, self.health):
                kept.forget_from(iteration)
        self.last, self.count = line, self.count + 1
        values = _numbers_of(line)
        self.tokens += values.get("tokens", 0.0)
        self.seconds += values.get("seconds", 0.0)
        values.update(iteration=iteration, total_tokens=self.tokens, hours=self._hours(line))
        self.watch.step(line, values)
        if line.get("skipped"):
            values["skipped"] = 1.0
            values.pop("loss", None)
        if line.get("loss") is None or ("loss" not in values and not line.get("skipped")):
            values["not_finite"] = 1.0
        counts = line.get("tokens_per_expert")
        if isinstance(counts, dict) and counts:
            self._take_loads(iteration, counts)
        health = line.get("health")
        if isinstance(health, dict):
            self._take_health(iteration, health, values)
        self.course.add(iteration, values)

    def _hours(self, line: dict[str, Any]) -> float:
        """Return hours since the first step; without clock times, hours of training."""
        at = _time(line.get("time"))
        if at is None:
            return self.seconds / 3600
        if self._start is None:
            self._start = at - float(line.get("seconds") or 0.0)
        return (at - self._start) / 3600

    def _take_loads(self, iteration: int, counts: dict[str, list[int]]) -> None:
        layers = sorted(int(layer) for layer in counts)
        rows = [counts[str(layer)] for layer in layers]
        if len({len(row) for row in rows}) != 1 or not rows[0]:
            return
        table = np.array(rows, dtype=np.int64)
        mean = table.mean(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            load = np.where(mean > 0, table.max(axis=1) / mean, np.nan)
        self.loads.add(iteration, layers, {"load": load, "dead": (table == 0).sum(axis=1).astype(float)})
        self.experts.add(iteration, layers, table)

    def _take_health(self, iteration: int, health: dict[str, Any], values: dict[str, float]) -> None:
        for name in ("dense_grad_norm", "expert_grad_norm", "skip_rate", *_OF_ROUNDING):
            _put(values, f"health.{name}", health.get(name))
        if health.get("gradient_additions"):
            values["health.gradient_lost"] = health["gradient_swallowed"] / health["gradient_additions"]
        by_layer = {int(number): {**layer, **(layer.get("load") or {})} for number, layer in health["layers"].items()}
        layers = sorted(by_layer)
        for name, worst in _WORST.items():
            found = [by_layer[layer].get(name) for layer in layers]
            known = [value for value in found if value is not None]
            if known:
                values[f"health.{name}"] = worst(known)
        figures = {
            name: np.array([_or_nan(by_layer[layer].get(name)) for layer in layers], dtype=float)
            for name in _OF_A_LAYER
        }
        known_figures = {name: values for name, values in figures.items() if np.isfinite(values).any()}
        if layers and known_figures:
            self.health.add(iteration, layers, known_figures)

    def _evaluation(self, line: dict[str, Any]) -> None:
        split = str(line.get("split"))
        values: dict[str, float] = {"iteration": line["iteration"]}
        _put(values, "loss", line.get("loss"))
        course = self.evaluations.setdefault(split, Course(_ROOM))
        course.forget_from(line["iteration"])
        course.add(line["iteration"], values)
        self.last_evaluation[split] = line

    def _event(self, line: dict[str, Any]) -> None:
        kind = str(line.get("kind"))
        self.event_counts[kind] += 1
        if kind == "saved":
            self.saves.append(line["iteration"])
        if kind != "message":
            self.events.append({**line, "kind": kind, "text": str(line.get("text") or "")[:2000]})


class ExpertWindow:
    """The tokens of every expert over the last counted steps: between `_WINDOW` of them and twice as many."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._blocks: list[tuple[int, int, int, np.ndarray]] = []
        self._silent = np.zeros((0, 0), dtype=np.int64)
        self._counted = 0

    def add(self, iteration: int, layers: list[int], table: np.ndarray) -> None:
        """Take [L, E] counts of one step."""
        if layers != self._layers or (self._blocks and self._blocks[-1][3].shape != table.shape):
            self._layers, self._blocks, self._counted = layers, [], 0
        if not self._blocks:
            self._silent = np.zeros_like(table)
        self._silent, self._counted = np.where(table > 0, 0, self._silent + 1), self._counted + 1
        if not self._blocks or self._blocks[-1][2] == _WINDOW:
            self._blocks = [*self._blocks[-1:], (iteration, iteration, 0, np.zeros_like(table))]
        first, _, steps, total = self._blocks[-1]
        self._blocks[-1] = (first, iteration, steps + 1, total + table)

    def dead(self) -> np.ndarray:
        """Return [L, E] whether an expert got no token in the last `_DEAD_STEPS` counted steps, or all of fewer."""
        return self._silent >= min(_DEAD_STEPS, self._counted)

    def load(self) -> np.ndarray | None:
        """Return [L, E] tokens over the layer's mean; None where nothing was counted."""
        if not self._blocks:
            return None
        total = sum(block[3] for block in self._blocks)
        mean = np.asarray(total).mean(axis=1, keepdims=True)
        found: np.ndarray = total / np.maximum(mean, 1e-9)
        return found

    def as_json(self) -> dict[str, Any] | None:
        """Return layers, from, to, steps, load by layer and expert, and dead, pairs of a place in layers and an expert.

        None where nothing was counted.
        """
        load = self.load()
        if load is None:
            return None
        rows = [[float(f"{value:.3g}") for value in row] for row in load.tolist()]
        span = {"from": self._blocks[0][0], "to": self._blocks[-1][1], "steps": sum(block[2] for block in self._blocks)}
        dead = np.argwhere(self.dead()).tolist()
        return {
            "layers": self._layers,
            **span,
            "load": rows,
            "dead": dead,
            "deadSteps": min(_DEAD_STEPS, self._counted),
        }


def _numbers_of(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by name; those of an object or list are NAME.KEY."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = value
        elif name in _NO_SERIES:
            continue
        elif isinstance(value, dict):
            for key, inner in value.items():
                _put(found, f"{name}.{key}", inner)
        elif isinstance(value, list):
            for number, inner in enumerate(value, start=1):
                _put(found, f"{name}.{number}", inner)
    return {name: value for name, value in found.items() if name == "tokens" or name not in _NO_SERIES}


def _put(values: dict[str, float], name: str, value: Any) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        values[name] = value


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)


def _time(text: Any) -> float | None:
    """Return seconds since 1970 of a time in ISO 8601; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
