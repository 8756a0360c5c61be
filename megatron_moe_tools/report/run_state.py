"""What a page shows of a run, read from its growing files into bounded memory, up to the last line written.

Lines are taken as they are: older files lack keys, other programs' files have more, a last line may be torn.

A series keeps its numbers in bins of `width` iterations. Where there are more than twice `room` bins, neighbours join
and the width doubles, so a run of any length keeps between `room` and twice `room` bins. A bin keeps the extremes and
the mean, so that a peak of one step is seen however long the run is.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron_moe.report.jsonl import evaluations_path, events_path
from megatron_moe.report.plot import SourceLoads
from megatron_moe.report.run_info import read_info

MOST_SERIES = 200
"""Names of numbers that a series takes; those of a file that has more are left out."""
_BINS, _BINS_OF_LOADS, _BINS_OF_HEALTH = 1000, 150, 60
_WINDOW, _DEAD_STEPS = 100, 20
_MOST_EVENTS, _MOST_SPIKES = 400, 200
_NO_SERIES = {"iteration", "tokens_per_expert", "dropped_per_expert", "health", "seconds_left", "attempt"}
_WORST = {"effective_experts": min, "flip_rate": max, "margin_mean": min, "margin_p5": min, "max_logit": max,
          "bias_min": min, "bias_max": max}  # fmt: skip
_OF_A_LAYER = (*_WORST, "bias_mean")
_OF_A_RUN = (
    "dense_grad_norm", "expert_grad_norm", "skip_rate",
    "first_moment_rounding", "second_moment_rounding", "update_rounding",
)  # fmt: skip

_STEPS_COMPARED, _ENOUGH_STEPS = 64, 20
_SPIKE_DEVIATIONS, _LEAST_SPIKE = 8.0, 0.1
_NORM_SPIKE, _SLOW = 8.0, 3.0

Line = dict[str, Any]
Numbers = dict[Any, float]
_NOTHING = [math.nan, math.nan, math.nan, 1]


class Series:
    """Numbers by name over iterations: of each bin and name the least, the largest, the sum and how many there are."""

    def __init__(self, room: int, most_names: int = MOST_SERIES) -> None:
        self.width = 1
        self._room, self._most_names, self._first = room, most_names, 0
        self._bins: dict[int, dict[Any, list[float]]] = {}
        self._names: dict[Any, None] = {}

    def add(self, iteration: int, values: Mapping[Any, float]) -> None:
        """Take the numbers of one iteration, which is one of them; those that are not finite are left out."""
        if not self._bins:
            self._first = iteration
        elif iteration < self._first:
            return
        while (iteration - self._first) // self.width >= 2 * self._room:
            narrow, self._bins = self._bins, {}
            self.width *= 2
            for number, cells in narrow.items():
                wide = self._bins.setdefault(number // 2, cells)
                if wide is not cells:
                    _merge(wide, cells)
        cells = self._bins.setdefault((iteration - self._first) // self.width, {})
        for name, value in (("iteration", iteration), *values.items()):
            if value - value != 0:
                continue
            cell = cells.get(name)
            if cell is not None:
                if value < cell[0]:
                    cell[0] = value
                elif value > cell[1]:
                    cell[1] = value
                cell[2] += value
                cell[3] += 1
            elif name in self._names or len(self._names) < self._most_names:
                self._names[name] = None
                cells[name] = [value, value, value, 1]

    def forget_from(self, iteration: int) -> None:
        """Drop the bins with nothing before this iteration: their steps were repeated."""
        for number, cells in list(self._bins.items()):
            if cells["iteration"][0] >= iteration:
                del self._bins[number]

    def in_order(self) -> list[dict[Any, list[float]]]:
        """Return the bins that have anything: name -> least, largest, sum, count."""
        return [self._bins[number] for number in sorted(self._bins)]

    def rows(self) -> dict[str, dict[str, list[float | None]]]:
        """Return name -> mean, and where they differ low and high, each a list over the bins that have anything."""
        bins, found = self.in_order(), {}
        for name in self._names:
            means, lows, highs, differ = [], [], [], False
            for cells in bins:
                low, high, total, count = cells.get(name, _NOTHING)
                means.append(short(total / count))
                lows.append(short(low))
                highs.append(short(high))
                differ = differ or low < high
            found[name] = {"mean": means}
            if differ:
                found[name].update(low=lows, high=highs)
        return found

    def sums(self, name: str) -> list[float]:
        """Return the sum of a number over each bin that has anything, 0 where it has none of these."""
        return [cells.get(name, (0, 0, 0.0, 0))[2] for cells in self.in_order()]


def _merge(into: dict[Any, list[float]], cells: dict[Any, list[float]]) -> None:
    for name, (low, high, total, count) in cells.items():
        old = into.get(name, (low, high, 0, 0))
        into[name] = [min(low, old[0]), max(high, old[1]), total + old[2], count + old[3]]


class LayerSeries:
    """Figures of layers over iterations: of each bin, figure and layer the mean and the largest value."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._start([])

    def _start(self, layers: list[int]) -> None:
        self.layers = layers
        self._figures: dict[str, None] = {}
        self._series = Series(self._room, MOST_SERIES * (1 + len(layers)))

    def add(self, iteration: int, layers: list[int], figures: Mapping[str, Sequence[float]]) -> None:
        """Take figures of all layers, name -> L numbers with NaN where there is none; other layers start it anew."""
        if layers != self.layers:
            self._start(layers)
        self._figures.update(dict.fromkeys(figures))
        values: Numbers = {}
        for name, column in figures.items():
            for row, value in enumerate(column):
                values[name, row] = value
        self._series.add(iteration, values)

    def forget_from(self, iteration: int) -> None:
        """Drop the columns with nothing before this iteration."""
        self._series.forget_from(iteration)

    def as_json(self, with_high: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """Return layers, from and to of each column, and name -> columns of a value per layer; None where it is empty.

        Args:
            with_high: figures of which NAME_high are the largest values of each column.
        """
        columns = self._series.in_order()
        if not columns:
            return None
        figures: dict[str, list[list[float | None]]] = {}
        for name in self._figures:
            highs: list[list[float | None]] = []
            figures[name] = []
            for cells in columns:
                figures[name].append([])
                highs.append([])
                for row in range(len(self.layers)):
                    _, high, total, count = cells.get((name, row), _NOTHING)
                    figures[name][-1].append(short(total / count, 4))
                    highs[-1].append(short(high, 4))
            if name in with_high:
                figures[f"{name}_high"] = highs
        begins, ends = [], []
        for cells in columns:
            begins.append(cells["iteration"][0])
            ends.append(cells["iteration"][1])
        return {"layers": self.layers, "from": begins, "to": ends, "figures": figures}


def short(value: float, digits: int = 6) -> float | None:
    """Return a number in so many digits, None for NaN; whole numbers up to 2^53 stay what they are."""
    if math.isnan(value):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{digits}g}")


