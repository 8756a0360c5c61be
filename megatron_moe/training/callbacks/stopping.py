"""What ends a run before `--train-iters`: an interval, the clock, a signal."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_moe.config.schema import Run
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.signals import StopSignals, signal_name
from megatron_moe.training.step import StepResult
from megatron_moe.training.step_sums import max_over_ranks
from megatron_moe.training.trainer import StopReason


class StopAsked(Exception):
    """A run was asked to stop while it does something else than training; raised on all ranks together."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"stopped {reason.text}")
        self.reason = reason


class Stopping(Callback):
    """Ends the run after a step where a flag or a signal asks for it."""

    def __init__(self, stop: StopSignals) -> None:
        self._stop = stop

    def before_training(self) -> None:
        """Leave signals to the loop, on all ranks at the same time."""
        max_over_ranks(0.0)  # ranks that are ready wait here, or a signal would find some in the loop and others before
        self._stop.wait_for_loop()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Set the reason why the run ends, if there is one. Collective over all ranks."""
        trainer = self.trainer
        if trainer.stop_reason is not None or trainer.finished:
            return
        interval = trainer.run.training.exit_interval
        if interval and step.iteration % interval == 0:
            trainer.stop_reason = StopReason(f"(--exit-interval {interval})", urgent=False)
        else:
            trainer.stop_reason = asked_to_stop(trainer.run, self._stop)


def asked_to_stop(run: Run, stop: StopSignals) -> StopReason | None:
    """Return whether a signal or `--exit-duration-in-mins` ends the run now. Collective over all ranks.

    Ranks get a signal, and see the clock pass, at different times; the first one decides for all.
    """
    limit = run.training.exit_duration_in_mins
    if not (run.training.exit_signal_handler or limit):
        return None
    signal_number, minutes = max_over_ranks(stop.stop_signal, (time.monotonic() - stop.started) / 60)
    if signal_number:
        return StopReason(f"by {signal_name(int(signal_number))}", urgent=True)
    if limit is not None and minutes >= limit:
        return StopReason(f"(--exit-duration-in-mins {limit:g})", urgent=True)
    return None


def stop_check(run: Run, stop: StopSignals) -> Callable[[], None] | None:
    """Return what raises StopAsked, on all ranks, when one of them was asked to stop; None where nothing can ask."""
    if not (run.training.exit_signal_handler or run.training.exit_duration_in_mins):
        return None

    def check() -> None:
        if (reason := asked_to_stop(run, stop)) is not None:
            raise StopAsked(reason)

    return check
