"""The object that training reports to; it passes every event on to the sinks that the flags ask for."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.config.schema import Run
from megatron_moe.io.program import StoppedEarly
from megatron_moe.report.console import console_sink
from megatron_moe.report.jsonl import EvaluationsSink, JsonlSink, read_steps
from megatron_moe.report.prometheus import PrometheusSink
from megatron_moe.report.records import EVENTS, EvalRecord, EventRecord, StepRecord, exact
from megatron_moe.report.run_info import FINISHED, RunInfo, SummarySink, Totals
from megatron_moe.report.sink import OwnSink, Sink, SinkError, TensorBoardSink
from megatron_moe.report.tracker import SERVICES, TrackerSink

MakePageSink = Callable[[Path, Path, Callable[[str], None]], Sink]
"""Makes the sink of --report-file from the page, the file of --metrics-file, and a function that takes a warning."""

_SECONDS_FOR_ABORT = 2.0


class Reporter:
    """Passes the events of a run to the console and to the files that the flags ask for.

    Every method does nothing on a rank that is not the writer; `pretrain` makes rank 0 the writer.

    Args:
        is_writer: this rank writes.
        start_iteration: iterations that the loaded checkpoint had done; 0 for a fresh run. What older files say about
            later iterations, of an incarnation that was killed, is taken back.
        stream: where log lines go; default standard output.
        also: further sinks; they get every event first, where this rank is the writer.
        page_sink: makes the sink that writes the page of --report-file.

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
        page_sink: MakePageSink | None = None,
    ) -> None:
        flags = run.logging
        if flags.report_file and page_sink is None:
            raise ConfigError(
                f"--report-file {flags.report_file} needs the page that pretrain_moe.py hands to pretrain(); hand in "
                "page_sink=megatron_moe_tools.pretrain.page_sink, or leave the flag out"
            )
        self._closed = False
        self._own = [OwnSink(sink) for sink in also if is_writer]
        self._sinks = cast("list[Sink]", [*self._own])
        self._files: JsonlSink | None = None
        if not is_writer:
            return
        self._iteration = start_iteration
        self._info = RunInfo(run, start_iteration)
        metrics_file = Path(flags.metrics_file or "")
        # Trackers before the files, which take what those have to say at their end.
        services = [flag for flag in SERVICES if getattr(flags, flag) is not None]
        reported = {}
        if services and start_iteration and metrics_file.is_file():
            reported = {step.iteration: exact(step) for step in read_steps(metrics_file, start_iteration)}
        for flag in services:
            self._sinks.append(TrackerSink(flag, run, start_iteration, self._info, reported, self.event))
        # Files before the console: a path that cannot be written is reported before a progress line has the terminal.
        if flags.metrics_file and run.training.skip_train:
            with _naming("--metrics-file", flags.metrics_file):
                self._sinks.append(EvaluationsSink(metrics_file))
        elif flags.metrics_file:
            with _naming("--metrics-file", flags.metrics_file):
                self._files = JsonlSink(metrics_file, start_iteration)
                self._info.write()
                start = f"attempt {self._info.values['attempt']}, from iteration {start_iteration}"
                self._files.event(self._event("start", start))
            self._sinks.append(self._files)
        if flags.tensorboard_dir:
            with _naming("--tensorboard-dir", flags.tensorboard_dir):
                self._sinks.append(TensorBoardSink(Path(flags.tensorboard_dir), start_iteration, flags))
        if flags.summary_file:
            before = Totals() if self._files is None else self._files.totals
            self._sinks.append(SummarySink(Path(flags.summary_file), before, self._info))
        if flags.plot_file:  # which, like the page, has metrics_file: rules.sources.pictures_need_metrics
            from megatron_moe.report.plot import PlotSink

            self._sinks.append(PlotSink(Path(flags.plot_file), metrics_file))
        if flags.report_file and page_sink is not None:
            warn = partial(self.event, "warning")
            self._sinks.append(page_sink(Path(flags.report_file), metrics_file, warn))
        if flags.prometheus_file:
            warn = partial(self.event, "warning")
            self._sinks.append(PrometheusSink(Path(flags.prometheus_file), self._info.values, warn))
        self._sinks.append(
            console_sink(
                stream or sys.stdout,
                train_iters=run.training.train_iters,
                log_interval=flags.log_interval,
                start_iteration=start_iteration,
                style=flags.console,
            )
        )
        if self._files is not None and self._files.cut_lines:
            self.message(f"{metrics_file}: took back {self._files.cut_lines} lines after iteration {start_iteration}")
        if self._files is not None and self._files.missing:
            self.event(
                "warning",
                f"{metrics_file}: had {start_iteration - self._files.missing} lines of the {start_iteration} "
                "iterations before this start: it is a new file, or another run's",
            )

    @property
    def sink_failure(self) -> SinkError | None:
        """The first error that one of the program's own sinks raised on this rank."""
        return next((sink.failure for sink in self._own if sink.failure is not None), None)

    def start(self, facts: dict[str, Any]) -> None:
        """Show facts of the run in their order; `unigram_entropy` (nats per token) is a line in the plot, too."""
        if self._sinks:
            self._info.start(facts)
        for sink in self._sinks:
            sink.start(facts)

    def step(self, record: StepRecord) -> None:
        """Record one optimizer step. Iterations come in order, each once."""
        if self._sinks:
            self._iteration = record.iteration
            record = record.replace(**self._info.stamp())
        for sink in self._sinks:
            sink.step(record)

    def has_evaluated(self, split: str) -> bool:
        """Return whether the metrics file has an evaluation of the weights that this attempt starts from."""
        return self._files is not None and self._files.has_evaluated(split)

    def evaluation(self, record: EvalRecord) -> None:
        """Record one evaluation."""
        if self._sinks:
            record = dataclasses.replace(record, **self._info.stamp())
        for sink in self._sinks:
            sink.evaluation(record)

    def event(self, kind: str, text: str, *, shown: bool = True, **facts: Any) -> None:
        """Record something that happened, and show its text without disturbing the progress line.

        Args:
            kind: one of `records.EVENTS`.
            shown: False where the person who watches gets the text in another way.
            facts: plain values that belong to the kind.
        """
        if self._sinks:
            record = self._event(kind, text, facts, shown)
            for sink in self._sinks:
                sink.event(record)

    def message(self, text: str) -> None:
        """Show one line that is no event of a kind of its own."""
        self.event("message", text)

    def flush(self) -> None:
        """Put what was reported so far on the disk, before a checkpoint is published."""
        for sink in self._sinks:
            sink.flush()

    def close(self, summary: dict[str, Any] | None = None, ending: str = FINISHED, fault: str | None = None) -> None:
        """End the report; a second call does nothing.

        With a summary, summary.json is written (the values given, over `iterations`, `train_seconds` and
        `tokens_per_second`, and what the run is), the plot is drawn, and the console names every file. Without
        one, the run was interrupted: files are closed and the terminal is given back, quickly. A `fault` that ends the
        run is recorded, and not shown: who watches sees the error.
        """
        if self._closed or not self._sinks:
            return
        self._closed = True
        *files, console = self._sinks
        try:
            with suppress(OSError):
                if fault is not None:
                    self.event("fault", fault, shown=False)
            self._record_end(ending)
            for sink in self._sinks:
                sink.end(ending)
        finally:
            for sink in files:
                sink.close(summary)
            console.close(summary)
        if summary is not None:
            for sink in files:
                if sink.artifact is not None:
                    console.message(f"wrote {sink.artifact}")

    def on_abort(self, ending: str, fault: str | None = None) -> None:
        """Record how the attempt ends and by which fault, where the process is ended; sinks stay open."""
        if self._closed or not self._sinks:
            return
        self._closed = True

        def record_end() -> None:
            with suppress(OSError):  # a disk that is full takes nothing away from the reason that is printed
                if fault is not None and self._files is not None:
                    self._files.event(self._event("fault", fault))
                self._record_end(ending)
            for sink in self._sinks:
                sink.on_abort(ending, fault)

        # The reason for the end may be a file system that does not answer.
        thread = threading.Thread(target=record_end, name="on abort", daemon=True)
        thread.start()
        thread.join(_SECONDS_FOR_ABORT)

    def _record_end(self, ending: str) -> None:
        if self._files is not None:
            self._files.event(self._event("end", ending))
        self._info.end(ending, self._iteration)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close(None)
            return
        text, fault = str(error).strip(), None
        if not (text and isinstance(error, (ConfigError, RunFault))):  # ours say what they are
            text = f"{type(error).__name__}: {text}".rstrip(": ")
        if isinstance(error, KeyboardInterrupt):
            ending = "stopped by SIGINT"
        elif isinstance(error, StoppedEarly):
            ending = f"stopped {error.reason}"
        else:
            ending = f"failed: {text.splitlines()[0]}"
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            fault = text
        with suppress(OSError):  # a full disk, which is why the run ends or is less than that
            self.close(None, ending, fault)

    def _event(self, kind: str, text: str, facts: Mapping[str, Any] | None = None, shown: bool = True) -> EventRecord:
        assert kind in EVENTS, kind
        return EventRecord(self._iteration, kind, text, **self._info.stamp(), facts=facts or {}, shown=shown)


@contextmanager
def _naming(flag: str, name: str) -> Iterator[None]:
    """Turn an error of the file system into one that names the flag."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{flag} {name} cannot be written ({error}); name a path in a folder you may write to"
        ) from error
