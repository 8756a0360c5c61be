"""Checks of the run's precision: its dtypes at intervals, and the audit of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from megatron_moe.config.schema import Run
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.step import StepResult

StepAudit = Callable[[Run, list[torch.nn.Module], Callable[[str], None]], AbstractContextManager[None]]
"""What `--audit-precision` puts around a step: from the run, its model and the reporter's message, a context."""


class PrecisionCheck(Callback):
    """Checks all dtypes of model and optimizer at the end of each `--check-precision-interval`."""

    def after_step(self, step: Step, result: StepResult) -> None:
        """Check the dtypes where that is due.

        Raises:
            PrecisionError: on this rank only: the launcher ends the others.
        """
        interval = self.trainer.run.precision.check_precision_interval
        if interval and step.iteration % interval == 0:
            self.trainer.check_precision("training")


class PrecisionAudit(Callback):
    """Traces the second step of the process: what a process does once is done in the first.

    Args:
        audit: what traces it; None without `--audit-precision`.
    """

    def __init__(self, audit: StepAudit | None) -> None:
        self._audit = audit
        self._iteration = 0

    def notes(self) -> Sequence[str]:
        """Say where the run ends before its second step."""
        self._iteration = self.trainer.progress.iteration + 2
        if self._audit is None or self._iteration <= (self.trainer.run.training.train_iters or 0):
            return ()
        return ["--audit-precision traces the second step of a process, and only one is left: no audit"]

    def before_step(self, step: Step) -> None:
        """Trace the step from here on."""
        if self._audit is not None and step.iteration == self._iteration:
            trainer = self.trainer
            step.contexts.enter_context(self._audit(trainer.run, trainer.trained.model, trainer.reporter.message))
