"""The training loop: step, report, evaluate, save, and stop when it is time to."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run
from megatron_moe.report.records import exact
from megatron_moe.training.faults import FaultWatch
from megatron_moe.training.garbage import collect_after
from megatron_moe.training.gradients import weights_norm
from megatron_moe.training.health import HealthProbe
from megatron_moe.training.metrics import NO_EXPERT_LOAD, Meter, agreed_record, expert_load
from megatron_moe.training.profiler import ProfiledSteps
from megatron_moe.training.signals import StopSignals, signal_name
from megatron_moe.training.step import StepResult, connect, train_step
from megatron_moe.training.step_sums import max_over_ranks
from megatron_moe.training.timers import interval_times, start_timing, times_text
from megatron_moe.training.trainer import Trainer

SKIPS_IN_A_ROW = 50
"""A run whose steps are all skipped learns nothing. fp16's first loss scale may take forty steps to come down."""


StepAudit = Callable[[Run, list[torch.nn.Module], Callable[[str], None]], AbstractContextManager[None]]
"""What `--audit-precision` puts around a step: from the run, its model and the reporter's message, a context."""


@dataclass(frozen=True)
class StopReason:
    """What ends a run before `--train-iters`."""

    text: str
    """As it follows "stopped at iteration 7": "by SIGTERM"."""
    urgent: bool
    """Whether whoever asked for it waits: a final evaluation is left out."""