@dataclass
class _Block:
    """The tokens of up to `_WINDOW` steps, of the iterations `first` to `last`."""

    first: int
    last: int
    steps: int
    tokens: np.ndarray


class ExpertWindow:
    """The tokens of every expert over the last counted steps: between `_WINDOW` of them and twice as many."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._blocks: list[_Block] = []
        self._silent = np.zeros((0, 0), dtype=np.int64)
        self._counted = 0

    def add(self, iteration: int, layers: list[int], table: np.ndarray) -> None:
        """Take [L, E] counts of one step."""
        if layers != self._layers or (self._blocks and self._blocks[-1].tokens.shape != table.shape):
            self._layers, self._blocks, self._counted = layers, [], 0
        if not self._blocks:
            self._silent = np.zeros_like(table)
        self._silent, self._counted = np.where(table > 0, 0, self._silent + 1), self._counted + 1
        if not self._blocks or self._blocks[-1].steps == _WINDOW:
            self._blocks = [*self._blocks[-1:], _Block(iteration, iteration, 0, np.zeros_like(table))]
        block = self._blocks[-1]
        block.last, block.steps, block.tokens = iteration, block.steps + 1, block.tokens + table

    def dead(self) -> np.ndarray:
        """Return [L, E] whether an expert got no token in the last `_DEAD_STEPS` counted steps, or all of fewer."""
        return self._silent >= min(_DEAD_STEPS, self._counted)

    def load(self) -> np.ndarray | None:
        """Return [L, E] tokens over the layer's mean; None where nothing was counted."""
        if not self._blocks:
            return None
        total = np.sum([block.tokens for block in self._blocks], axis=0)
        load: np.ndarray = total / np.maximum(total.mean(axis=1, keepdims=True), 1e-9)
        return load

    def as_json(self) -> dict[str, Any] | None:
        """Return layers, from, to, steps, load by layer and expert, and dead, pairs of a place in layers and an expert.

        None where nothing was counted.
        """
        load, rows = self.load(), []
        if load is None:
            return None
        for row in load.tolist():
            rows.append([short(value, 3) for value in row])
        return {
            "layers": self._layers,
            "from": self._blocks[0].first,
            "to": self._blocks[-1].last,
            "steps": sum(block.steps for block in self._blocks),
            "load": rows,
            "dead": np.argwhere(self.dead()).tolist(),
            "deadSteps": min(_DEAD_STEPS, self._counted),
        }


