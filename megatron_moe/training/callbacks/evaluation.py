"""Evaluations of a run's splits: at intervals, after the step is saved."""

from __future__ import annotations

from collections.abc import Callable

from megatron_moe.report.records import EvalRecord
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.callbacks.garbage import collected
from megatron_moe.training.callbacks.stopping import StopAsked, stop_check
from megatron_moe.training.evaluate import evaluate
from megatron_moe.training.signals import StopSignals
from megatron_moe.training.step import StepResult
from megatron_moe.training.trainer import Trainer


class Evaluation(Callback):
    """Evaluates the validation split every `--eval-interval`.

    A step is saved before it is evaluated: an evaluation may take long, and is stopped by what stops training.
    """

    def __init__(self, stop: StopSignals) -> None:
        self._stop = stop

    def before_training(self) -> None:
        """Make the evaluation that the loaded step owes."""
        self._evaluate()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Make the evaluation that is due, unless the run is to stop; the next start makes up for it then."""
        if self.trainer.stop_reason is None:
            self._evaluate()

    def _evaluate(self) -> None:
        trainer = self.trainer
        if trainer.evaluation_pending and trainer.run.training.eval_iters:
            try:
                evaluate_split(trainer, "valid", stop_check(trainer.run, self._stop))
            except StopAsked as asked:
                trainer.stop_reason = asked.reason
                return
        trainer.evaluation_pending = False


def evaluate_split(trainer: Trainer, split: str, between: Callable[[], None] | None = None) -> EvalRecord:
    """Return and report the mean loss over the first `--eval-iters` global batches of a split.

    Args:
        between: see `evaluate`.
    """
    run, iteration = trainer.run, trainer.progress.iteration
    batches = trainer.batches(getattr(trainer.splits, split), 0)
    for iterator in batches:
        iterator.observer = lambda _: trainer.at(f"iteration {iteration}, evaluation ({split})")
    with collected(run.training):
        record = evaluate(
            trainer.trained.model,
            batches,
            split=split,
            iteration=iteration,
            num_micro_batches=run.training.eval_iters * trainer.schedule.final_micro_batches,
            micro_batch_size=run.training.micro_batch_size,
            seq_length=run.model.seq_length,
            pg_collection=trainer.trained.pg_collection,
            in_fp32=run.precision.eval_in_fp32,
            between=between,
        )
    trainer.reporter.evaluation(record)
    trainer.at(f"iteration {iteration}, evaluated", limited=False)
    return record
