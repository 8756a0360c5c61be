"""A loss that jumps leaves its batch behind; one that wanders does not."""

from __future__ import annotations

import json
import math
import random
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.training.callbacks.faults import LEAST, SpikeDetector
from tests.training.fault_cases import small

FEW, SPIKE, SEQUENCE, BATCH = 2, 4, 5, 8
"""Steps that a spike needs before it, the iteration that jumps, which of its sequences does it, and of how many."""


def test_a_jump_is_a_spike_and_noise_is_none():
    draw = random.Random(0)
    losses = [4.0 - 0.001 * step + draw.gauss(0, 0.05) for step in range(500)]
    detector = SpikeDetector(8.0)
    assert [step for step, loss in enumerate(losses) if detector.see(loss)] == []
    median, deviation = detector.see(5.0) or (0.0, 0.0)
    assert median == pytest.approx(3.56, abs=0.05) and deviation == pytest.approx(0.06, abs=0.02)
    # A level that stays is accepted, and the beginning of a run, where losses fall fast, knows no spikes.
    assert sum(detector.see(5.0) is not None for _ in range(128)) < 70 and detector.see(5.0) is None
    early = SpikeDetector(8.0)
    assert [early.see(loss) for loss in (9.0, 3.0, *[20.0] * (LEAST - 2))] == [None] * LEAST


def jumping_run(folder: str, flags: dict[str, Any]) -> list[float]:
    """A run in which one sequence of iteration SPIKE is hard; the losses of its samples as the step recorded them."""
    from megatron_moe.training.callback import Callback
    from megatron_moe.training.callbacks import faults
    from megatron_moe.training.run import pretrain

    losses: list[float] = []

    class Jumping(Callback):
        def attach(self, trainer: Any) -> None:
            super().attach(trainer)
            trainer.trained.model[0].register_forward_hook(self._harder, prepend=True)
            dp = trainer.trained.pg_collection.dp
            self.place, self.dp = dp.rank(), dp.size()

        def before_step(self, step: Any) -> None:
            self.step = step

        def _harder(self, _module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            # Micro-batch m of this rank begins at sequence (m x DP + its place) x 2.
            begin = ((len(self.step.micro_batches[0]) - 1) * self.dp + self.place) * 2
            hard = torch.zeros_like(output)
            if self.step.iteration == SPIKE and begin <= SEQUENCE < begin + 2:
                hard[SEQUENCE - begin] = 40.0
            return output + hard

        def after_step(self, step: Any, result: Any) -> None:
            losses.append(result.loss)

    with mock.patch.object(faults, "LEAST", FEW):
        flags = {**flags, "train_iters": SPIKE + 1, "global_batch_size": BATCH, "fault_dir": folder}
        pretrain(small(lr=1e-6, loss_spike_factor=8.0, **flags), callbacks=[Jumping()])
    return losses


@pytest.mark.parametrize("flags", [{}, {"context_parallel_size": 2}], ids=["DP2", "CP2"])
def test_the_batch_of_a_spike_is_written_down(gloo, tmp_path, flags):
    losses = gloo.run(2, jumping_run, folder=str(tmp_path), flags=flags)[0]
    (path,) = tmp_path.iterdir()
    assert path.name == f"spike_{SPIKE:07d}.jsonl"
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert (head["iteration"], head["loss"], head["first_sample"]) == (SPIKE, losses[SPIKE - 1], (SPIKE - 1) * BATCH)
    assert [line["sample"] for line in lines] == list(range((SPIKE - 1) * BATCH, SPIKE * BATCH))
    worst = max(lines, key=lambda line: line["loss"])
    assert lines.index(worst) == SEQUENCE
    tokens = sum(line["loss_tokens"] for line in lines)
    assert math.fsum(line["loss"] * line["loss_tokens"] for line in lines) / tokens == pytest.approx(head["loss"])
    assert {len(line["tokens"]) for line in lines} == {16} and len({tuple(line["tokens"]) for line in lines}) == BATCH
