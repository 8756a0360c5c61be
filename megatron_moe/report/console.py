"""The lines of a log, in ASCII except a user's own text, and on a terminal a panel or a progress line below them."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from typing import Any, TextIO

from megatron_moe.io.texts import duration_text
from megatron_moe.report.metric import StepRecord, metrics
from megatron_moe.report.records import EvalRecord
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


class Interval:
    """The steps since the last log line, of which the last `MOST_STEPS` are kept.

    Counts per expert are half a megabyte a step with 58 layers x 256 experts, and are kept of the newest step alone.
    """

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MOST_STEPS)

    def add(self, record: StepRecord) -> None:
        """Take one more step."""
        if self._records:
            self._records[-1] = self._records[-1].replace(tokens_per_expert={}, dropped_per_expert={})
        self._records.append(record)

    def line(self, train_iters: int | None, width: int | None = None) -> str:
        """Return the log line of the interval, which holds at least one step: each metric's part of it.

        With a width in characters, the parts at the end that do not fit are left out.
        """
        records = list(self._records)
        digits = len(str(train_iters)) if train_iters else 6
        head = f"iteration {records[-1].iteration:>{digits}}" + (f"/{train_iters}" if train_iters else "")
        by_rank = sorted(metrics(), key=lambda metric: metric.console_rank)
        texts = [metric.console_text(records) for metric in by_rank]
        line = " | ".join([head, *(text for text in texts if text)])
        while width is not None and len(line) > width and " | " in line:
            line = line.rpartition(" | ")[0]
        return line


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
        self._interval = Interval()
        self._seen_a_step = False

    def start(self, facts: dict[str, Any]) -> None:
        width = max((len(key) for key in facts), default=0)
        for key, value in facts.items():
            self._write(f"{key:<{width}}  {_fact(value)}")

    def step(self, record: StepRecord) -> None:
        self._interval.add(record)
        due = record.iteration % self._log_interval == 0 or record.iteration == self._train_iters
        if due or not self._seen_a_step:
            clock, width = time.strftime(self._CLOCK), self._width()
            room = None if width is None else width - len(clock) - 1
            self._write(f"{clock} {self._interval.line(self._train_iters, room)}")
            self._interval = Interval()
        self._seen_a_step = True

    def evaluation(self, record: EvalRecord) -> None:
        clock = time.strftime(self._CLOCK)
        if not record.tokens:
            self._write(
                f"{clock} {record.split} loss: none, no token of what was evaluated counts for it (all are masked)"
            )
            return
        perplexity = math.exp(min(record.loss, 700.0))
        self._write(
            f"{clock} {record.split} loss {record.loss:.4f} nats per token, perplexity {perplexity:,.4g}, "
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
        from rich.console import Console
        from rich.live import Live

        from megatron_moe.report.panel import View

        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._view = View(panel, train_iters, start_iteration)
        self._live = Live(self._view, console=self._console, auto_refresh=False, transient=True)
        self._drawn = -math.inf

    def start(self, facts: dict[str, Any]) -> None:
        self._view.start(facts)
        super().start(facts)

    def step(self, record: StepRecord) -> None:
        if not self._live.is_started:
            self._live.start()
        self._view.step(record)
        super().step(record)
        now = time.monotonic()
        if now - self._drawn >= self._MIN_SECONDS or record.iteration == self._train_iters:
            self._live.refresh()
            self._drawn = now

    def evaluation(self, record: EvalRecord) -> None:
        self._view.evaluation(record)
        super().evaluation(record)

    def message(self, text: str) -> None:
        self._view.event(text)
        self._write(text)

    def _write(self, text: str) -> None:
        self._console.print(encodable(text, self._stream))

    def _width(self) -> int | None:
        return self._console.size.width

    def close(self, summary: dict[str, Any] | None) -> None:
        self.hide()

    def hide(self) -> None:
        """Take what is below the lines away and give the cursor back; the next step shows it again."""
        self._live.stop()


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


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
