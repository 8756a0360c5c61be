"""The lines of a log, in ASCII except a user's own text, and on a terminal a progress line below them."""

from __future__ import annotations

import math
import os
import time
from typing import Any, TextIO

from megatron_moe.io.texts import duration_text
from megatron_moe.report.metric import StepRecord, metrics
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.sink import Sink


class Interval:
    """The steps since the last log line."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Take one more step."""
        self._records.append(record)

    def line(self, train_iters: int | None) -> str:
        """Return the log line of the interval, which holds at least one step: each metric's part of it."""
        width = len(str(train_iters)) if train_iters else 6
        head = f"iteration {self._records[-1].iteration:>{width}}" + (f"/{train_iters}" if train_iters else "")
        by_rank = sorted(metrics(), key=lambda metric: metric.console_rank)
        texts = [metric.console_text(self._records) for metric in by_rank]
        return " | ".join([head, *(text for text in texts if text)])


def status(record: StepRecord, expert_load: float | None) -> str:
    """Return the figures of one step, short enough for a progress line; `expert_load` is the last one known."""
    parts = [f"loss {record.loss:.3f}", f"{record.tokens_per_second:,.0f} tok/s"]
    if record.grad_norm is not None:
        parts.append(f"gnorm {record.grad_norm:.2f}")
    if expert_load is not None:
        parts.append(f"load {expert_load:.2f}")
    parts.append("SKIPPED" if record.skipped else f"left {duration_text(record.seconds_left)}")
    return " ".join(parts)


class ConsoleSink(Sink):
    """A sink that prints a line at the first step of this process, every `log_interval` steps and at the last one.

    It prints plain lines, for a file, a pipe, a Slurm log and a terminal without cursor control. A character that the
    stream's encoding lacks is written as its escape.
    """

    def __init__(self, stream: TextIO, *, train_iters: int | None, log_interval: int) -> None:
        self._stream = stream
        self._train_iters = train_iters
        self._log_interval = max(1, log_interval)
        self._interval = Interval()
        self._seen_a_step = False

    def start(self, facts: dict[str, Any]) -> None:
        width = max((len(key) for key in facts), default=0)
        for key, value in facts.items():
            self.message(f"{key:<{width}}  {_fact(value)}")

    def step(self, record: StepRecord) -> None:
        self._interval.add(record)
        due = record.iteration % self._log_interval == 0 or record.iteration == self._train_iters
        if due or not self._seen_a_step:
            self.message(self._interval.line(self._train_iters))
            self._interval = Interval()
        self._seen_a_step = True

    def evaluation(self, record: EvalRecord) -> None:
        if not record.tokens:
            self.message(f"{record.split} loss: none, no token of what was evaluated counts for it (all are masked)")
            return
        perplexity = math.exp(min(record.loss, 700.0))
        self.message(
            f"{record.split} loss {record.loss:.4f} nats per token, perplexity {perplexity:,.4g}, "
            f"after {record.iteration} iterations ({record.tokens:,} tokens, {duration_text(record.seconds)})"
        )

    def message(self, text: str) -> None:
        self._stream.write(encodable(text, self._stream) + "\n")
        self._stream.flush()


class LiveConsoleSink(ConsoleSink):
    """A sink for a terminal that prints the same lines, with a progress line below them that follows every step.

    The line is drawn by this thread at a step, at most ten times a second: no second thread holds a lock while a
    checkpoint writer forks.
    """

    _MIN_SECONDS = 0.1

    def __init__(self, stream: TextIO, *, train_iters: int | None, log_interval: int, start_iteration: int) -> None:
        super().__init__(stream, train_iters=train_iters, log_interval=log_interval)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=train_iters, completed=start_iteration, status="")
        self._drawn = -math.inf
        self._expert_load: float | None = None
        self._live = False

    def step(self, record: StepRecord) -> None:
        if not self._live:
            self._progress.start()
            self._live = True
        if record.expert_load is not None:
            self._expert_load = record.expert_load
        self._progress.update(self._task, completed=record.iteration, status=status(record, self._expert_load))
        super().step(record)
        now = time.monotonic()
        if now - self._drawn >= self._MIN_SECONDS or record.iteration == self._train_iters:
            self._progress.refresh()
            self._drawn = now

    def message(self, text: str) -> None:
        self._console.print(encodable(text, self._stream))

    def close(self, summary: dict[str, Any] | None) -> None:
        self.hide()

    def hide(self) -> None:
        """Take the progress line away and give the cursor back; the next step shows it again."""
        if self._live:
            self._progress.stop()
            self._live = False


def console_sink(stream: TextIO, *, train_iters: int | None, log_interval: int, start_iteration: int) -> ConsoleSink:
    """Return the live console where `stream` is a terminal that can move its cursor, plain lines anywhere else."""
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return LiveConsoleSink(
            stream, train_iters=train_iters, log_interval=log_interval, start_iteration=start_iteration
        )
    return ConsoleSink(stream, train_iters=train_iters, log_interval=log_interval)


def encodable(text: str, stream: TextIO) -> str:
    """Escape what `stream` cannot encode in `text`, and control characters except newline and tab."""
    visible = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    encoding = stream.encoding or "utf-8"
    return visible.encode(encoding, errors="backslashreplace").decode(encoding)


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
