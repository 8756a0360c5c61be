"""The loop: step, tell, evaluate, save, and know when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_moe import platform
from megatron_moe.checkpoint.state import TrainingProgress
from megatron_moe.config import derived
from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run
from megatron_moe.report.records import exact
from megatron_moe.training.faults import FaultWatch
from megatron_moe.training.health import HealthProbe
from megatron_moe.training.job import Trainer
from megatron_moe.training.metrics import NO_EXPERT_LOAD, Meter, expert_load
from megatron_moe.training.signals import StopSignals, signal_name
from megatron_moe.training.step import StepResult, connect, train_step
from megatron_moe.training.timers import start_timing, told_times

SKIPS_IN_A_ROW = 50
"""A run whose steps are all skipped learns nothing. fp16's first loss scale may take forty steps to come down."""


StepAudit = Callable[[Run, list[torch.nn.Module], Callable[[str], None]], AbstractContextManager[None]]
"""What `--audit-precision` puts around a step: from the run, its model and the reporter's message, a context."""


def train(job: Trainer, stop: StopSignals, audit: StepAudit | None = None) -> str:
    """Train until `--train-iters` or an exit condition; the last state is saved.

    Args:
        audit: with `--audit-precision`, the context around the process's second step.

    Returns:
        Why it ended, in words.

    Raises:
        SaveError: a checkpoint could not be written, and `--on-save-error` is stop or it was the last.
        RunFault: a step was not finite and `--on-nan` is stop, too many in a row were not, the state is damaged, or
            replicas differ.
    """
    run, trained = job.run, job.trained
    connect(trained.model, trained.optimizer)
    start_timing(trained.model, run.logging.timing_log_level)
    batches = job.batches(job.splits.train, job.progress.consumed_samples)
    watch = FaultWatch(job, batches)
    meter = Meter(run, world_size=job.place.world_size, padded_vocab_size=job.padded_vocab_size)

    def before_update() -> None:
        watch.before_update()
        job.wait_for_copy()

    started, skips, first = time.monotonic(), 0, job.progress.iteration
    if audit is not None and (run.training.train_iters or 0) < first + 2:
        job.reporter.message("--audit-precision traces the second step of a process, and only one is left: no audit")
    if job.evaluation_owed and run.training.eval_iters:
        job.evaluate("valid")
    job.evaluation_owed = False
    while job.progress.iteration < (run.training.train_iters or 0):
        begin = time.perf_counter()
        num_micro_batches = job.schedule.num_micro_batches(job.progress.consumed_samples)
        probe = _probe(job, num_micro_batches)
        watch.begin()
        with _audited(job, audit if job.progress.iteration == first + 1 else None):
            result = train_step(
                trained.model,
                trained.optimizer,
                trained.scheduler,
                batches,
                num_micro_batches=num_micro_batches,
                micro_batch_size=run.training.micro_batch_size,
                seq_length=run.model.seq_length,
                pg_collection=trained.pg_collection,
                probe=probe,
                before_update=before_update,
            )
        _advance(job, result, meter, begin, probe)
        watch.end(result)
        job.poll_save()
        interval = run.precision.check_precision_interval
        if interval and job.progress.iteration % interval == 0:
            job.check_precision("training")
        skips = 0 if result.committed else skips + 1
        if skips == SKIPS_IN_A_ROW:
            raise RunFault(_nothing_learnt(job.progress.iteration, result))
        reason = exit_reason(job, stop, started)
        if run.training.eval_iters and _due(job, run.training.eval_interval):
            if reason is None:
                job.evaluate("valid")
            else:
                job.evaluation_owed = agreed_stop(run, stop)
        if reason is not None or _due(job, run.checkpoint.save_interval):
            job.save()
        if reason is not None:
            job.finish_save()
            return reason
    job.save()
    job.finish_save()
    return f"done: {job.progress.iteration} iterations"


