"""A slow rank of real ranks is named within ten steps, with its phase; sound ranks are not."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_moe.training.callback import Callback
from tests.helpers.gloo_pool import GlooPool
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import EP2, PP2
from tests.helpers.trained_steps import SMALL, TINY, lines

FIRST, SECONDS = 5, 0.4
"""The step from which on a rank is slow, and by how much in each."""
PHASES = ("data", "forward", "backward", "optimizer", "save")
BUSY = "while True: pass"
# Whose experts take most of a step.
LARGE = {"hidden_size": 256, "moe_ffn_hidden_size": 2048, "seq_length": 1024}

IN_ALL = pytest.mark.test_all(
    instead="tests/training/test_stragglers_ranks.py::test_a_rank_that_is_slow_in_one_phase_is_named_within_ten_steps"
)


class Slowed(Callback):
    """Sleeps in one phase of a rank's steps, from `FIRST` on."""

    def __init__(self, phase: str, rank: int) -> None:
        self.phase, self.rank = phase, rank
        self.open = ExitStack()

    def _sleep(self, *_: Any) -> None:
        if self.trainer.progress.iteration + 1 >= FIRST:
            time.sleep(SECONDS)

    def _slowed(self, function: Any) -> Any:
        def slow(*args: Any, **named: Any) -> Any:
            self._sleep()
            return function(*args, **named)

        return slow

    def before_training(self) -> None:
        from megatron_moe.checkpoint import writer
        from megatron_moe.data.batches import Reader

        if self.trainer.rank_facts.rank != self.rank:
            return
        optimizer, (model,) = self.trainer.trained.optimizer, self.trainer.trained.model
        if self.phase == "forward":
            model.register_forward_pre_hook(self._sleep)
        if self.phase == "backward":
            for name, parameter in model.named_parameters():
                if "final_layernorm" in name:
                    parameter.register_hook(self._sleep)
        for phase, owner, name in (
            ("data", Reader, "read"),
            ("optimizer", optimizer, "step_with_ready_grads"),
            ("save", writer, "write"),  # a disk that takes long to write what the others write at once
        ):
            if phase == self.phase:
                slow = self._slowed(getattr(owner, name))
                self.open.enter_context(mock.patch.object(owner, name, slow))

    def close(self) -> None:
        self.open.close()


