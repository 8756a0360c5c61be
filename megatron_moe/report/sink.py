"""The interface of everything that takes the events of a run: a sink overrides those that it cares for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_moe.report.records import EvalRecord, StepRecord


class Sink:
    """Takes the events of one run, in order: start, then steps, evaluations and messages, then close, once.

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

    def message(self, text: str) -> None:
        """Take a line for the person who watches the run."""

    def flush(self) -> None:
        """Put what came so far where it survives whatever the checkpoint survives that is about to be published."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """Take the end of the run: with its summary, or with None where it was interrupted."""
