"""The lines of a log, in ASCII except a user's own text, and on a terminal a panel or a progress line below them."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_moe.io.texts import duration_text, size_text
from megatron_moe.report.health import load_max_over_mean
from megatron_moe.report.metric import metrics
from megatron_moe.report.records import EvalRecord, StepRecord
from megatron_moe.report.sink import Sink

LEGEND: tuple[tuple[str, str], ...] = (
    ("iteration", "optimizer steps that are done, those that were skipped included, of --train-iters"),
    ("loss", "nats per token of the global batch, the mean over the steps since the last line that were applied"),
    ("mtp", "the same of each further predicted token (--mtp-num-layers)"),
    ("SKIPPED", "steps since the last line that were not applied, in fp16 because a gradient was not finite"),
    ("lr", "the learning rate of the step"),
    ("grad norm", "the norm of all gradients before they are clipped (--clip-grad)"),
    ("params norm", "the norm of all weights after the step (--log-params-norm)"),
    ("num zeros", "elements of all gradients that are 0 (--log-num-zeros-in-grad)"),
    ("max attention logit", "the largest logit of any attention head (--qk-clip, --log-max-attention-logit)"),
    ("clipped heads", "heads of all layers whose queries and keys were scaled down (--qk-clip)"),
    ("tok/s", "tokens per second of all ranks together, over all steps since the last line"),
    ("TFLOP/s", "10^12 operations of the model per second and device, recomputation not counted"),
    ("MFU", "the same as a share of --peak-tflops"),
    ("load", "of the worst layer, the tokens of its busiest expert over the mean: 1 is even; MaxVio is this less 1"),
    ("empty", "experts, of all layers together, that got no token in the step"),
    ("dropped", "share of choices beyond the experts' capacity (--moe-expert-capacity-factor)"),
    ("left", "time until --train-iters, at the pace of the last steps"),
    ("ep", "of each source (--data-config): loss, tokens since the last line that count for it, passes so far"),
    ("effective", "of the worst layer, how many evenly used experts would have the same entropy"),
    ("flips", "of the worst layer, the share of tokens that would get other experts if the router computed in fp64"),
    ("max logit", "the largest magnitude of a router's logits, over all tokens"),
    ("dense/expert norm", "the norms of the gradients outside of the experts, and of the experts"),
    (
        "update rounding",
        "by how much the rounding of stored moments changes an update (--use-precision-aware-optimizer)",
    ),
    ("LOST", "share of additions to gradients that were too small for the sum's dtype to change it"),
)
"""A word of a line -> its meaning, in the order of the line. The words from `effective` on are there where health was
measured (--health-interval)."""


def legend_text() -> str:
    """Return what the words of a log line mean, for `--log-legend`, a word a line."""
    width = max(len(word) for word, _ in LEGEND)
    return "\n".join(f"{word:<{width}}  {meaning}" for word, meaning in LEGEND)


MOST_STEPS = 10_000
"""Steps that a log line is about at most, the last ones, where `--log-interval` is longer."""


class ConsoleSink(Sink):
    """A sink that prints a line at the first step of this process, every `log_interval` steps and at the last one.

    It prints plain lines, for a file, a pipe, a Slurm log and a terminal without cursor control. A character that the
    stream's encoding lacks is written as its escape. Lines of steps and evaluations begin with the local time.
    """

    _CLOCK = "%Y-%m-%d %H:%M:%S"

    def __init__(self, stream: TextIO, *, train_iters: int | None, log_interval: int) -> None:
        self._stream = stream
        self._train_iters = train_iters
        self._log_interval = max(1, log_interval)
        self._records: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        """The steps since the last log line, with counts per expert of the newest alone: they are half a megabyte a
        step with 58 layers x 256 experts."""
        self._seen_a_step = False

    def start(self, facts: dict[str, Any]) -> None:
        width = max((len(key) for key in facts), default=0)
        for key, value in facts.items():
            shown = str(value)
            if isinstance(value, bool):
                shown = "yes" if value else "no"
            elif isinstance(value, int):
                shown = f"{value:,}"
            elif isinstance(value, float):
                shown = f"{value:.6g}"
            self._write(f"{key:<{width}}  {shown}")

    def step(self, record: StepRecord) -> None:
        if self._records:
            last = self._records[-1]
            health = last.health and last.health.without_counts()
            self._records[-1] = last.replace(tokens_per_expert={}, dropped_per_expert={}, health=health)
        self._records.append(record)
        due = record.iteration % self._log_interval == 0 or record.iteration == self._train_iters
        if due or not self._seen_a_step:
            total, width = self._train_iters, self._width()
            digits = len(str(total)) if total else 6
            head = f"iteration {record.iteration:>{digits}}" + (f"/{total}" if total else "")
            by_rank = sorted(metrics(), key=lambda metric: metric.console_rank)
            parts = [metric.console_text(list(self._records)) for metric in by_rank]
            line = " | ".join([f"{time.strftime(self._CLOCK)} {head}", *filter(None, parts)])
            while width is not None and len(line) > width and " | " in line:
                line = line.rpartition(" | ")[0]
            self._write(line)
            self._records.clear()
        self._seen_a_step = True

    def evaluation(self, record: EvalRecord) -> None:
        clock = time.strftime(self._CLOCK)
        if not record.tokens:
            self._write(
                f"{clock} {record.split} loss: none, no token of what was evaluated counts for it (all are masked)"
            )
            return
        perplexity = math.exp(min(record.loss, 700.0))
        bits = "" if record.bits_per_byte is None else f"{record.bits_per_byte:.4f} bits per byte, "
        self._write(
            f"{clock} {record.split} loss {record.loss:.4f} nats per token, perplexity {perplexity:,.4g}, {bits}"
            f"after {record.iteration} iterations ({record.tokens:,} tokens, {duration_text(record.seconds)})"
        )

    def message(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        self._stream.write(encodable(text, self._stream) + "\n")
        self._stream.flush()

    def _width(self) -> int | None:
        """Return the characters of a line, None where it may have any number."""
        return None


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


class LiveDashboard:
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
        self._load: float | None = None
        self._empty: int | None = None
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
        if self._last is None:
            return
        columns, rows = SMALLEST
        if self._panel and options.max_width >= columns and console.size.height >= rows:
            yield self._as_panel(self._last, min(options.max_width, _WIDEST))
            return
        record = self._last
        parts = [self._count(), f"loss {record.loss:.3f}", f"{record.tokens_per_second:,.0f} tok/s"]
        if record.grad_norm is not None:
            parts.append(f"gnorm {record.grad_norm:.2f}")
        if self._load is not None:
            parts.append(f"load {self._load:.2f}")
        parts.append("SKIPPED" if record.skipped else f"left {duration_text(record.seconds_left)}")
        grid = Table.grid(padding=(0, 1))
        grid.add_row(self._bar(20), Text(" ".join(parts), no_wrap=True, overflow="ellipsis"))
        yield grid

    def _as_panel(self, record: StepRecord, width: int) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="bold", min_width=_NAMES)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        room = width - 40
        head = Table.grid(padding=(0, 1))
        steps = Text(f"{self._count()}  ")
        if self._total:
            steps.append(f"left {duration_text(record.seconds_left)}")
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
        rates = self._rates.drawn(room, from_zero=True)
        grid.add_row("tokens/s", Text(f"{rates}  {record.tokens_per_second:,.0f}"))
        speed = Text(f"{record.model_tflops:.3g} TFLOP/s")
        if record.mfu is not None:
            speed.append(f", MFU {100 * record.mfu:.1f}%")
        if record.memory_bytes:
            speed.append(f"  memory {size_text(record.memory_bytes)}")
        grid.add_row("speed", speed)
        # The most uneven layers, in the order of the model.
        shown = sorted(self._loads, key=self._loads.__getitem__)[-_LAYERS:]
        if shown:
            worst = f"; worst {len(shown)} of {len(self._loads)} layers" if len(shown) < len(self._loads) else ""
            grid.add_row("load", Text(f"busiest expert / mean; {self._empty} empty{worst}"))
        for layer in sorted(shown):
            load, colour = self._loads[layer], "green"
            if load >= _EVEN:
                colour = "yellow" if load < _UNEVEN else "red"
            eighths = round(min(load / _FULL, 1.0) * room * 8)  # of a character
            bar = "\u2588" * (eighths // 8) + _PARTS_OF_A_BLOCK[eighths % 8].strip()
            grid.add_row(f"layer {layer}", Text.assemble((bar, colour), f"  {load:.2f}"))
        for number, event in enumerate(self._events):
            grid.add_row("" if number else "events", Text(event, style="dim"))
        clock = f"{time.strftime('%H:%M:%S')}, for {duration_text(time.monotonic() - self._began)}"
        return Panel(grid, title=self._title or None, title_align="left", subtitle=clock, subtitle_align="right",
                     width=width)  # fmt: skip

    def _bar(self, width: int) -> ProgressBar:
        return ProgressBar(total=self._total, completed=self._done, width=max(width, 10), pulse=self._total is None)

    def _count(self) -> str:
        return f"{self._done}/{self._total}" if self._total else str(self._done)


class LiveConsoleSink(ConsoleSink):
    """A sink for a terminal that prints the same lines, cut to its width, and draws below them what follows every step.

    It is drawn by this thread at a step, at most ten times a second: no second thread holds a lock while a checkpoint
    writer forks.

    Args:
        panel: draw a panel where the terminal is large enough, otherwise one line.
    """

    _CLOCK = "%H:%M:%S"
    _MIN_SECONDS = 0.1

    def __init__(
        self, stream: TextIO, *, train_iters: int | None, log_interval: int, start_iteration: int, panel: bool
    ) -> None:
        super().__init__(stream, train_iters=train_iters, log_interval=log_interval)
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._dashboard = LiveDashboard(panel, train_iters, start_iteration)
        self._live = Live(self._dashboard, console=self._console, auto_refresh=False, transient=True)
        self._drawn = -math.inf

    def start(self, facts: dict[str, Any]) -> None:
        self._dashboard.start(facts)
        super().start(facts)

    def step(self, record: StepRecord) -> None:
        if not self._live.is_started:
            self._live.start()
        self._dashboard.step(record)
        super().step(record)
        now = time.monotonic()
        if now - self._drawn >= self._MIN_SECONDS or record.iteration == self._train_iters:
            self._live.refresh()
            self._drawn = now

    def evaluation(self, record: EvalRecord) -> None:
        self._dashboard.evaluation(record)
        super().evaluation(record)

    def message(self, text: str) -> None:
        self._dashboard.event(text)
        self._write(text)

    def _write(self, text: str) -> None:
        self._console.print(encodable(text, self._stream))

    def _width(self) -> int | None:
        return self._console.size.width

    def close(self, summary: dict[str, Any] | None) -> None:
        self._live.stop()  # which takes away what is below the lines, and gives the cursor back


def console_sink(
    stream: TextIO, *, train_iters: int | None, log_interval: int, start_iteration: int, style: str = "auto"
) -> ConsoleSink:
    """Return the live console where `stream` is a terminal that can move its cursor, plain lines anywhere else.

    Args:
        style: `--console`. A panel needs a terminal that writes UTF-8.
    """
    if style == "plain" or not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return ConsoleSink(stream, train_iters=train_iters, log_interval=log_interval)
    utf_8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
    return LiveConsoleSink(
        stream,
        train_iters=train_iters,
        log_interval=log_interval,
        start_iteration=start_iteration,
        panel=utf_8 and style != "line",
    )


def encodable(text: str, stream: TextIO) -> str:
    """Escape what `stream` cannot encode in `text`, and control characters except newline and tab."""
    visible = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    encoding = stream.encoding or "utf-8"
    return visible.encode(encoding, errors="backslashreplace").decode(encoding)
