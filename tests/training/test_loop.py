"""When a run stops before its last iteration: one rank's reason is every rank's."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_moe.checkpoint.state import TrainingProgress
from megatron_moe.config.schema import Run, replace
from megatron_moe.report.jsonl import read_evaluations, read_steps
from megatron_moe.training.loop import exit_reason


def trainer(iteration: int, **flags: Any) -> Any:
    return SimpleNamespace(run=replace(Run(), train_iters=100, **flags), progress=TrainingProgress(iteration, 0))


QUIET = SimpleNamespace(stop_signal=0)


@pytest.mark.engine
def test_an_exit_interval_stops_after_the_iteration_it_divides():
    reasons = [
        exit_reason(trainer(iteration, exit_interval=5), QUIET, time.monotonic()) for iteration in (4, 5, 6, 100)
    ]
    assert reasons == [None, "(--exit-interval 5)", None, None]


def agreed(flags: dict[str, Any], asked: int | None, late: int | None) -> str | None:
    """Rank `asked` got SIGTERM, the clock of rank `late` is two minutes ahead."""
    import torch

    rank = torch.distributed.get_rank()
    stop = SimpleNamespace(stop_signal=int(signal.SIGTERM) if rank == asked else 0)
    return exit_reason(trainer(7, **flags), stop, time.monotonic() - (120 if rank == late else 0))


@pytest.mark.engine
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
    from megatron_moe.config.presets import PRESETS
    from megatron_moe.config.schema import build
    from megatron_moe.training import loop
    from megatron_moe.training.run import pretrain

    decide = loop.exit_reason

    def asked(trainer: Any, stop: Any, started: float) -> str | None:
        if trainer.progress.iteration == stopped_at:
            stop.stop_signal = int(signal.SIGTERM)
        return decide(trainer, stop, started)

    loop.exit_reason = asked
    try:
        pretrain(build({**PRESETS["tiny"], "mock_data": True, "tokenizer_type": "ByteTokenizer", **flags}))
    finally:
        loop.exit_reason = decide


def test_an_evaluation_that_a_signal_has_left_out_is_made_up_for(gloo, tmp_path):
    small = {"num_layers": 1, "moe_layer_freq": "[1]", "seq_length": 16, "eval_interval": 2, "eval_iters": 1}
    flags = {**small, "train_iters": 4, "exit_signal_handler": True}
    for name, stops in {"whole": (None,), "parts": (2, None)}.items():
        files = {"metrics_file": str(tmp_path / f"{name}.jsonl"), "save": str(tmp_path / name)}
        for stopped_at in stops:
            more = {"load": files["save"]} if stopped_at is None and len(stops) > 1 else {}
            gloo.run(1, evaluations_of, flags={**flags, **files, **more}, stopped_at=stopped_at)
    whole, parts = (
        [(one.iteration, one.split, one.loss) for one in read_evaluations(tmp_path / f"{name}.jsonl")]
        for name in ("whole", "parts")
    )
    assert whole == parts and [(iteration, split) for iteration, split, _ in whole] == [(2, "valid"), (4, "valid")]


def run_without_a_token(flags: dict[str, Any], first: int) -> tuple[list[str], str]:
    """A run whose tokens are all masked from a micro-batch on: its messages, and the error that ends it."""
    from megatron_moe.config.errors import RunFault
    from megatron_moe.config.presets import PRESETS
    from megatron_moe.config.schema import build
    from megatron_moe.data.batches import BatchIterator
    from megatron_moe.report.reporter import Reporter
    from megatron_moe.training.run import pretrain

    take, event, told, taken = BatchIterator.__next__, Reporter.event, [], []

    def masked(iterator: Any) -> Any:
        batch = take(iterator)
        taken.append(batch)
        if len(taken) > first:
            batch["loss_mask"] *= 0
        return batch

    BatchIterator.__next__, Reporter.event = masked, lambda self, kind, text, **_: told.append(text)
    try:
        pretrain(build({**PRESETS["tiny"], "mock_data": True, "tokenizer_type": "ByteTokenizer", **flags}))
    except RunFault as fault:
        return told, str(fault)
    finally:
        BatchIterator.__next__, Reporter.event = take, event
    return told, ""


def test_a_batch_without_a_token_that_counts_is_said_and_fifty_of_them_end_the_run(gloo, tmp_path):
    small = {"num_layers": 1, "moe_layer_freq": "[1]", "seq_length": 16, "eval_iters": 0, "on_nan": "stop"}
    flags = {**small, "micro_batch_size": 8, "global_batch_size": 8, "train_iters": 60, "log_interval": 1000}
    files = {"metrics_file": str(tmp_path / "metrics.jsonl")}
    ((told, error),) = gloo.run(1, run_without_a_token, flags={**flags, **files}, first=3)
    said = [text.split(":")[0] for text in told if "no token of the global batch counts" in text]
    assert said == [f"iteration {number}" for number in range(4, 54)]
    assert "50 steps in a row up to iteration 53" in error and "not finite" not in error and "--eod-mask-loss" in error
    steps = list(read_steps(tmp_path / "metrics.jsonl"))
    assert [step.skipped for step in steps] == [False] * 3 + [True] * 50
    assert len({step.learning_rate for step in steps[3:]}) == 1