class StepWatch:
    """Counts and places of unusual steps, each compared with the steps shortly before it.

    A loss spikes where it is above the median of the last 64 by 8 deviations (of the median absolute deviation) and by
    a tenth of it; a gradient norm where it is 8 times the median; a step is slow where it takes 3 times the median.
    """

    def __init__(self) -> None:
        self.clip: float | None = None
        """The norm from which on gradients are clipped, where the run's flags are known."""
        self.skipped = self.not_finite = self.clipped = self.norms = self.slow = 0
        self.skipped_in_a_row = 0
        """The skipped steps since the last one that was applied."""
        self.seconds_lost = 0.0
        self.last_skipped: int | None = None
        self.spikes: deque[tuple[int, float]] = deque(maxlen=_MOST_SPIKES)
        self.spike_count = self.norm_spikes = 0
        self.first_not_finite: int | None = None
        self._losses: deque[float] = deque(maxlen=_STEPS_COMPARED)
        self._norms: deque[float] = deque(maxlen=_STEPS_COMPARED)
        self._times: deque[float] = deque(maxlen=_STEPS_COMPARED)

    def step(self, line: Line, values: Numbers) -> None:
        """Take a step: its line, and the finite numbers of it by name."""
        iteration = line["iteration"]
        loss, norm, seconds = values.get("loss"), values.get("grad_norm"), values.get("seconds")
        if line.get("skipped"):
            self.skipped += 1
            self.last_skipped = iteration
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
        if loss is None:
            self.not_finite += 1
            self.first_not_finite = self.first_not_finite or iteration
        elif not line.get("skipped"):
            if len(self._losses) >= _ENOUGH_STEPS:
                middle = _median(self._losses)
                deviation = 1.4826 * _median(abs(earlier - middle) for earlier in self._losses)
                if loss > middle + max(_SPIKE_DEVIATIONS * deviation, _LEAST_SPIKE * abs(middle)):
                    self.spike_count += 1
                    self.spikes.append((iteration, loss))
            self._losses.append(loss)
        if norm is not None:
            self.norms += 1
            self.clipped += bool(self.clip) and norm > (self.clip or 0)
            if len(self._norms) >= _ENOUGH_STEPS and norm > _NORM_SPIKE * _median(self._norms):
                self.norm_spikes += 1
            self._norms.append(norm)
        if seconds is not None:
            if len(self._times) >= _ENOUGH_STEPS and seconds > _SLOW * _median(self._times):
                self.slow += 1
                self.seconds_lost += seconds - _median(self._times)
            self._times.append(seconds)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2])


