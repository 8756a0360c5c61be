"""A program's own callbacks, by which one rank's error or wish to stop becomes that of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.metrics import raise_together
from megatron_moe.training.step import StepResult
from megatron_moe.training.step_sums import max_over_ranks
from megatron_moe.training.trainer import StopReason, Trainer


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
        self._call("attach", trainer)

    def notes(self) -> Sequence[str]:
        """Return the callbacks' notes."""
        return [note for callback in self._callbacks for note in callback.notes()]

    def before_training(self) -> None:
        """Call the callbacks, see `Callback`."""
        self._call("before_training")

    def before_step(self, step: Step) -> None:
        """Call the callbacks, see `Callback`."""
        self._call("before_step", step)

    def before_update(self, step: Step) -> None:
        """Call the callbacks, see `Callback`."""
        self._call("before_update", step)

    def after_step(self, step: Step, result: StepResult) -> None:
        """Call the callbacks, and end the run on all ranks where it is to end on one."""
        self._call("after_step", step, result)
        if self._on_some_rank:
            reasons: list[StopReason | None] = [None] * self.trainer.rank_facts.world_size
            torch.distributed.all_gather_object(reasons, self.trainer.stop_reason)
            self.trainer.stop_reason = next((reason for reason in reasons if reason is not None), None)

    def after_training(self) -> None:
        """Call the callbacks, see `Callback`."""
        self._call("after_training")

    def on_error(self, error: BaseException) -> None:
        """Call the callbacks; what they raise themselves is reported beside the error."""
        for callback in self._callbacks:
            try:
                callback.on_error(error)
            except Exception as another:
                self.trainer.reporter.event("warning", str(_failure(callback, "on_error", another)))

    def close(self) -> None:
        """Close all callbacks; what one raises is reported."""
        for callback in self._callbacks:
            try:
                callback.close()
            except Exception as error:
                self.trainer.reporter.event("warning", str(_failure(callback, "close", error)))

    def _call(self, hook: str, *arguments: object) -> None:
        """Call a method of all callbacks. Collective over all ranks where one of them has callbacks.

        Raises:
            RunFault: on all ranks, naming the callback that failed.
        """
        failure: CallbackError | None = None
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(*arguments)
            except Exception as error:
                failure = _failure(callback, hook, error)
                break
        if self._on_some_rank:
            raise_together(failure)


def _failure(callback: Callback, hook: str, error: Exception) -> CallbackError:
    failure = CallbackError(f"the callback's {type(callback).__name__}.{hook} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
