"""When a run stops before its last iteration: one rank's reason is every rank's."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_moe.checkpoint.state import TrainingProgress
from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run, replace
from megatron_moe.report.jsonl import read_evaluations, read_steps
from megatron_moe.training.loop import exit_reason
from tests.helpers import trained_steps

SMALL = {**trained_steps.SMALL, "num_layers": 1, "moe_layer_freq": "[1]", "log_interval": 1000}


def trainer(iteration: int, **flags: Any) -> Any:
    return SimpleNamespace(run=replace(Run(), train_iters=100, **flags), progress=TrainingProgress(iteration, 0))


QUIET = SimpleNamespace(stop_signal=0)


def test_an_exit_interval_stops_after_the_iteration_it_divides():
    for iteration, reason in ((4, None), (5, "(--exit-interval 5)"), (6, None), (100, None)):
        assert exit_reason(trainer(iteration, exit_interval=5), QUIET, time.monotonic()) == reason


def agreed(flags: dict[str, Any], asked: int | None, late: int | None) -> str | None:
    """Rank `asked` got SIGTERM, the clock of rank `late` is two minutes ahead."""
    import torch

    rank = torch.distributed.get_rank()
    stop = SimpleNamespace(stop_signal=int(signal.SIGTERM) if rank == asked else 0)
    return exit_reason(trainer(7, **flags), stop, time.monotonic() - (120 if rank == late else 0))


@pytest.mark.parametrize(
    ("flags", "asked", "late", "reason"),
    [
        ({"exit_signal_handler": True}, 1, None, "by SIGTERM"),
        ({"exit_duration_in_mins": 1.0}, None, 1, "(--exit-duration-in-mins 1)"),
        ({"exit_signal_handler": True, "exit_duration_in_mins": 5.0}, None, 1, None),
    ],
)
def test_what_one_rank_sees_all_ranks_do(gloo, flags, asked, late, reason):
    assert gloo.run(2, agreed, flags=flags, asked=asked, late=late) == [reason, reason]


def evaluations_of(flags: dict[str, Any], stopped_at: int | None) -> None:
    """A run that is asked to stop at an iteration, if it is."""
    from megatron_moe.training import loop

    decide = loop.exit_reason

    def asked(trainer: Any, stop: Any, started: float) -> str | None:
        if trainer.progress.iteration == stopped_at:
            stop.stop_signal = int(signal.SIGTERM)
        return decide(trainer, stop, started)

    with mock.patch.object(loop, "exit_reason", asked):
        trained_steps.trained({**SMALL, **flags})


def test_an_evaluation_that_a_signal_has_left_out_is_made_up_for(gloo, tmp_path):
    flags = {"eval_interval": 2, "eval_iters": 1, "train_iters": 4, "exit_signal_handler": True}
    for name, stopped_at in (("whole", None), ("parts", 2), ("parts", None)):
        files = {"metrics_file": str(tmp_path / f"{name}.jsonl"), "save": str(tmp_path / name)}
        more = {"load": files["save"]} if (name, stopped_at) == ("parts", None) else {}
        gloo.run(1, evaluations_of, flags={**flags, **files, **more}, stopped_at=stopped_at)
    whole, parts = (
        [(one.iteration, one.split, one.loss) for one in read_evaluations(tmp_path / f"{name}.jsonl")]
        for name in ("whole", "parts")
    )
    assert whole == parts and [(iteration, split) for iteration, split, _ in whole] == [(2, "valid"), (4, "valid")]


def run_without_a_token(flags: dict[str, Any], first: int) -> tuple[list[str], str]:
    """A run whose tokens are all masked from a micro-batch on: its messages, and the error that ends it."""
    from megatron_moe.data.batches import BatchIterator
    from megatron_moe.report.reporter import Reporter

    take, told, taken = BatchIterator.__next__, [], []

    def masked(iterator: Any) -> Any:
        batch = take(iterator)
        taken.append(batch)
        if len(taken) > first:
            batch["loss_mask"] *= 0
        return batch

    with (
        mock.patch.object(BatchIterator, "__next__", masked),
        mock.patch.object(Reporter, "event", lambda self, kind, text, **_: told.append(text)),
        pytest.raises(RunFault) as fault,
    ):
        trained_steps.trained({**SMALL, **flags})
    return told, str(fault.value)


def test_a_batch_without_a_token_that_counts_is_said_and_fifty_of_them_end_the_run(gloo, tmp_path):
    flags = {"on_nan": "stop", "micro_batch_size": 2, "train_iters": 60}
    flags["metrics_file"] = str(tmp_path / "metrics.jsonl")
    ((told, error),) = gloo.run(1, run_without_a_token, flags=flags, first=3)
    said = [text.split(":")[0] for text in told if "no token of the global batch counts" in text]
    assert said == [f"iteration {number}" for number in range(4, 54)]
    assert "50 steps in a row up to iteration 53" in error and "not finite" not in error and "--eod-mask-loss" in error
    steps = list(read_steps(tmp_path / "metrics.jsonl"))
    assert [step.skipped for step in steps] == [False] * 3 + [True] * 50
    assert len({step.learning_rate for step in steps[3:]}) == 1


def test_skips_are_counted_on_after_a_resume(gloo: Any, tmp_path: Path) -> None:
    metrics, root = tmp_path / "metrics.jsonl", str(tmp_path / "run")
    # The scale starts so high that the first steps overflow.
    flags = {**SMALL, "fp16": True, "initial_loss_scale": 2.0**40, "hysteresis": 1, "health_interval": 1}
    flags |= {"metrics_file": str(metrics), "save": root}
    (summary,) = gloo.run(1, trained_steps.trained, flags={**flags, "train_iters": 3})
    saved = json.loads((Path(summary["checkpoint"]) / "state.json").read_text())
    assert (saved["skipped_iterations"], saved["loss_scale_lowered"], saved["loss_scale_raised"]) == (3, 3, 0)
    gloo.run(1, trained_steps.trained, flags={**flags, "train_iters": 5, "load": root})
    told = [step.health for step in read_steps(metrics)]
    assert [health.skipped_iterations for health in told] == [1, 2, 3, 4, 5]
    assert [health.loss_scale_lowered for health in told] == [1, 2, 3, 4, 5]
    assert {health.skip_rate for health in told} == {1.0}
    # Gradients that overflowed have no norm, and every layer's routing is told all the same.
    assert {health.dense_grad_norm for health in told} == {None}
    assert all(health.layers[1].sampled_tokens for health in told)
