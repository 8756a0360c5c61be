"""Callbacks: what accompanies a run is called by the training loop at fixed points, in the order of one list.

A program may hand in its own: `OwnCallbacks` makes one rank's error or wish to stop that of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from megatron_moe.checkpoint.errors import all_gather_object
from megatron_moe.data.batches import Batch
from megatron_moe.report.metric import StepRecord
from megatron_moe.training.metrics import raise_together
from megatron_moe.training.replay import StepReplay
from megatron_moe.training.step import StepProbe, StepResult
from megatron_moe.training.step_sums import max_over_ranks
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
    rank_seconds: dict[str, list[float]] = field(default_factory=dict)
    """What each rank spent its time on, where that is known, on rank 0; see `StepRecord.rank_seconds`."""
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


class CallbackError(Exception):
    """A program's own callback raised an error, which is its cause."""


class OwnCallbacks(Callback):
    """Calls the callbacks that a program handed to `pretrain`; ranks agree after each call.

    Every rank may have other callbacks, or none. Without any on any rank nothing is exchanged.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self._on_some_rank = False

    def attach(self, trainer: Trainer) -> None:
        """Attach all callbacks. Collective over all ranks."""
        super().attach(trainer)
        self._on_some_rank = bool(max_over_ranks(len(self._callbacks))[0])
        self._call("attach", lambda callback: callback.attach(trainer))

    def notes(self) -> Sequence[str]:
        """Return the callbacks' notes."""
        return [note for callback in self._callbacks for note in callback.notes()]

    def before_training(self) -> None:
        self._call("before_training", lambda callback: callback.before_training())

    def before_step(self, step: Step) -> None:
        self._call("before_step", lambda callback: callback.before_step(step))

    def before_update(self, step: Step) -> None:
        self._call("before_update", lambda callback: callback.before_update(step))

    def after_step(self, step: Step, result: StepResult) -> None:
        """Call the callbacks, and end the run on all ranks where it is to end on one."""
        self._call("after_step", lambda callback: callback.after_step(step, result))
        if self._on_some_rank:
            reasons = [reason for reason in all_gather_object(self.trainer.stop_reason) if reason is not None]
            if reasons:
                self.trainer.stop_reason = reasons[0]

    def after_training(self) -> None:
        self._call("after_training", lambda callback: callback.after_training())

    def on_error(self, error: BaseException) -> None:
        """Call the callbacks; what they raise themselves is reported beside the error."""
        self._report("on_error", lambda callback: callback.on_error(error))

    def close(self) -> None:
        """Close all callbacks; what one raises is reported."""
        self._report("close", lambda callback: callback.close())

    def _report(self, hook: str, call: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            try:
                call(callback)
            except Exception as error:
                self.trainer.reporter.event("warning", str(_failure(callback, hook, error)))

    def _call(self, hook: str, call: Callable[[Callback], None]) -> None:
        """Call the method `hook` of all callbacks. Collective over all ranks where one of them has callbacks.

        Raises:
            RunFault: on all ranks, naming the callback that failed.
        """
        failure: CallbackError | None = None
        for callback in self._callbacks:
            try:
                call(callback)
            except Exception as error:
                failure = _failure(callback, hook, error)
                break
        if self._on_some_rank:
            raise_together(failure)


def _failure(callback: Callback, hook: str, error: Exception) -> CallbackError:
    failure = CallbackError(f"the callback's {type(callback).__name__}.{hook} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