class StopAsked(Exception):
    """A run was asked to stop while it does something else than training; raised on all ranks together."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"stopped {reason.text}")
        self.reason = reason


def train(trainer: Trainer, stop: StopSignals, audit: StepAudit | None = None) -> StopReason | None:
    """Train until `--train-iters` or an exit condition; the last state is saved.

    Each round runs one step, looks after a checkpoint in the background, and checks dtypes, saves and evaluates where
    these are due. A step is saved before it is evaluated: an evaluation may take long, and is stopped by the same
    conditions as training.

    Args:
        audit: with `--audit-precision`, the context around the process's second step.

    Returns:
        What stopped it before `--train-iters`; None where it did all iterations.

    Raises:
        SaveError: a checkpoint could not be written, and `--on-save-error` is stop or it was the last.
        RunFault: a step was not finite and `--on-nan` is stop, too many in a row were not, the state is damaged, or
            replicas differ; or a metric or sink that a program has added failed.
    """
    steps = StepRunner(trainer, audit)
    try:
        return _train(trainer, stop, steps)
    finally:
        steps.close()


def _train(trainer: Trainer, stop: StopSignals, steps: StepRunner) -> StopReason | None:
    """Run the rounds of `train`."""
    skips = 0
    max_over_ranks(0.0)  # ranks that are ready wait here, or a signal would find some in the loop and others before it
    stop.wait_for_loop()
    reason = _evaluate(trainer, stop)  # which the loaded step owes
    while reason is None and not trainer.finished:
        result = steps.run_next()
        trainer.poll_save()
        _check_precision(trainer)
        skips = 0 if result.committed else skips + 1
        if skips == SKIPS_IN_A_ROW:
            raise RunFault(_nothing_learnt(trainer.progress.iteration, result))
        reason = exit_reason(trainer, stop)
        options = trainer.run.training
        trainer.evaluation_pending = options.eval_iters > 0 and _due(trainer, options.eval_interval)
        if reason is not None or _due(trainer, trainer.run.checkpoint.save_interval):
            trainer.save()
        if reason is None:
            reason = _evaluate(trainer, stop)
    trainer.save()
    trainer.finish_save()
    return reason


class StepRunner:
    """The steps of this process: runs one after the other, and reports each of them.

    Args:
        audit: the context around the second step.
    """

    def __init__(self, trainer: Trainer, audit: StepAudit | None) -> None:
        run, trained = trainer.run, trainer.trained
        connect(trained.model, trained.optimizer)
        start_timing(trained.model, run.logging.timing_log_level)
        self._trainer, self._audit = trainer, audit
        self._batches = trainer.batches(trainer.splits.train, trainer.progress.consumed_samples)
        self._fault_checks = FaultWatch(trainer, self._batches)
        self._meter = Meter(run, world_size=trainer.rank_facts.world_size, padded_vocab_size=trainer.padded_vocab_size)
        self._profiler = ProfiledSteps(run, trainer.rank_facts.rank, trainer.reporter.message)
        self._audited = trainer.progress.iteration + 1  # what a process does once is done in the step before
        if audit is not None and (run.training.train_iters or 0) < self._audited + 1:
            trainer.reporter.message(
                "--audit-precision traces the second step of a process, and only one is left: no audit"
            )

    def run_next(self) -> StepResult:
        """Run a step, count and report it, and check it for faults.

        Raises:
            RunFault: see `train`.
        """
        trainer, trained, run = self._trainer, self._trainer.trained, self._trainer.run
        self._profiler.begin(trainer.progress.iteration)
        begin = time.perf_counter()
        num_micro_batches = trainer.schedule.num_micro_batches(trainer.progress.consumed_samples)
        probe = _probe(trainer, num_micro_batches)
        self._fault_checks.begin()
        with self._audit_of_this_step():
            result = train_step(
                trained.model,
                trained.optimizer,
                trained.scheduler,
                self._batches,
                num_micro_batches=num_micro_batches,
                micro_batch_size=run.training.micro_batch_size,
                seq_length=run.model.seq_length,
                pg_collection=trained.pg_collection,
                average=trained.average,
                probe=probe,
                before_update=self._before_update,
                zeros_counted=run.logging.log_num_zeros_in_grad and _logged(run, trainer.progress.iteration + 1),
            )
        self._profiler.end(trainer.progress.iteration + 1)
        _count_and_report(trainer, result, self._meter, begin, probe)
        self._fault_checks.end(result)
        collect_after(trainer.progress.iteration, run.training)
        return result

    def close(self) -> None:
        """Write the trace of steps that are still being profiled."""
        self._profiler.close()

    def _before_update(self) -> None:
        self._fault_checks.before_update()
        self._trainer.wait_for_copy()

    def _audit_of_this_step(self) -> AbstractContextManager[None]:
        if self._audit is None or self._trainer.progress.iteration != self._audited:
            return nullcontext()
        return self._audit(self._trainer.run, self._trainer.trained.model, self._trainer.reporter.message)


def _check_precision(trainer: Trainer) -> None:
    """Check all dtypes at the end of each `--check-precision-interval`."""
    interval = trainer.run.precision.check_precision_interval
    if interval and trainer.progress.iteration % interval == 0:
        trainer.check_precision("training")


def _evaluate(trainer: Trainer, stop: StopSignals) -> StopReason | None:
    """Make the evaluation that is due, and return what stopped it; the next start makes up for it then."""
    if trainer.evaluation_pending and trainer.run.training.eval_iters:
        try:
            trainer.evaluate("valid", stop_check(trainer.run, stop))
        except StopAsked as asked:
            return asked.reason
    trainer.evaluation_pending = False
    return None


def _nothing_learnt(iteration: int, last: StepResult) -> str:
    """Return why a run ends after `SKIPS_IN_A_ROW` steps without an update, by the last of them."""
    if last.empty:
        what = "a global batch without one token that counts for the loss"
        remedy = "Look at the loss masks of the data (--eod-mask-loss, or labels that are all masked)."
    else:
        what = "a loss or gradients that were not finite"
        remedy = "A smaller --lr, --clip-grad or bf16 instead of fp16 may help."
    return (
        f"{SKIPS_IN_A_ROW} steps in a row up to iteration {iteration}, the last with {what}; none was applied. {remedy}"
    )


def _probe(trainer: Trainer, num_micro_batches: int) -> HealthProbe | None:
    """Return what measures the coming step, at the end of each `--health-interval`; None for the others."""
    interval = trainer.run.derived.health_interval
    if not interval or (trainer.progress.iteration + 1) % interval:
        return None
    return HealthProbe(trainer.trained.model, trainer.run.logging.health_sample_tokens, num_micro_batches)


def _count_and_report(
    trainer: Trainer, result: StepResult, meter: Meter, begin: float, probe: HealthProbe | None
) -> None:
    """Count the step, then report its metrics."""
    size = trainer.count(result)
    progress, options = trainer.progress, trainer.run.logging
    logged = _logged(trainer.run, progress.iteration)
    groups = trainer.trained.pg_collection
    load = expert_load(result.router_update, groups) if logged or probe is not None else NO_EXPERT_LOAD
    times = interval_times(trainer.trained.model, options.timing_log_level, options.log_interval) if logged else None
    health = None if probe is None else probe.health(load.tokens_per_expert, progress, groups.pp)
    record = agreed_record(
        meter,
        result,
        load,
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        global_batch_size=size,
        seconds=time.perf_counter() - begin,
        health=health,
        params_norm=weights_norm(trainer.trained.optimizer) if logged and options.log_params_norm else None,
        part_seconds={name: slowest for name, (_, slowest) in (times or {}).items()},
    )
    trainer.records.append(exact(record))
    trainer.reporter.step(record)
    trainer.require_sinks()
    if times is not None:
        trainer.reporter.message(times_text(times))


def _logged(run: Run, iteration: int) -> bool:
    """Return whether a log line ends with this iteration: what takes a measurement of its own is measured there."""
    return iteration % run.logging.log_interval == 0


def _due(trainer: Trainer, interval: int | None) -> bool:
    """Return whether this iteration ends an interval; the end of the run has its own evaluation and checkpoint."""
    done = trainer.progress.iteration
    return bool(interval) and done % interval == 0 and done < (trainer.run.training.train_iters or 0)


def exit_reason(trainer: Trainer, stop: StopSignals) -> StopReason | None:
    """Return what stops the run after this step, before `--train-iters`; None to go on. Collective over all ranks."""
    options, done = trainer.run.training, trainer.progress.iteration
    if done >= (options.train_iters or 0):
        return None
    if options.exit_interval and done % options.exit_interval == 0:
        return StopReason(f"(--exit-interval {options.exit_interval})", urgent=False)
    return asked_to_stop(trainer.run, stop)


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
