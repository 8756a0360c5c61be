"""What a terminal shows below the log lines and draws anew at steps: a panel of the run, or one line of progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_moe.io.texts import duration_text, size_text
from megatron_moe.report.health import load_max_over_mean
from megatron_moe.report.metric import StepRecord
from megatron_moe.report.records import EvalRecord

SMALLEST = (72, 20)
"""Columns and rows of a terminal from which on it gets a panel."""
_WIDEST = 110
_EVENTS, _LAYERS, _NAMES = 3, 6, 9
_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_PARTS_OF_A_BLOCK = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_EVEN, _UNEVEN = 1.5, 2.5
"""Loads from which on a layer's bar is yellow, and red."""
_FULL = 4
"""The load that fills a bar, whatever the other layers have: where all have collapsed, all bars are long."""


class Curve:
    """A number over all steps of this process, in at most twice `room` means of as many steps each."""

    def __init__(self, room: int = 120) -> None:
        self._room = room
        self._means: list[float] = []
        self._steps_of_a_mean, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        """Take the number of one more step; one that is not finite is left out."""
        if value - value != 0:
            return
        self._sum += value
        self._count += 1
        if self._count == self._steps_of_a_mean:
            self._means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._means) == 2 * self._room:
            self._means = _halved(self._means, self._room)
            self._steps_of_a_mean *= 2

    def drawn(self, width: int, *, from_zero: bool = False) -> str:
        """Return the curve in at most `width` characters, with its lowest number at the bottom, or 0."""
        means = _halved(self._means, width) if len(self._means) > width else self._means
        if not means:
            return ""
        low, high = 0.0 if from_zero else min(means), max(means)
        scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
        return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _halved(means: Sequence[float], most: int) -> list[float]:
    """Return means of neighbours, of the fewest that leave at most so many."""
    each = -(-len(means) // most)
    groups = (means[start : start + each] for start in range(0, len(means), each))
    return [sum(group) / len(group) for group in groups]


class View:
    """What is known of a run while it is watched; the part below the log lines is drawn from it.

    Args:
        panel: draw a panel where the terminal has room for it; otherwise a line.
        train_iters: steps of the whole run; None where it has no end.
    """

    def __init__(self, panel: bool, train_iters: int | None, start_iteration: int) -> None:
        self._panel = panel
        self._total, self._done = train_iters, start_iteration
        self._last: StepRecord | None = None
        self._loads: dict[int, float] = {}
        self._load, self._empty = None, 0
        self._title = ""
        self._evaluation: EvalRecord | None = None
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._losses, self._grad_norms, self._rates = Curve(), Curve(), Curve()
        self._began = time.monotonic()
        self._skipped = 0

    def start(self, facts: dict[str, Any]) -> None:
        """Take the facts of the run: device, layout and dtype are its title."""
        self._title = ", ".join(str(facts[name]) for name in ("device", "layout", "dtype") if name in facts)

    def step(self, record: StepRecord) -> None:
        """Take a step. What is not counted at every step stays until it is counted again."""
        self._last, self._done = record, record.iteration
        self._skipped += record.skipped
        if not record.skipped:
            self._losses.add(record.loss)
        if record.grad_norm is not None:
            self._grad_norms.add(record.grad_norm)
        self._rates.add(record.tokens_per_second)
        if record.expert_load is not None:
            self._load, self._empty = record.expert_load, record.empty_experts
        loads = {layer: load_max_over_mean(counts) for layer, counts in record.tokens_per_expert.items()}
        self._loads = {layer: load for layer, load in loads.items() if load is not None} or self._loads

    def evaluation(self, record: EvalRecord) -> None:
        """Take an evaluation."""
        self._evaluation = record if record.tokens else None

    def event(self, text: str) -> None:
        """Take a message; its first line is shown with the time of day."""
        self._events.append(f"{time.strftime('%H:%M:%S')}  {text.partition(chr(10))[0]}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, rows = SMALLEST
        has_room = options.max_width >= columns and console.size.height >= rows
        record = self._last
        if record is None:
            return
        if self._panel and has_room:
            yield self._as_panel(record, min(options.max_width, _WIDEST))
        else:
            yield self._as_line(record)

    def _as_line(self, record: StepRecord) -> RenderableType:
        parts = [self._count(), f"loss {record.loss:.3f}", f"{record.tokens_per_second:,.0f} tok/s"]
        if record.grad_norm is not None:
            parts.append(f"gnorm {record.grad_norm:.2f}")
        if self._load is not None:
            parts.append(f"load {self._load:.2f}")
        parts.append("SKIPPED" if record.skipped else f"left {duration_text(record.seconds_left)}")
        grid = Table.grid(padding=(0, 1))
        grid.add_row(self._bar(20), Text(" ".join(parts), no_wrap=True, overflow="ellipsis"))
        return grid

    def _as_panel(self, record: StepRecord, width: int) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="bold", min_width=_NAMES)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        room = width - 40
        head = Table.grid(padding=(0, 1))
        left = f"left {duration_text(record.seconds_left)}" if self._total else ""
        steps = Text(f"{self._count()}  {left}")
        if self._skipped:
            steps.append(f"  SKIPPED {self._skipped}", "bold red")
        head.add_row(self._bar(width - 60), steps)
        grid.add_row("steps", head)
        loss = Text.assemble((self._losses.drawn(room), "cyan"), f"  {record.loss:.4f}")
        if self._evaluation is not None:
            loss.append(f"  {self._evaluation.split} {self._evaluation.loss:.4f}")
        grid.add_row("loss", loss)
        if record.grad_norm is not None:
            grid.add_row("grad norm", Text(f"{self._grad_norms.drawn(room)}  {record.grad_norm:.3f}"))
        speed = f"{self._rates.drawn(room, from_zero=True)}  {record.tokens_per_second:,.0f}"
        grid.add_row("tokens/s", Text(speed))
        memory = f"  memory {size_text(record.memory_bytes)}" if record.memory_bytes else ""
        grid.add_row("speed", Text(f"{record.model_tflops:.3g} TFLOP/s{_share(record.mfu)}{memory}"))
        for name, text in self._rows_of_loads(room):
            grid.add_row(name, text)
        for number, event in enumerate(self._events):
            grid.add_row("" if number else "events", Text(event, style="dim"))
        running = duration_text(time.monotonic() - self._began)
        clock = f"{time.strftime('%H:%M:%S')}, for {running}"
        return Panel(grid, title=self._title or None, title_align="left", subtitle=clock, subtitle_align="right",
                     width=width)  # fmt: skip

    def _rows_of_loads(self, room: int) -> list[tuple[str, Text]]:
        """Return a row for each of the most uneven layers, in the order of the model."""
        worst = sorted(sorted(self._loads, key=self._loads.__getitem__)[-_LAYERS:])
        of = f"; worst {len(worst)} of {len(self._loads)} layers" if len(worst) < len(self._loads) else ""
        rows = []
        for layer in worst:
            load = self._loads[layer]
            colour = "green" if load < _EVEN else "yellow" if load < _UNEVEN else "red"
            text = Text.assemble((_bar(min(load / _FULL, 1.0), room), colour), f"  {load:.2f}")
            rows.append((f"layer {layer}", text))
        if rows:
            rows.insert(0, ("load", Text(f"busiest expert / mean; {self._empty} empty{of}")))
        return rows

    def _bar(self, width: int) -> ProgressBar:
        return ProgressBar(total=self._total, completed=self._done, width=max(width, 10), pulse=self._total is None)

    def _count(self) -> str:
        return f"{self._done}/{self._total}" if self._total else str(self._done)


def _share(mfu: float | None) -> str:
    return "" if mfu is None else f", MFU {100 * mfu:.1f}%"


def _bar(share: float, width: int) -> str:
    """Return a bar of up to `width` characters, exact to an eighth of one."""
    eighths = round(share * width * 8)
    return "\u2588" * (eighths // 8) + _PARTS_OF_A_BLOCK[eighths % 8].strip()
