"""A loss, gradient or state that is not finite: what it is, where it came from, and what `--on-nan` does about it.

The check that every step makes says only that something is wrong, to all ranks at once. Then, and only then, comes the
second look: state and gradients by name, and the step's micro-batches once more with every tensor looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_moe.checkpoint.state import Trained
from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run
from megatron_moe.data.batches import BatchIterator
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.training.finite_state import (
    damage,
    described,
    non_finite_gradients,
    non_finite_state,
    places_in_words,
)
from megatron_moe.training.job import Job
from megatron_moe.training.replay import Replay
from megatron_moe.training.replicas import require_equal_replicas
from megatron_moe.training.sightings import BACKWARD, Sighting, Sightings
from megatron_moe.training.spikes import SpikeWatch
from megatron_moe.training.step import StepResult


class FaultWatch:
    """Looks at every step of a run.

    Args:
        job: the run.
        batches: its iterators of training micro-batches, one per model chunk.
    """

    def __init__(self, job: Job, batches: Sequence[BatchIterator]) -> None:
        self._job = job
        self._replay = Replay(batches, job.trained.pg_collection, lambda number: self._at(f"micro-batch {number}"))
        self._spikes: SpikeWatch | None = None
        if job.run.faults.loss_spike_factor is not None:
            assert job.fault_folder is not None, "rules.faults.spikes_have_a_folder"
            self._spikes = SpikeWatch(job, self._replay, job.fault_folder)
        self._first_sample = 0

    def begin(self) -> None:
        """A step begins."""
        self._at("begins")
        self._first_sample = self._job.progress.consumed_samples
        self._replay.begin()
        if self._spikes is not None:
            self._spikes.begin()

    def before_update(self) -> None:
        """The gradients are there, and nothing is changed yet. Collective over all ranks.

        Raises:
            RunFault: replicas differ.
        """
        self._at("update")
        interval = self._job.run.faults.check_weight_hash_across_dp_replicas_interval
        iteration = self._job.progress.iteration + 1
        if interval and iteration % interval == 0:
            require_equal_replicas(self._job.trained, self._job.place, iteration)

    def end(self, result: StepResult) -> None:
        """The step is counted. Collective over all ranks.

        Raises:
            RunFault: it was not applied, and the run is to stop or its state is damaged.
        """
        self._job.at(f"iteration {self._job.progress.iteration}, counted", limited=False)
        if result.committed:
            if self._spikes is not None:
                self._spikes.see(result.loss, self._first_sample)
        elif result.empty:
            self._job.reporter.message(
                f"iteration {self._job.progress.iteration}: no token of the global batch counts for the loss (every "
                "loss mask is 0): nothing is learnt from it, weights, expert_bias and learning rate stay as they were"
            )
        elif not result.overflow:
            self._answer(result)

    def _at(self, mark: str) -> None:
        self._job.at(f"iteration {self._job.progress.iteration + 1}, {mark}")

    def _answer(self, result: StepResult) -> None:
        job = self._job
        words, damaged = look_again(job.run, job.trained, job.place, self._replay)
        told = f"iteration {job.progress.iteration}: {words}"
        if result.damaged or damaged:
            raise RunFault(f"{told}; no step that is left out heals that: continue from the last checkpoint")
        if job.run.faults.on_nan == "stop":
            raise RunFault(f"{told}; stopped (--on-nan stop), nothing of the step was applied")
        job.reporter.message(f"{told}; the step is left out (--on-nan skip), {job.progress.skipped_iterations} so far")


@dataclass(frozen=True)
class Report:
    """What one rank found. place: the rank in words. state, gradients: descriptions. first: of the replay."""

    place: str
    state: list[str]
    gradients: list[str]
    first: Sighting | None


def look_again(run: Run, trained: Trained, place: RankFacts, replay: Replay) -> tuple[str, bool]:
    """Say where the step that has just failed went wrong. Collective over all ranks, after `train_step`.

    Returns:
        One sentence, the same on every rank, and whether it is the run's state that is damaged.
    """
    state = [f"{what} holds {described(tensor)}" for what, tensor in non_finite_state(trained)]
    gradients = [f"{what} holds {described(tensor)}" for what, tensor in non_finite_gradients(trained.model)]
    sightings = Sightings(trained.model, len(replay.held[0]), (place.pp_rank, place.pp_size))
    with sightings.watching():
        replay.again(trained.model, micro_batch_size=run.training.micro_batch_size, seq_length=run.model.seq_length)
    own = Report(str(place), state, gradients, min(sightings.seen, default=None))
    reports: list[Any] = [None] * place.world_size
    dist.all_gather_object(reports, own)
    return verdict(reports), any(report.state for report in reports)


def verdict(reports: Sequence[Report]) -> str:
    """The root of what all ranks found: damaged state before activations, those before gradients."""
    if any(report.state for report in reports):
        return damage([(report.place, report.state) for report in reports])
    first = min((report.first for report in reports if report.first is not None), default=None)
    if first is not None:
        where = [report.place for report in reports if report.first == first]
        of_pass = "backward" if first.phase == BACKWARD else "forward"
        return (
            f"{first.value} of {first.what}, the first in the {of_pass} pass of micro-batch {first.micro_batch}, "
            f"on {places_in_words(where)}"
        )
    again = "the same micro-batches, run once more, are finite on all ranks"
    spoiled = [(report.gradients, report.place) for report in reports if report.gradients]
    if spoiled:
        names = spoiled[0][0]
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return (
            f"{names[0]}{others}, on {places_in_words([place for _, place in spoiled])}; {again}: "
            "it came about while gradients were reduced, or does not repeat"
        )
    return f"the loss or the gradients' norm was not finite; {again}: a fault that does not repeat"
