"""The course of a run in bounded memory: numbers over iterations, and layers over iterations, in bins that grow.

A bin covers `width` iterations. Where there are more than twice `room` bins, neighbours join and the width doubles,
so a run of any length keeps between `room` and twice `room` of them. A bin keeps the extremes and the mean, so that a
peak of one step is seen however long the run is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MOST_SERIES = 200
"""Names of numbers that a course takes; those of a file that has more are left out."""


class Course:
    """Numbers by name over iterations: of each bin and name the least, the largest, the sum and how many there are."""

    def __init__(self, room: int) -> None:
        self._room, self.width, self._first = room, 1, 0
        self._bins: dict[int, dict[str, list[float]]] = {}
        self._names: dict[str, None] = {}

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one iteration; those that are not finite are left out."""
        if not self._bins:
            self._first = iteration
        elif iteration < self._first:
            return
        while (iteration - self._first) // self.width >= 2 * self._room:
            self._join()
        cells = self._bins.setdefault((iteration - self._first) // self.width, {})
        for name, value in values.items():
            cell = cells.get(name)
            if value - value != 0:
                continue
            if cell is not None:
                if value < cell[0]:
                    cell[0] = value
                elif value > cell[1]:
                    cell[1] = value
                cell[2] += value
                cell[3] += 1
            elif name in self._names or len(self._names) < MOST_SERIES:
                self._names[name] = None
                cells[name] = [value, value, value, 1]

    def forget_from(self, iteration: int) -> None:
        """Drop the bins that begin at this iteration or later: their steps were repeated."""
        kept = {at: cells for at, cells in self._bins.items() if self._first + at * self.width < iteration}
        self._bins = kept

    def rows(self) -> dict[str, dict[str, list[float | None]]]:
        """Return name -> mean, and where they differ low and high, each a list over the bins that have anything."""
        found: dict[str, dict[str, list[float | None]]] = {}
        bins = [self._bins[at] for at in sorted(self._bins)]
        for name in self._names:
            cells = [cells.get(name) for cells in bins]
            columns = {"mean": [None if cell is None else short(cell[2] / cell[3]) for cell in cells]}
            if any(cell is not None and cell[0] != cell[1] for cell in cells):
                columns["low"] = [None if cell is None else short(cell[0]) for cell in cells]
                columns["high"] = [None if cell is None else short(cell[1]) for cell in cells]
            found[name] = columns
        return found

    def sums(self, name: str) -> list[float]:
        """Return the sum of a number over each bin that has anything, 0 where it has none of these."""
        return [self._bins[at].get(name, (0, 0, 0.0, 0))[2] for at in sorted(self._bins)]

    def _join(self) -> None:
        joined: dict[int, dict[str, list[float]]] = {}
        for at, cells in self._bins.items():
            into = joined.setdefault(at // 2, {})
            for name, (low, high, total, count) in cells.items():
                old = into.get(name)
                into[name] = (
                    [low, high, total, count]
                    if old is None
                    else [min(low, old[0]), max(high, old[1]), total + old[2], count + old[3]]
                )
        self._bins, self.width = joined, 2 * self.width


class LayerCourse:
    """Figures of layers over iterations: of each bin, figure and layer the mean and the largest value."""

    def __init__(self, room: int) -> None:
        self._room, self._width, self._first = room, 1, 0
        self._columns: dict[int, dict[str, Any]] = {}
        self.layers: list[int] = []

    def add(self, iteration: int, layers: list[int], figures: Mapping[str, np.ndarray]) -> None:
        """Take figures of all layers, name -> [L] with NaN where there is none; other layers start it anew."""
        if layers != self.layers:
            self.layers, self._columns, self._width = layers, {}, 1
        if not self._columns:
            self._first = iteration
        elif iteration < self._first:
            return
        column: dict[str, Any] = {"from": iteration, "to": iteration, "figures": {}}
        for name, values in figures.items():
            known = np.isfinite(values)
            column["figures"][name] = [np.where(known, values, 0.0), known.astype(np.int64), values]
        while (iteration - self._first) // self._width >= 2 * self._room:
            old, self._width = self._columns, 2 * self._width
            self._columns = {}
            for at, earlier in old.items():
                self._put(at // 2, earlier)
        self._put((iteration - self._first) // self._width, column)

    def forget_from(self, iteration: int) -> None:
        """Drop the bins that begin at this iteration or later."""
        self._columns = {at: column for at, column in self._columns.items() if column["from"] < iteration}

    def _put(self, at: int, column: dict[str, Any]) -> None:
        into = self._columns.get(at)
        if into is None:
            self._columns[at] = column
            return
        into["from"], into["to"] = min(into["from"], column["from"]), max(into["to"], column["to"])
        for name, (total, count, high) in column["figures"].items():
            if name in into["figures"]:
                old = into["figures"][name]
                into["figures"][name] = [old[0] + total, old[1] + count, np.fmax(old[2], high)]
            else:
                into["figures"][name] = [total, count, high]

    def as_json(self, with_high: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """Return layers, from and to of each column, and name -> columns of a value per layer; None where it is empty.

        Args:
            with_high: figures of which NAME_high are the largest values of each column.
        """
        if not self._columns:
            return None
        columns = [self._columns[at] for at in sorted(self._columns)]
        names = {name: None for column in columns for name in column["figures"]}
        figures: dict[str, Any] = {}
        for name in names:
            cells = [column["figures"].get(name) for column in columns]
            empty = [None] * len(self.layers)
            means = [
                empty if cell is None else numbers(np.where(cell[1] > 0, cell[0] / np.maximum(cell[1], 1), np.nan))
                for cell in cells
            ]
            figures[name] = means
            if name in with_high:
                figures[f"{name}_high"] = [empty if cell is None else numbers(cell[2]) for cell in cells]
        edges = {edge: [column[edge] for column in columns] for edge in ("from", "to")}
        return {"layers": self.layers, **edges, "figures": figures}


def short(value: float) -> float:
    """Return a number in six digits; whole numbers up to 2^53 stay what they are."""
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")


def numbers(values: np.ndarray) -> list[float | None]:
    """Return [N] as numbers in four digits, None for what is not finite."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values.tolist()]
