"""What ends a run before `--train-iters`, and evaluations, which the same things stop.

An interval, the clock or a signal ends a run after a step. Splits are evaluated at intervals, after the step is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from megatron_moe.config.schema import Run
from megatron_moe.data.batches import batch_iterators
from megatron_moe.data.datasets import EvaluatedSamples
from megatron_moe.report.records import EvalRecord
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.callbacks.profiler import collected
from megatron_moe.training.evaluate import evaluate
from megatron_moe.training.signals import StopSignals, signal_name, time_limit
from megatron_moe.training.step import StepResult
from megatron_moe.training.step_sums import max_over_ranks
from megatron_moe.training.trainer import StopReason, Trainer


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
        self._stop.loop_looks = True

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
        return StopReason(time_limit(limit), urgent=True)
    return None


def stop_check(run: Run, stop: StopSignals) -> Callable[[], None] | None:
    """Return what raises StopAsked, on all ranks, when one of them was asked to stop; None where nothing can ask."""
    if not (run.training.exit_signal_handler or run.training.exit_duration_in_mins):
        return None

    def check() -> None:
        if (reason := asked_to_stop(run, stop)) is not None:
            raise StopAsked(reason)

    return check


class Evaluation(Callback):
    """Evaluates the validation split, or every named set, each `--eval-interval`.

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
                for split in trainer.splits.validation:
                    evaluate_split(trainer, split, stop_check(trainer.run, self._stop))
            except StopAsked as asked:
                trainer.stop_reason = asked.reason
                return
        trainer.evaluation_pending = False


def evaluate_split(trainer: Trainer, split: str, between: Callable[[], None] | None = None) -> EvalRecord:
    """Return and report the mean loss over a split's first `--eval-iters` global batches, or a named set's own."""
    run, iteration = trainer.run, trainer.progress.iteration
    groups = trainer.trained.pg_collection
    dataset, schedule = trainer.splits.evaluated[split], trainer.schedule
    num_micro_batches = run.training.eval_iters * schedule.final_micro_batches
    if isinstance(dataset, EvaluatedSamples):
        num_micro_batches = len(dataset) // schedule.samples_per_micro_batch
    batches = batch_iterators(dataset, run, consumed_samples=0, pg_collection=groups)
    for iterator in batches:
        iterator.observer = lambda _: trainer.at(f"iteration {iteration}, evaluation ({split})")
    with collected(run.training):
        record = evaluate(
            trainer.trained.model,
            batches,
            split=split,
            iteration=iteration,
            num_micro_batches=num_micro_batches,
            micro_batch_size=run.training.micro_batch_size,
            seq_length=run.model.seq_length,
            pg_collection=groups,
            in_fp32=run.precision.eval_in_fp32,
            between=between,
        )
    record = replace(record, bytes=trainer.predicted_bytes.get(split))
    trainer.reporter.evaluation(record)
    trainer.at(f"iteration {iteration}, evaluated", limited=False)
    return record
