"""Marks by which the watchdog knows how far a step has come."""

from __future__ import annotations

from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.step import StepResult


class HangReport(Callback):
    """Tells the watchdog where the run is (`watchdog.py`), which ends all ranks when one hangs."""

    def before_step(self, step: Step) -> None:
        """Mark the begin of the step."""
        self.trainer.at_step("begins")

    def before_update(self, step: Step) -> None:
        """Mark the update."""
        self.trainer.at_step("update")

    def after_step(self, step: Step, result: StepResult) -> None:
        """Mark the end of the step; what follows may take long."""
        self.trainer.at(f"iteration {step.iteration}, counted", limited=False)
