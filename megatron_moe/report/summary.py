"""summary.json: the run's result in one small file, written atomically at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_moe.io.files import replace_json
from megatron_moe.report.metric import StepRecord
from megatron_moe.report.run_info import RunInfo
from megatron_moe.report.sink import Sink


class Totals:
    """Steps, seconds and tokens of a run, over all its incarnations."""

    def __init__(self) -> None:
        self.iterations = 0
        self.seconds = 0.0
        self.tokens = 0

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.iterations = record.iteration
        self.seconds += record.seconds
        self.tokens += record.tokens

    def as_dict(self) -> dict[str, Any]:
        """Return `iterations`, `train_seconds` (without evaluation and saving) and the mean `tokens_per_second`."""
        rate = self.tokens / self.seconds if self.seconds > 0 else None
        return {"iterations": self.iterations, "train_seconds": self.seconds, "tokens_per_second": rate}


class SummarySink(Sink):
    """A sink that writes the summary to `path`: the run's results, over what the records say, and what the run is.

    The records say `iterations`, `train_seconds` and `tokens_per_second`. `totals` holds the steps of earlier
    incarnations, so that the summary of a resumed run covers all of them. What the run is has the keys of
    `run_info.FIELDS`.
    """

    def __init__(self, path: Path, totals: Totals, info: RunInfo) -> None:
        self.artifact = path
        self._totals = totals
        self._info = info

    def step(self, record: StepRecord) -> None:
        self._totals.add(record)

    def close(self, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            assert self.artifact is not None
            self.artifact.parent.mkdir(parents=True, exist_ok=True)
            replace_json(self.artifact, {**self._totals.as_dict(), **summary, **self._info.values})
