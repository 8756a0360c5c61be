"""NaN and infinity are found in the same step by all ranks, and named; a loss that jumps leaves its batch behind."""

import json
import math
import random
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.training.callbacks.faults import LEAST, SpikeDetector
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, TP2, ZERO_2, ZERO_3
from tests.helpers.trained_steps import refusal
from tests.training.fault_cases import DAMAGE, FLAGS, NAMED, SITES, faulty_steps, poisoned_saves, small, stopped_run

KINDS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
STEADY_SCALE: dict[str, Any] = {"initial_loss_scale": 1024.0, "min_loss_scale": 1024.0}

SPREAD: dict[str, dict[str, Any]] = {
    "fp16, ZeRO 1 x EP2": {"fp16": True, **STEADY_SCALE, **EP2, **DISTRIBUTED},
    "bf16, ZeRO 3 x EP2": {"bf16": True, **EP2, **ZERO_3},
    "fp32": {},
    # Of a weight that both tensor-parallel ranks hold, the norm knows the first rank's gradient.
    "bf16, TP2, ETP1": {"bf16": True, **TP2, **EP2, "expert_tensor_parallel_size": 1, "global_batch_size": 2},
    "fp16, ZeRO 2": {"fp16": True, **STEADY_SCALE, **ZERO_2, "num_layers": 3},
}


def check(fault: tuple[str, str, str], results: list[dict[str, Any]]) -> None:
    """What one fault has to look like on all ranks; `results` by rank."""
    site, value, ranks = fault
    assert [result["committed"] for result in results] == [False] * len(results), fault
    assert [result["changed"] for result in results] == [[]] * len(results), fault
    assert [result["raised"] for result in results] == [site in DAMAGE] * len(results), fault
    told = results[0]["told"]
    assert len(told) == 1 and told[0].startswith("iteration "), (fault, told)
    assert NAMED[site] in told[0], (fault, told)
    assert KINDS[value] in told[0] or site == "router_logits", (fault, told)
    places = [f"rank {rank}/2 (" in told[0] for rank in range(2)]
    assert places == ([True, True] if ranks == "all" else [False, True]), (fault, told)
    assert ("continue from the last checkpoint" if site in DAMAGE else "--on-nan skip") in told[0], fault


def check_run(gloo: Any, faults: list[tuple[str, str, str]], flags: dict[str, Any]) -> None:
    results = gloo.run(2, faulty_steps, faults=faults, flags=flags)
    assert all(result["sound"] == [True] * (len(faults) + 1) for result in results)
    # The state that is compared is all that moves, or the comparison would show nothing.
    moved = {"weights", "main weights", "moments", "steps", "schedule", "bias"}
    assert all(result["moved"] == moved for result in results)
    for number, fault in enumerate(faults):
        check(fault, [result["seen"][number] for result in results])


@pytest.mark.engine
@pytest.mark.parametrize("case", rows(SPREAD, test=list(SPREAD)[:4]))
def test_every_site_is_named_and_nothing_has_changed(gloo, case):
    first = list(SPREAD).index(case)  # other values and ranks at each site
    faults = [
        (site, tuple(KINDS)[(first + number) % 3], ("one", "all")[(first + number) % 2])
        for number, site in enumerate(SITES)
    ]
    check_run(gloo, faults, SPREAD[case])


def test_an_overflow_of_one_replica_leaves_no_rank_behind(gloo):
    # The engine asks the ranks of one model only: a replica that knows nothing of it would go on alone.
    check_run(gloo, [("reduced_gradient", "nan", "one")], {**EP2, "fp16": True, **STEADY_SCALE, "health_interval": 1})


def test_no_state_with_a_nan_is_saved_or_loaded(gloo, tmp_path):
    for result in gloo.run(2, poisoned_saves, root=str(tmp_path)):
        assert result["steps"] == ["iter_0000001", "iter_0000002"]
        assert len(result["refusals"]) == len(DAMAGE)
        for site, text in zip(DAMAGE, result["refusals"]):
            assert text.startswith("saving iteration 2: ") and NAMED[site] in text and "rank 1/2" in text
    for text in gloo.run(2, refusal, flags={**FLAGS, "load": str(tmp_path)}):
        assert f"--load {tmp_path}/iter_0000002: {NAMED['adam_moment']} holds NaN" in text


@pytest.mark.parametrize(("site", "flags"), [("adam_moment", {}), ("loss", {"on_nan": "stop"})])
def test_a_run_stops_on_all_ranks_where_it_has_to(gloo, site, flags):
    told = gloo.run(2, stopped_run, site=site, flags=flags)
    assert told[0] == told[1] and told[0].startswith("iteration 2: ") and NAMED[site] in told[0]


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
