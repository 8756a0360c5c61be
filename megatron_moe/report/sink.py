"""The interface of everything that takes the events of a run, and the sink that writes them for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import LoggingConfig
from megatron_moe.report.metric import MetricError, metrics
from megatron_moe.report.records import EvalRecord, EventRecord, StepRecord


class Sink:
    """Takes the events of one run in order: start, then steps, evaluations and events, then end and close, once.

    A sink overrides the events that it cares for.

    A sink of your own goes to `pretrain(run, also=[sink])`. Its methods are called on rank 0, the rank that writes, and
    before those of the sinks that the flags ask for; what they raise ends the run on all ranks, after the step.
    """

    artifact: Path | None = None
    """The file or folder that this sink leaves behind; the log names it at the end."""

    def start(self, facts: dict[str, Any]) -> None:
        """Take what is worth knowing about the run that begins, in the order to show."""

    def step(self, record: StepRecord) -> None:
        """Take an optimizer step that is done, applied or skipped."""

    def evaluation(self, record: EvalRecord) -> None:
        """Take an evaluation that is done."""

    def event(self, record: EventRecord) -> None:
        """Take something that happened, such as a checkpoint or a fault; by default, `message` gets a shown text."""
        if record.shown:
            self.message(record.text)

    def message(self, text: str) -> None:
        """Take a line for the person who watches the run."""

    def flush(self) -> None:
        """Put what came so far where it survives whatever the checkpoint survives that is about to be published."""

    def end(self, ending: str) -> None:
        """Take how this attempt ends: "finished", "stopped by SIGTERM", "failed: ..."; `close` follows."""

    def on_abort(self, ending: str, fault: str | None) -> None:
        """Take how this attempt ends where the process is about to be ended, from any thread; nothing follows."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """Take the end of the run: with its summary, or with None where it was interrupted."""


class SinkError(Exception):
    """A program's own sink raised an error, which is its cause."""


class OwnSink:
    """Stands for a program's own sink, and keeps its first error, for all ranks to end together; then it is silent."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.failure: SinkError | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._sink, name)
        return partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, method: Callable[..., None], *given: Any) -> None:
        if self.failure is None:
            try:
                method(*given)
            except Exception as error:
                what = f"{type(self._sink).__name__}.{name}"
                self.failure = SinkError(f"the sink's {what} failed: {type(error).__name__}: {error}")
                self.failure.__cause__ = error


MEGATRON_TAGS: dict[str, str] = {
    "loss/train": "lm loss",
    "loss/valid": "lm loss validation",
    "loss/test": "lm loss test",
    "optimizer/learning_rate": "learning-rate",
    "optimizer/grad_norm": "grad-norm",
    "optimizer/loss_scale": "loss-scale",
    "batch/global_batch_size": "batch-size",
    "loss/aux_loss": "load_balancing_loss",
    "loss/seq_aux_loss": "seq_load_balancing_loss",
    "loss/global_aux_loss": "global_load_balancing_loss",
    "loss/z_loss": "z_loss",
}
"""A tag of ours -> Megatron-LM's; metrics that it does not have keep theirs."""
_OVER_SAMPLES = {
    *(tag for tag in MEGATRON_TAGS.values() if not tag.endswith("_loss")),
    *("world-size", "params-norm", "num-zeros", "lm loss validation ppl", "lm loss test ppl", "max_attention_logit"),
}


def step_scalars(record: StepRecord, options: LoggingConfig) -> Iterator[tuple[str, float]]:
    """Yield the scalars of a step, by the tags of `--tensorboard-names`; a MetricError if two have one."""
    written: dict[str, str] = {}
    for metric in metrics():
        for tag, number in metric.scalars(record).items():
            if tag in written:
                raise MetricError(f"metric {metric.name}: TensorBoard tag {tag} is that of {written[tag]}")
            written[tag] = metric.name
            # Of a step that was not applied Megatron-LM has no loss.
            if not (record.skipped and tag == "loss/train" and options.tensorboard_names == "megatron"):
                yield _tag(tag, options), number


def evaluation_scalars(record: EvalRecord, options: LoggingConfig) -> Iterator[tuple[str, float]]:
    """Yield the scalars of an evaluation, by the tags of `--tensorboard-names`."""
    yield _tag(f"loss/{record.split}", options), record.loss
    if options.log_validation_ppl_to_tensorboard:
        split = "validation" if record.split == "valid" else record.split
        yield f"lm loss {split} ppl", math.exp(min(record.loss, 20.0))  # bounded as in Megatron-LM


def _tag(tag: str, options: LoggingConfig) -> str:
    if options.tensorboard_names != "megatron":
        return tag
    if tag.startswith("loss/mtp_"):
        return f"{tag.removeprefix('loss/')} loss"
    return MEGATRON_TAGS.get(tag, tag)


class TensorBoardSink(Sink):
    """Writes the scalars of all metrics under `folder`, one event per scalar and step of `--tensorboard-log-interval`.

    A resumed run writes a new event file whose first event makes TensorBoard forget every step after
    `start_iteration` of the older files. With `--tensorboard-names megatron` scalars over the samples are written, too,
    in a subfolder: that event counts in steps of its file, which are samples there.

    Raises:
        ConfigError: the tensorboard package is missing.
    """

    def __init__(self, folder: Path, start_iteration: int, options: LoggingConfig | None = None) -> None:
        options = options or LoggingConfig()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"--tensorboard-dir {folder} needs the tensorboard package ({error}); "
                "install it with `pip install tensorboard`, or drop the flag"
            ) from error
        self.artifact = folder
        self._options = options
        self._consumed_samples = 0
        self._open = partial(SummaryWriter, max_queue=options.tensorboard_queue_size)
        self._writer = self._open(str(folder), purge_step=start_iteration + 1)
        self._over_samples: Any = None

    def start(self, facts: dict[str, Any]) -> None:
        table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
        self._writer.add_text("run", f"| | |\n|---|---|\n{table}", 0)

    def step(self, record: StepRecord) -> None:
        if self._options.tensorboard_names == "megatron" and self._over_samples is None:
            before = record.consumed_samples - record.global_batch_size
            self._over_samples = self._open(f"{self.artifact}/vs_samples", purge_step=before + 1)
        self._consumed_samples = record.consumed_samples
        if record.iteration % self._options.tensorboard_log_interval == 0:
            for tag, number in step_scalars(record, self._options):
                self._write(tag, number, record.iteration)

    def evaluation(self, record: EvalRecord) -> None:
        for tag, number in evaluation_scalars(record, self._options):
            self._write(tag, number, record.iteration)
        self.flush()

    def flush(self) -> None:
        for writer in self._writers():
            writer.flush()

    def close(self, summary: dict[str, Any] | None) -> None:
        for writer in self._writers():
            writer.close()

    def _writers(self) -> list[Any]:
        return [writer for writer in (self._writer, self._over_samples) if writer is not None]

    def _write(self, tag: str, number: float, iteration: int) -> None:
        self._writer.add_scalar(tag, number, iteration)
        # None before the first step of this process: an evaluation that a signal had put off.
        if self._over_samples is not None and tag in _OVER_SAMPLES:
            self._over_samples.add_scalar(f"{tag} vs samples", number, self._consumed_samples)
