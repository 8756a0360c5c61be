"""The lines of a log, in ASCII except a user's own text, and on a terminal a progress line below them."""

from __future__ import annotations

import math
import os
import time
from typing import Any, TextIO

from megatron_moe.io.texts import duration_text
from megatron_moe.report.records import EvalRecord, StepRecord, dropped_share, glance
from megatron_moe.report.sink import Sink


class Interval:
    """The steps since the last log line.

    The line shows the mean loss of the steps that were not skipped, the speeds over the whole interval and the last
    health that was measured, which says more than the load; everything else in it is the last step's.
    """

    def __init__(self) -> None:
        self._records: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Take one more step."""
        self._records.append(record)

    def line(self, train_iters: int | None) -> str:
        """The log line of the interval, which holds at least one step."""
        last = self._records[-1]
        taken = [record.loss for record in self._records if not record.skipped]
        seconds = sum(record.seconds for record in self._records)
        width = len(str(train_iters)) if train_iters else 6
        parts = [f"iteration {last.iteration:>{width}}" + (f"/{train_iters}" if train_iters else "")]
        parts.append(f"loss {math.fsum(taken) / len(taken):.4f}" if taken else f"loss {last.loss:.4f}")
        parts.extend(self._further_losses())
        parts.append(f"lr {last.learning_rate:.2e}")
        parts.append("grad norm -" if last.grad_norm is None else f"grad norm {last.grad_norm:.3f}")
        parts.append(f"{_rate([r.tokens for r in self._records], seconds):,.0f} tok/s")
        parts.append(f"{_over_time([r.model_tflops for r in self._records], self._records, seconds):.3g} TFLOP/s")
        if last.mfu is not None:
            mfu = _over_time([r.mfu or 0.0 for r in self._records], self._records, seconds)
            parts.append(f"MFU {100 * mfu:.1f}%")
        health = next((record.health for record in reversed(self._records) if record.health is not None), None)
        if health is not None:
            parts.extend(glance(health))
        elif last.expert_load is not None:
            parts.append(f"load {last.expert_load:.2f}")
            parts.append(f"empty {last.empty_experts}")
        dropped = dropped_share(last)
        if dropped is not None:
            parts.append(f"dropped {100 * dropped:.2f}%")
        skipped = len(self._records) - len(taken)
        if skipped:
            parts.append(f"SKIPPED {skipped} (loss scale {last.loss_scale:g})")
        parts.append(f"left {duration_text(last.seconds_left)}")
        return " | ".join(parts)

    def _further_losses(self) -> list[str]:
        """The means of multi-token prediction's depths, as those of the loss."""
        taken = [record.mtp_losses for record in self._records if not record.skipped] or [self._records[-1].mtp_losses]
        means = [math.fsum(losses) / len(losses) for losses in zip(*taken)]
        return [f"mtp {' '.join(f'{mean:.4f}' for mean in means)}"] if means else []


def status(record: StepRecord, expert_load: float | None) -> str:
    """The figures of one step, short enough to stand beside a progress bar; `expert_load` is the last one known."""
    parts = [f"loss {record.loss:.3f}", f"{record.tokens_per_second:,.0f} tok/s"]
    if record.grad_norm is not None:
        parts.append(f"gnorm {record.grad_norm:.2f}")
    if expert_load is not None:
        parts.append(f"load {expert_load:.2f}")
    parts.append("SKIPPED" if record.skipped else f"left {duration_text(record.seconds_left)}")
    return " ".join(parts)


def _rate(amounts: list[int], seconds: float) -> float:
    return sum(amounts) / seconds if seconds > 0 else 0.0


def _over_time(rates: list[float], records: list[StepRecord], seconds: float) -> float:
    """The mean rate over the interval: each step's rate counts with the step's time."""
    return sum(rate * r.seconds for rate, r in zip(rates, records, strict=True)) / seconds if seconds > 0 else 0.0


class ConsoleSink(Sink):
    """A line at the first step of this process, every `log_interval` steps and the last one; events in between.

    Plain lines only: right for a file, a pipe, a Slurm log and a terminal that knows no cursor. A character that the
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
    """The same lines, with a progress line below them that follows every step; for a terminal.

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
    """The live console where `stream` is a terminal that can move its cursor, plain lines anywhere else."""
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return LiveConsoleSink(
            stream, train_iters=train_iters, log_interval=log_interval, start_iteration=start_iteration
        )
    return ConsoleSink(stream, train_iters=train_iters, log_interval=log_interval)


def encodable(text: str, stream: TextIO) -> str:
    """`text` with what `stream` cannot encode as backslash escapes, control characters (except newline and tab) too."""
    visible = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    encoding = stream.encoding or "utf-8"
    return visible.encode(encoding, errors="backslashreplace").decode(encoding)


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