def _nothing_learnt(iteration: int, last: StepResult) -> str:
    """Why a run ends after `SKIPS_IN_A_ROW` steps without an update, by the last of them."""
    if last.empty:
        what = "a global batch without one token that counts for the loss"
        remedy = "Look at the loss masks of the data (--eod-mask-loss, or labels that are all masked)."
    else:
        what = "a loss or gradients that were not finite"
        remedy = "A smaller --lr, --clip-grad or bf16 instead of fp16 may help."
    return (
        f"{SKIPS_IN_A_ROW} steps in a row up to iteration {iteration}, the last with {what}; none was applied. {remedy}"
    )


def _audited(job: Trainer, audit: StepAudit | None) -> AbstractContextManager[None]:
    """Return the audit's context of the process's second step: the first one pays what is paid once."""
    if audit is None:
        return nullcontext()
    return audit(job.run, job.trained.model, job.reporter.message)


def _probe(job: Trainer, num_micro_batches: int) -> HealthProbe | None:
    """What measures the coming step, at the end of each `--health-interval`; None for the others."""
    interval = derived.health_interval(job.run)
    if not interval or (job.progress.iteration + 1) % interval:
        return None
    return HealthProbe(job.trained.model, job.run.logging.health_sample_tokens, num_micro_batches)


def _advance(job: Trainer, result: StepResult, meter: Meter, begin: float, probe: HealthProbe | None) -> None:
    """Count the step, skipped or not: its sequences are consumed. Then tell about it."""
    size = job.schedule.global_batch_size(job.progress.consumed_samples)
    past = job.progress
    job.progress = TrainingProgress(
        past.iteration + 1,
        past.consumed_samples + size,
        past.skipped_iterations + (not result.committed),
        past.loss_scale_raised + (result.next_loss_scale > result.loss_scale),
        past.loss_scale_lowered + (result.next_loss_scale < result.loss_scale),
    )
    job.saved = None
    told = job.progress.iteration % job.run.logging.log_interval == 0
    groups = job.trained.pg_collection
    load = expert_load(result.router_update, groups) if told or probe is not None else NO_EXPERT_LOAD
    health = None if probe is None else probe.health(load.tokens_per_expert, job.progress, groups.pp)
    record = meter.record(
        result,
        load,
        iteration=job.progress.iteration,
        consumed_samples=job.progress.consumed_samples,
        global_batch_size=size,
        seconds=time.perf_counter() - begin,
        health=health,
    )
    job.records.append(exact(record))
    job.reporter.step(record)
    if told:
        level, interval = job.run.logging.timing_log_level, job.run.logging.log_interval
        times = told_times(job.trained.model, level, interval)
        if times is not None:
            job.reporter.message(times)


def _due(job: Trainer, interval: int | None) -> bool:
    """Whether this iteration ends an interval; the end of the run has its own evaluation and checkpoint."""
    done = job.progress.iteration
    return bool(interval) and done % interval == 0 and done < (job.run.training.train_iters or 0)


def exit_reason(job: Trainer, stop: StopSignals, started: float) -> str | None:
    """Why to stop before `--train-iters`, agreed by all ranks; None to go on.

    Ranks get a signal, and see the clock pass, at different iterations; the first one decides for all.
    """
    options, done = job.run.training, job.progress.iteration
    if done >= (options.train_iters or 0):
        return None
    if options.exit_interval and done % options.exit_interval == 0:
        return f"stopped at iteration {done} (--exit-interval {options.exit_interval})"
    if not (options.exit_signal_handler or options.exit_duration_in_mins):
        return None
    minutes = (time.monotonic() - started) / 60
    limit = options.exit_duration_in_mins
    terminated, out_of_time = _of_any_rank(stop.stop_signal, int(limit is not None and minutes >= limit))
    if terminated:
        return f"stopped at iteration {done} by {signal_name(terminated)}"
    return f"stopped at iteration {done} (--exit-duration-in-mins {limit:g})" if out_of_time else None


def agreed_stop(run: Run, stop: StopSignals) -> bool:
    """Whether any rank was asked to stop. Collective over all ranks: a launcher may have asked one of them only."""
    return run.training.exit_signal_handler and bool(_of_any_rank(stop.stop_signal)[0])


def _of_any_rank(*values: int) -> list[int]:
    """The largest of each value over all ranks."""
    largest = torch.tensor(values, device=platform.device())
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return largest.tolist()
