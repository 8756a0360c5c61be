"""summary.json: the run's result in one small file, written atomically at the end."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_moe.io.files import replace_json
from megatron_moe.report.metric import StepRecord
from megatron_moe.report.sink import Sink

_PACKAGES = ("megatron-moe", "megatron-core", "torch", "transformer-engine", "numpy", "sentencepiece", "tokenizers")


def versions() -> dict[str, str]:
    """Return name -> version of Python and of the installed packages that a run's numbers depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


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
    """A sink that writes the summary to `path`: the run's values, over defaults from the records and the environment.

    The defaults are `iterations`, `train_seconds`, `tokens_per_second` and `versions`. `totals` holds the steps of
    earlier incarnations, so that the summary of a resumed run covers all of them.
    """

    def __init__(self, path: Path, totals: Totals) -> None:
        self.artifact = path
        self._totals = totals

    def step(self, record: StepRecord) -> None:
        self._totals.add(record)

    def close(self, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            assert self.artifact is not None
            self.artifact.parent.mkdir(parents=True, exist_ok=True)
            replace_json(self.artifact, {**self._totals.as_dict(), "versions": versions(), **summary})
