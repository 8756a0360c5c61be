"""The object that training reports to; it passes every event on to the sinks that the flags ask for."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.config.schema import Run
from megatron_moe.io.program import StoppedEarly
from megatron_moe.report.console import console_sink
from megatron_moe.report.jsonl import JsonlSink, read_steps
from megatron_moe.report.records import EVENTS, EvalRecord, EventRecord, StepRecord, exact
from megatron_moe.report.run_info import FINISHED, RunInfo, SummarySink, Totals
from megatron_moe.report.sink import OwnSink, Sink, SinkError, TensorBoardSink
from megatron_moe.report.tracker import SERVICES, TrackerSink

_SECONDS_FOR_LAST_WORDS = 2.0


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
        self._own = [OwnSink(sink) for sink in also if is_writer]
        self._closed = False
        if not is_writer:
            return
        self._iteration = start_iteration
        self._info = RunInfo(run, start_iteration)
        # Trackers before the files, which take what those have to say at their end.
        self._sinks.extend(cast("list[Sink]", self._own))
        self._sinks.extend(self._trackers(run, start_iteration))
        self._files: JsonlSink | None = None
        flags = run.logging
        # Files first: a path that cannot be written is reported before the terminal belongs to a progress line.
        if flags.metrics_file:
            self._files = _writable(
                "--metrics-file", flags.metrics_file, lambda path: self._open_metrics(path, start_iteration)
            )
            self._sinks.append(self._files)
        if flags.tensorboard_dir:
            self._sinks.append(
                _writable(
                    "--tensorboard-dir",
                    flags.tensorboard_dir,
                    lambda path: TensorBoardSink(path, start_iteration, flags),
                )
            )
        if flags.summary_file:
            before = Totals() if self._files is None else self._files.totals
            self._sinks.append(SummarySink(Path(flags.summary_file), before, self._info))
        if flags.plot_file:
            from megatron_moe.report.plot import PlotSink

            assert flags.metrics_file, "rules.sources.pictures_need_metrics"
            self._sinks.append(PlotSink(Path(flags.plot_file), Path(flags.metrics_file)))
        if flags.report_file:
            from megatron_moe_tools.report.build import PageSink

            assert flags.metrics_file, "rules.sources.pictures_need_metrics"
            self._sinks.append(PageSink(Path(flags.report_file), Path(flags.metrics_file), self._warn))
        self._sinks.append(
            console_sink(
                stream or sys.stdout,
                train_iters=run.training.train_iters,
                log_interval=flags.log_interval,
                start_iteration=start_iteration,
                style=flags.console,
            )
        )
        if self._files is not None:
            for kind, note in _notes_on(self._files, start_iteration):
                self.event(kind, note)

    @property
    def sink_failure(self) -> SinkError | None:
        """The first error that one of the program's own sinks raised on this rank."""
        return next((sink.failure for sink in self._own if sink.failure is not None), None)

    def _trackers(self, run: Run, start_iteration: int) -> list[TrackerSink]:
        """Return the sinks for W&B and MLflow, with what an earlier attempt has reported of the steps to come."""
        wanted = [flag for flag in SERVICES if getattr(run.logging, flag) is not None]
        path, reported = Path(run.logging.metrics_file or ""), {}
        if wanted and start_iteration and path.is_file():
            reported = {step.iteration: exact(step) for step in read_steps(path, start_iteration)}
        return [TrackerSink(flag, run, start_iteration, self._info, reported, self.event) for flag in wanted]

    def _open_metrics(self, path: Path, start_iteration: int) -> JsonlSink:
        """Open the files of the metrics, and write what the run is next to them."""
        files = JsonlSink(path, start_iteration)
        self._info.write()
        files.event(self._event("start", f"attempt {self._info.values['attempt']}, from iteration {start_iteration}"))
        return files

    def start(self, facts: dict[str, Any]) -> None:
        """Show what is worth knowing about the run, in the order given.

        `unigram_entropy` (nats per token), where it is among the facts, is also drawn as a line in the plot.
        """
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
        return bool(self._sinks) and self._files is not None and self._files.has_evaluated(split)

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

    def _warn(self, text: str) -> None:
        self.event("warning", text)

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

    def last_words(self, ending: str, fault: str | None = None) -> None:
        """Record how the attempt ends where the process is about to be ended, from any thread. Sinks are not closed.

        Args:
            fault: the text of the fault that ends it.
        """
        if self._closed or not self._sinks:
            return
        self._closed = True

        # The reason for the end may be a file system that does not answer.
        thread = threading.Thread(target=self._try_to_record_end, args=(ending, fault), name="last words", daemon=True)
        thread.start()
        thread.join(_SECONDS_FOR_LAST_WORDS)

    def _try_to_record_end(self, ending: str, fault: str | None) -> None:
        with suppress(OSError):  # a disk that is full takes nothing away from the reason that is printed
            self._record_end(ending, fault)
        for sink in self._sinks:
            sink.last_words(ending, fault)

    def _record_end(self, ending: str, fault: str | None = None) -> None:
        for kind, text in (("fault", fault), ("end", ending)):
            if self._files is not None and text is not None:
                self._files.event(self._event(kind, text))
        self._info.end(ending, self._iteration)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close(None)
            return
        is_fault = isinstance(error, Exception) and not isinstance(error, ConfigError)
        with suppress(OSError):  # a full disk, which is why the run ends or is less than that
            self.close(None, _ending_of(error), _text_of(error) if is_fault else None)

    def _event(self, kind: str, text: str, facts: Mapping[str, Any] | None = None, shown: bool = True) -> EventRecord:
        assert kind in EVENTS, kind
        return EventRecord(self._iteration, kind, text, **self._info.stamp(), facts=facts or {}, shown=shown)


def _notes_on(files: JsonlSink, start_iteration: int) -> Iterator[tuple[str, str]]:
    """Yield what is worth knowing about the metrics of a run that continues: a kind of event and its text."""
    if files.cut_lines:
        yield "message", f"{files.artifact}: took back {files.cut_lines} lines after iteration {start_iteration}"
    if files.missing:
        yield (
            "warning",
            f"{files.artifact}: had {start_iteration - files.missing} lines of the {start_iteration} iterations before "
            "this start: it is a new file, or another run's",
        )


def _ending_of(error: BaseException) -> str:
    """Return how an attempt ended that an exception has ended."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT"
    if isinstance(error, StoppedEarly):
        return f"stopped by {error.signal_name}"
    return f"failed: {_text_of(error).splitlines()[0]}"


def _text_of(error: BaseException) -> str:
    """Return the message of an error of ours, and the kind and message of any other."""
    text = str(error).strip()
    known = isinstance(error, (ConfigError, RunFault)) and text
    return text if known else f"{type(error).__name__}: {text}".rstrip(": ")


def _writable(flag: str, name: str, build: Callable[[Path], Any]) -> Any:
    """Build a sink on a path; an error of the file system becomes one that names the flag."""
    try:
        return build(Path(name))
    except OSError as error:
        raise ConfigError(
            f"{flag} {name} cannot be written ({error}); name a path in a folder you may write to"
        ) from error