class GrowingLines:
    """The lines of a file that grows; a line is taken when its end is there."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.bad = 0
        """Lines that are not JSON objects with an iteration."""

    def was_cut(self) -> bool:
        """Return whether the file is shorter than what was read: another attempt took lines back."""
        return self._path.exists() and self._path.stat().st_size < self._offset

    def new(self) -> Iterator[Line]:
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
    """Everything that a page shows of one run, kept up to date by `update`.

    layer: the load of each of its experts is kept over time, which takes too much memory for all layers.
    """

    def __init__(self, metrics_file: Path, layer: int | None = None) -> None:
        self.metrics_file, self.layer = metrics_file, layer
        self._begin()

    def _begin(self) -> None:
        self._steps = GrowingLines(self.metrics_file)
        self._evaluated = GrowingLines(evaluations_path(self.metrics_file))
        self._happened = GrowingLines(events_path(self.metrics_file))
        self.series = Series(_BINS)
        self.evaluations: dict[str, Series] = {}
        self.loads, self.health = LayerSeries(_BINS_OF_LOADS), LayerSeries(_BINS_OF_HEALTH)
        self.source_loads = SourceLoads()
        self.experts, self.experts_of_layer = ExpertWindow(), LayerSeries(_BINS_OF_LOADS)
        self.watch = StepWatch()
        self.events: deque[Line] = deque(maxlen=_MOST_EVENTS)
        self.saves: deque[int] = deque(maxlen=_MOST_EVENTS)
        self.event_counts: Counter[str] = Counter()
        self.info: dict[str, Any] = {}
        self.last: Line = {}
        self.last_evaluation: dict[str, Line] = {}
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
            kind = str(line.get("kind"))
            self.event_counts[kind] += 1
            if kind == "saved":
                self.saves.append(line["iteration"])
            if kind != "message":
                self.events.append({**line, "kind": kind, "text": str(line.get("text") or "")[:2000]})
        return True

    def _step(self, line: Line) -> None:
        iteration = line["iteration"]
        if self.last and iteration <= self.last["iteration"]:
            self.repeated += 1
            for kept in (self.series, self.loads, self.experts_of_layer, self.health):
                kept.forget_from(iteration)
        self.last, self.count = line, self.count + 1
        values: Numbers = {}  # the finite numbers of the line by name; those of an object or list are NAME.KEY
        for name, value in line.items():
            if name in _NO_SERIES:
                continue
            if isinstance(value, dict):
                for key, inner in value.items():
                    if isinstance(inner, dict):
                        inner = inner.get("loss")  # of a source
                    _put(values, f"{name}.{key}", inner)
            elif isinstance(value, list):
                for number, inner in enumerate(value, start=1):
                    _put(values, f"{name}.{number}", inner)
            else:
                _put(values, name, value)
        self.tokens += values.get("tokens", 0.0)
        self.seconds += values.get("seconds", 0.0)
        hours, at = self.seconds / 3600, seconds_of(line.get("time"))
        if at is not None:  # since the first step; without clock times, of training
            if self._start is None:
                self._start = at - float(line.get("seconds") or 0.0)
            hours = (at - self._start) / 3600
        values.update(total_tokens=self.tokens, hours=hours)
        self.watch.step(line, values)
        if line.get("skipped"):
            values["skipped"] = 1.0
            for name in list(values):
                if name == "loss" or name.startswith("sources."):
                    del values[name]
        if line.get("loss") is None or ("loss" not in values and not line.get("skipped")):
            values["not_finite"] = 1.0
        counts = line.get("tokens_per_expert")
        if isinstance(counts, dict) and counts:
            layers = sorted(map(int, counts))
            rows = list(map(counts.__getitem__, map(str, layers)))
            if rows[0] and len(set(map(len, rows))) == 1:
                table = np.array(rows, dtype=np.int64)
                mean = table.mean(axis=1)
                with np.errstate(divide="ignore", invalid="ignore"):
                    load = np.where(mean > 0, table.max(axis=1) / mean, np.nan)
                dead = (table == 0).sum(axis=1).astype(float)
                self.loads.add(iteration, layers, {"load": load.tolist(), "dead": dead.tolist()})
                self.experts.add(iteration, layers, table)
                if self.layer in layers:
                    row = table[layers.index(self.layer)]
                    loads = (row / max(row.mean(), 1e-9)).tolist()
                    self.experts_of_layer.add(iteration, list(range(len(row))), {"load": loads})
        health = line.get("health")
        if isinstance(health, dict):
            self._take_health(iteration, health, values)
        self.series.add(iteration, values)

    def _take_health(self, iteration: int, health: Line, values: Numbers) -> None:
        for name in _OF_A_RUN:
            _put(values, f"health.{name}", health.get(name))
        if health.get("gradient_additions"):
            values["health.gradient_lost"] = health["gradient_swallowed"] / health["gradient_additions"]
        layers = sorted(map(int, health["layers"]))
        by_source = {}
        for layer in layers:
            by_source[layer] = health["layers"][str(layer)].get("tokens_per_source") or {}
        self.source_loads.add(iteration, by_source)
        figures = {}
        for name in _OF_A_LAYER:
            found: Numbers = {}
            for row, layer in enumerate(layers):
                of_layer = health["layers"][str(layer)]
                _put(found, row, {**of_layer, **(of_layer.get("load") or {})}.get(name))
            if found:
                figures[name] = [found.get(row, math.nan) for row in range(len(layers))]
                if name in _WORST:
                    values[f"health.{name}"] = _WORST[name](found.values())
        if figures:
            self.health.add(iteration, layers, figures)

    def _evaluation(self, line: Line) -> None:
        split = str(line.get("split"))
        values: Numbers = {}
        _put(values, "loss", line.get("loss"))
        series = self.evaluations.setdefault(split, Series(_BINS))
        series.forget_from(line["iteration"])
        series.add(line["iteration"], values)
        self.last_evaluation[split] = line


def _put(values: Numbers, name: object, value: object) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        values[name] = value


def seconds_of(text: object) -> float | None:
    """Return seconds since 1970 of a time in ISO 8601; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
