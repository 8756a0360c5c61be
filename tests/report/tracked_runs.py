"""Runs that are reported to W&B or MLflow, without training."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config import schema
from megatron_moe.config.schema import Run
from megatron_moe.report import tracker
from megatron_moe.report.jsonl import read_events
from megatron_moe.report.records import EvalRecord, StepRecord
from tests.report.steps import STEP, reporter

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a process as long as a slow machine takes."""
    monkeypatch.setattr(tracker, "SECONDS_TO_CLOSE", 300.0)
    monkeypatch.setattr(tracker, "SECONDS_TO_CLOSE_INTERRUPTED", 300.0)


def step(iteration: int, loss: float) -> StepRecord:
    return STEP.replace(iteration=iteration, consumed_samples=8 * iteration, loss=loss)


def run_of(folder: Path, **flags: Any) -> Run:
    return schema.replace(schema.Run(), metrics_file=str(folder / "metrics.jsonl"), train_iters=6, **flags)


def of_wandb(folder: Path, **flags: Any) -> Run:
    return run_of(folder, wandb_project="moe", save=str(folder / "w"), **flags)


def report(run: Run, start: int, last: int, ending: str = "finished", changed: int = 99, opened: str = "") -> str:
    """Report steps after `start`; the losses of those from `changed` on are other ones than a repeated step's.

    The run goes on until `opened` is said: a service's process has a minute to finish, which may import for longer.
    """
    stream = io.StringIO()
    with reporter(run, start, stream) as running:
        running.start({"device": "cpu"})
        for iteration in range(start + 1, last + 1):
            running.step(step(iteration, 9.0 - iteration + (0.5 if iteration >= changed else 0.0)))
        running.evaluation(EvalRecord(last, "valid", 3.0, 100, 0.1))
        while opened not in stream.getvalue():
            assert " gets no more of this run" not in stream.getvalue(), stream.getvalue()
            time.sleep(0.05)
            running.flush()
        running.close({}, ending)
    return stream.getvalue()


def events(folder: Path, kind: str) -> list[str]:
    return [event.text for event in read_events(folder / "metrics.jsonl") if event.kind == kind]


def about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.run.json").read_text())
