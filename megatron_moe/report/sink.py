"""The interface of everything that takes the events of a run, and the sink that writes them for TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import LoggingConfig
from megatron_moe.report.metric import MetricError, StepRecord, metrics
from megatron_moe.report.records import EvalRecord, EventRecord


class Sink:
    """Takes the events of one run in order: start, then steps, evaluations and events, then end and close, once.

    A sink overrides the events that it cares for.

    A sink of your own goes to `pretrain(run, also=[sink])`. Its methods are called on rank 0, the rank that writes, and
    before those of the sinks that the flags ask for; what they raise ends the run.
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

    def close(self, summary: dict[str, Any] | None) -> None:
        """Take the end of the run: with its summary, or with None where it was interrupted."""


class TensorBoardSink(Sink):
    """Writes the scalars of all metrics under `folder`, one event per scalar and step of `--tensorboard-log-interval`.

    A resumed run writes a new event file whose first event makes TensorBoard forget every step after
    `start_iteration` of the older files.

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
        self._interval = options.tensorboard_log_interval
        self._perplexity = options.log_validation_ppl_to_tensorboard
        self._writer = SummaryWriter(
            str(folder), purge_step=start_iteration + 1, max_queue=options.tensorboard_queue_size
        )

    def start(self, facts: dict[str, Any]) -> None:
        table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
        self._writer.add_text("run", f"| | |\n|---|---|\n{table}", 0)

    def step(self, record: StepRecord) -> None:
        if record.iteration % self._interval:
            return
        written: dict[str, str] = {}
        for metric in metrics():
            for tag, number in metric.scalars(record).items():
                if tag in written:
                    raise MetricError(f"metric {metric.name}: TensorBoard tag {tag} is that of {written[tag]}")
                written[tag] = metric.name
                self._writer.add_scalar(tag, number, record.iteration)

    def evaluation(self, record: EvalRecord) -> None:
        self._writer.add_scalar(f"loss/{record.split}", record.loss, record.iteration)
        if self._perplexity:
            split = {"valid": "validation"}.get(record.split, record.split)
            perplexity = math.exp(min(record.loss, 20.0))  # bounded as in Megatron-LM
            self._writer.add_scalar(f"lm loss {split} ppl", perplexity, record.iteration)
        self._writer.flush()

    def flush(self) -> None:
        self._writer.flush()

    def close(self, summary: dict[str, Any] | None) -> None:
        self._writer.close()
