"""The interface of everything that takes records: a sink overrides the events that it cares for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_moe.report.records import EvalRecord, StepRecord


class Sink:
    """Takes the events of one run, in order: start, then steps, evaluations and messages, then close, once."""

    artifact: Path | None = None
    """The file or folder that this sink leaves behind."""

    def start(self, facts: dict[str, Any]) -> None:
        """The run begins; `facts` is what is worth knowing about it, in the order to show."""

    def step(self, record: StepRecord) -> None:
        """An optimizer step is done."""

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation is done."""

    def message(self, text: str) -> None:
        """Something to tell the person who watches."""

    def flush(self) -> None:
        """A step is about to be published: what was told so far has to survive whatever the step survives."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """The run ends: with its summary, or with None where it was interrupted. Called a second time, does nothing."""
