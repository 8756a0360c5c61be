"""Callbacks: what accompanies a run is called by the training loop at fixed points, in the order of one list."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_moe.data.batches import Batch
from megatron_moe.report.metric import StepRecord
from megatron_moe.training.replay import StepReplay
from megatron_moe.training.step import StepProbe, StepResult

if TYPE_CHECKING:
    from megatron_moe.training.trainer import Trainer


@dataclass
class Step:
    """A step of the loop, from `before_step` to `after_step`."""

    iteration: int
    """Its number, from 1."""
    first_sample: int
    """Number of its first sequence, as the run counts them."""
    num_micro_batches: int
    """Of this rank."""
    replay: StepReplay
    """Runs the step's micro-batches once more."""
    began: float = field(default_factory=time.perf_counter)
    """By `time.perf_counter`."""
    contexts: ExitStack = field(default_factory=ExitStack)
    """Contexts that callbacks enter before the step and that end with it."""
    probe: StepProbe | None = None
    """Measures the step, where a callback sets it."""
    counts_zeros: bool = False
    """Whether the zeros of the gradients are counted."""
    record: StepRecord | None = None
    """The step's metrics, once they are reported."""

    @property
    def micro_batches(self) -> list[list[Batch]]:
        """The micro-batches so far, per model chunk: tokens, labels, loss_mask and so on, each [B, S]."""
        return self.replay.micro_batches


class Callback:
    """Watches a run or acts in it; override the methods that are needed.

    Each is called on all ranks, in the order of the list, so that a callback may use collectives. An error ends the
    run. `trainer` has the run's settings, model, optimizer, process groups, progress and reporter;
    `trainer.end_run(reason)` ends the run after the step, saved, and has to be called on all ranks.
    """

    trainer: Trainer

    def attach(self, trainer: Trainer) -> None:
        """Prepare for the run, which is built and has not begun."""
        self.trainer = trainer

    def notes(self) -> Sequence[str]:
        """Return lines for the start of the log."""
        return ()

    def before_training(self) -> None:
        """Act before the first step of this process."""

    def before_step(self, step: Step) -> None:
        """Act before the forward pass; no micro-batch is read yet."""

    def before_update(self, step: Step) -> None:
        """Act when gradients are reduced and nothing else has changed.

        `parameter.main_grad` has the gradients of this rank's parameters, times fp16's loss scale. They may be changed.
        """

    def after_step(self, step: Step, result: StepResult) -> None:
        """Act when the step was applied or skipped, and counted."""

    def after_training(self) -> None:
        """Act when no step follows, in a run without an error."""

    def on_error(self, error: BaseException) -> None:
        """Act when `error` ends the run; other ranks may not know of it."""

    def close(self) -> None:
        """Release what the callback holds; called in any case, in the reverse order."""
