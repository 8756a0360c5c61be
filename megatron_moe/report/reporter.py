"""The object that training reports to; it passes every event on to the sinks that the flags ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.report.console import console_sink
from megatron_moe.report.jsonl import JsonlSink, read_steps
from megatron_moe.report.metric import StepRecord
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.sink import Sink, TensorBoardSink
from megatron_moe.report.summary import SummarySink, Totals


class Reporter:
    """Passes the events of a run to the console and to the files that the flags ask for.

    Every method does nothing on a rank that is not the writer; `pretrain` makes rank 0 the writer.

    Args:
        is_writer: this rank writes.
        start_iteration: iterations that the loaded checkpoint had done; 0 for a fresh run. What older files say about
            later iterations, of an incarnation that was killed, is taken back.
        stream: where log lines go; default standard output.
        also: further sinks; they get every event first, where this rank is the writer.

    Raises:
        ConfigError: a path cannot be written, holds something else, or needs a package that is missing.
    """

    def __init__(
        self,
        run: Run,
        *,
        is_writer: bool,
        start_iteration: int,
        stream: TextIO | None = None,
        also: Sequence[Sink] = (),
    ) -> None:
        self._sinks: list[Sink] = []
        self._closed = False
        if not is_writer:
            return
        self._sinks.extend(also)
        flags = run.logging
        totals = Totals()
        notes: list[str] = []
        # Files first: a path that cannot be written is reported before the terminal belongs to a progress line.
        if flags.metrics_file:
            metrics = _writable("--metrics-file", flags.metrics_file, lambda path: JsonlSink(path, start_iteration))
            if metrics.cut_lines:
                notes.append(
                    f"{flags.metrics_file}: took back {metrics.cut_lines} lines after iteration {start_iteration}"
                )
            if metrics.missing:
                notes.append(
                    f"{flags.metrics_file}: had {start_iteration - metrics.missing} lines of the {start_iteration} "
                    "iterations before this start: it is a new file, or another run's"
                )
            for record in read_steps(Path(flags.metrics_file)) if start_iteration else ():
                totals.add(record)
            self._sinks.append(metrics)
        if flags.tensorboard_dir:
            self._sinks.append(
                _writable(
                    "--tensorboard-dir",
                    flags.tensorboard_dir,
                    lambda path: TensorBoardSink(path, start_iteration, flags),
                )
            )
        if flags.summary_file:
            self._sinks.append(SummarySink(Path(flags.summary_file), totals))
        if flags.plot_file:
            from megatron_moe.report.plot import PlotSink

            assert flags.metrics_file, "rules.sources.plot_needs_metrics"
            self._sinks.append(PlotSink(Path(flags.plot_file), Path(flags.metrics_file)))
        self._sinks.append(
            console_sink(
                stream or sys.stdout,
                train_iters=run.training.train_iters,
                log_interval=flags.log_interval,
                start_iteration=start_iteration,
                style=flags.console,
            )
        )
        for note in notes:
            self.message(note)

    def start(self, facts: dict[str, Any]) -> None:
        """Show what is worth knowing about the run, in the order given.

        `unigram_entropy` (nats per token), where it is among the facts, is also drawn as a line in the plot.
        """
        for sink in self._sinks:
            sink.start(facts)

    def step(self, record: StepRecord) -> None:
        """Record one optimizer step. Iterations come in order, each once."""
        for sink in self._sinks:
            sink.step(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Record one evaluation."""
        for sink in self._sinks:
            sink.evaluation(record)

    def message(self, text: str) -> None:
        """Show one line to the person who watches, without disturbing the progress line."""
        for sink in self._sinks:
            sink.message(text)

    def flush(self) -> None:
        """Put what was reported so far on the disk, before a checkpoint is published."""
        for sink in self._sinks:
            sink.flush()

    def close(self, summary: dict[str, Any] | None = None) -> None:
        """End the report; a second call does nothing.

        With a summary, summary.json is written (the values given, over `iterations`, `train_seconds`,
        `tokens_per_second` and `versions`), the plot is drawn, and the console names every file. Without
        one, the run was interrupted: files are closed and the terminal is given back, quickly.
        """
        if self._closed or not self._sinks:
            return
        self._closed = True
        *files, console = self._sinks
        for sink in files:
            sink.close(summary)
        console.close(summary)
        if summary is not None:
            for sink in files:
                if sink.artifact is not None:
                    console.message(f"wrote {sink.artifact}")

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None)


def _writable(flag: str, name: str, build: Callable[[Path], Any]) -> Any:
    """Build a sink on a path; an error of the file system becomes one that names the flag."""
    try:
        return build(Path(name))
    except OSError as error:
        raise ConfigError(
            f"{flag} {name} cannot be written ({error}); name a path in a folder you may write to"
        ) from error
