"""When a run stops before its last iteration: one rank's reason is every rank's."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run, replace
from megatron_moe.report.jsonl import read_evaluations, read_steps
from megatron_moe.training.callbacks.evaluation import Stopping, asked_to_stop
from megatron_moe.training.signals import StopSignals
from megatron_moe.training.trainer import StopReason
from tests.helpers import trained_steps
from tests.helpers.stepped_trainer import PP2

SMALL = {**trained_steps.SMALL, "num_layers": 1, "moe_layer_freq": "[1]", "log_interval": 1000}


def test_an_exit_interval_stops_after_the_iteration_it_divides():
    stopping, reasons = Stopping(StopSignals(save=False)), []
    for iteration in (4, 5, 6, 100):
        run = replace(Run(), train_iters=100, exit_interval=5)
        stopping.attach(SimpleNamespace(run=run, stop_reason=None, finished=iteration == 100))
        stopping.after_step(SimpleNamespace(iteration=iteration), None)
        reasons.append(stopping.trainer.stop_reason)
    assert reasons == [None, StopReason("(--exit-interval 5)", urgent=False), None, None]


def agreed(flags: dict[str, Any], asked: int | None, late: int | None) -> str | None:
    """Rank `asked` got SIGTERM, the clock of rank `late` is two minutes ahead."""
    rank = torch.distributed.get_rank()
    stop = StopSignals(save=True)
    stop.stop_signal = int(signal.SIGTERM) if rank == asked else 0
    stop.started -= 120 if rank == late else 0
    reason = asked_to_stop(replace(Run(), train_iters=100, **flags), stop)
    return reason and reason.text


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


def signalled(flags: dict[str, Any], mark: str | None) -> int:
    """A run that gets SIGTERM where it tells the watchdog `mark`; return how many micro-batches are evaluated."""
    from megatron_moe.training import evaluate
    from megatron_moe.training.trainer import Trainer

    tell, seen = Trainer.at, []

    def at(trainer: Any, told: str, limited: bool = True) -> None:
        seen.append(told)
        if told == mark and torch.distributed.get_rank() == 0:
            signal.raise_signal(signal.SIGTERM)
        tell(trainer, told, limited)

    with mock.patch.object(Trainer, "at", at), mock.patch.object(evaluate, "_ROUND_SECONDS", 0.0):
        trained_steps.trained({**SMALL, **flags})
    return sum("evaluation (valid)" in told for told in seen)


INTERLEAVED = {"num_layers": 4, "moe_layer_freq": 1, **PP2, "num_layers_per_virtual_pipeline_stage": 1}


@pytest.mark.parametrize(("mark", "evaluated"), [("iteration 2, saving", 0), ("iteration 2, evaluation (valid)", 4)])
def test_a_step_is_saved_before_its_evaluation_which_a_signal_ends_and_the_next_start_makes_up_for(
    gloo, tmp_path, mark, evaluated
):
    flags = {**INTERLEAVED, "global_batch_size": 4, "eval_interval": 2, "eval_iters": 3, "train_iters": 4}
    for name, heard in (("whole", None), ("parts", mark), ("parts", None)):
        files = {"metrics_file": str(tmp_path / f"{name}.jsonl"), "save": str(tmp_path / name), "save_interval": 2}
        more = {"load": files["save"]} if (name, heard) == ("parts", None) else {}
        handler = {"exit_signal_handler": name == "parts"}  # without it an evaluation is one schedule
        counts = gloo.run(2, signalled, flags={**flags, **files, **handler, **more}, mark=heard)
        if heard is not None:
            assert counts[0] == evaluated  # one round of as many micro-batches as stages, for each of two chunks
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


def test_skips_are_counted_on_after_a_resume(gloo, tmp_path):
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


def test_a_run_that_counts_sequences_goes_on_by_them_with_other_batches(gloo, tmp_path):
    metrics, root = tmp_path / "metrics.jsonl", str(tmp_path / "run")
    flags = {**SMALL, "train_samples": 41, "lr_decay_style": "linear", "lr": 1e-3, "min_lr": 0.0, "lr_warmup_iters": 0}
    flags |= {"metrics_file": str(metrics), "save": root, "load": root, "exit_interval": 4}
    for batch in ({"global_batch_size": 4}, {"global_batch_size": 2}, {"global_batch_size": 8}):
        gloo.run(1, trained_steps.trained, flags={**flags, **batch})
    steps = list(read_steps(metrics))
    assert [step.global_batch_size for step in steps] == [4] * 4 + [2] * 4 + [8] * 2
    used = [step.consumed_samples - step.global_batch_size for step in steps]
    assert used == [0, 4, 8, 12, 16, 18, 20, 22, 24, 32]
    assert [step.learning_rate for step in steps] == pytest.approx([1e-3 * (1 - done / 41) for done in used])