class Imbalanced(Callback):
    """Sends all tokens to the experts of the last rank, from `FIRST` on."""

    def before_step(self, step: Any) -> None:
        from megatron_moe.moe.router import routers

        if step.iteration == FIRST:
            for router in routers(self.trainer.trained.model):
                router.expert_bias[router.options.num_experts // 2 :] += 10


class Crowded(Callback):
    """Pins each rank to a processor, where a busy process is beside the last one, which is nicer."""

    busy: subprocess.Popen[bytes] | None = None

    def before_training(self) -> None:
        cores, facts = sorted(os.sched_getaffinity(0)), self.trainer.rank_facts
        os.sched_setaffinity(0, {cores[facts.rank]})

    def before_step(self, step: Any) -> None:
        facts = self.trainer.rank_facts
        if step.iteration == FIRST and facts.rank == facts.world_size - 1:
            self.busy = subprocess.Popen([sys.executable, "-c", BUSY])
            os.nice(15)

    def close(self) -> None:
        if self.busy is not None:
            self.busy.kill()
            self.busy.wait()


def told(flags: dict[str, Any], *callbacks: Callback) -> list[tuple[Any, ...]]:
    """Train on this case's ranks; return what rank 0 is told about slow ones: iteration, rank, phase, cause, end."""
    from megatron_moe.config.schema import build
    from megatron_moe.report.sink import Sink
    from megatron_moe.training.run import pretrain

    found: list[tuple[Any, ...]] = []

    class Told(Sink):
        def event(self, record: Any) -> None:
            if record.kind == "slow":
                found.append((record.iteration, *(record.facts[key] for key in ("rank", "phase", "experts", "ended"))))

    run = build({**TINY, **SMALL, "train_iters": FIRST + 9, "log_straggler": True, **flags})
    pretrain(run, also=(Told(),), callbacks=callbacks)
    return found


def sound(flags: dict[str, Any]) -> list[tuple[Any, ...]]:
    return told(flags)


def slowed(flags: dict[str, Any], phase: str, rank: int) -> list[tuple[Any, ...]]:
    return told(flags, Slowed(phase, rank))


def imbalanced(flags: dict[str, Any]) -> list[tuple[Any, ...]]:
    return told(flags, Imbalanced())


def crowded(flags: dict[str, Any]) -> list[tuple[Any, ...]]:
    return told(flags, Crowded())


@pytest.mark.parametrize("phase", rows(PHASES, test=["data"]))
def test_a_rank_that_is_slow_in_one_phase_is_named_within_ten_steps(gloo: Any, phase: str, tmp_path: Path) -> None:
    flags = {"metrics_file": str(tmp_path / "m.jsonl"), "prometheus_file": str(tmp_path / "m.prom"), "log_interval": 2}
    if phase == "save":
        flags |= {"save": str(tmp_path / "checkpoints"), "save_interval": 1, "keep_last_k": 1}
    (found, _) = gloo.run(2, slowed, flags=flags, phase=phase, rank=1)
    assert [one[1:] for one in found] == [(1, phase, False, False)] and found[0][0] < FIRST + 10, found
    last = lines(tmp_path / "m.jsonl")[-1]["rank_seconds"]
    assert last[phase][1] > SECONDS / 2 > last[phase][0]
    assert last["waiting"][0] > SECONDS / 2 > last["waiting"][1]
    (event,) = [line for line in lines(tmp_path / "m.events.jsonl") if line["kind"] == "slow"]
    assert (event["rank"], event["phase"]) == (1, phase) and event["host"] in event["text"]
    labels = f'rank="1",host="{event["host"]}",phase="{phase}",cause="rank"'
    assert f"megatron_moe_slow_rank{{{labels}}} 1.0\n" in (tmp_path / "m.prom").read_text()


def test_sound_ranks_are_not_named_and_train_the_same_bits(gloo: Any, tmp_path: Path) -> None:
    losses = []
    for name, flags in (("with", {}), ("without", {"log_straggler": False})):
        file = tmp_path / f"{name}.jsonl"
        run = {**EP2, **flags, "train_iters": 20, "metrics_file": str(file)}
        assert gloo.run(2, sound, flags=run) == [[], []]
        losses.append([(line["loss_hex"], line["grad_norm_hex"]) for line in lines(file)])
    assert losses[0] == losses[1]


@IN_ALL
def test_a_rank_is_compared_with_those_of_its_pipeline_stage(gloo: Any) -> None:
    found = gloo.run(4, slowed, flags={**PP2, "global_batch_size": 4}, phase="data", rank=3)
    assert [one[1] for one in found[0]] == [3]


@IN_ALL
def test_a_rank_whose_experts_have_more_to_do_is_told_from_a_slow_one(gloo: Any) -> None:
    found = gloo.run(2, imbalanced, flags={**EP2, **LARGE})[0]
    assert [(rank, experts, ended) for _, rank, _, experts, ended in found] == [(1, True, False)]
    assert found[0][2] in ("forward", "backward") and found[0][0] < FIRST + 10


@IN_ALL
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank is slow beside another one's processor")
def test_a_rank_beside_a_busy_process_is_named(rank_parent: Any) -> None:
    pool = GlooPool(rank_parent)  # niceness stays, and so these ranks serve no other case
    try:
        found = pool.run(2, crowded, flags={"seq_length": 128, "train_iters": FIRST + 20})[0]
    finally:
        pool.close()
    assert found and found[0][1] == 1 and found[0][2] in ("forward", "backward", "optimizer") and not found[0][3]
