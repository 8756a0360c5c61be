"""A whole run: `pretrain` checks the flags, plans, builds the trainer, trains, and writes the summary."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from megatron_moe import platform
from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.config.launch import launched_world, rank_that_prints
from megatron_moe.config.schema import Run, replace
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.program import StoppedEarly, say
from megatron_moe.kernels import choice
from megatron_moe.model.generate import generate
from megatron_moe.moe.grouped_gemm_fp8 import fp8_form
from megatron_moe.parallel import groups
from megatron_moe.platform import env_vars
from megatron_moe.report.records import StepRecord, exact
from megatron_moe.report.reporter import MakePageSink
from megatron_moe.report.run_info import FINISHED
from megatron_moe.report.sink import Sink
from megatron_moe.training.build import build_trainer
from megatron_moe.training.callback import Callback, OwnCallbacks
from megatron_moe.training.callbacks.checkpointing import Checkpointing
from megatron_moe.training.callbacks.checks import PrecisionAudit, PrecisionCheck, Replicas, StepAudit, Untrained
from megatron_moe.training.callbacks.evaluation import Evaluation, StopAsked, Stopping, evaluate_split, stop_check
from megatron_moe.training.callbacks.faults import NonFinite, Spikes
from megatron_moe.training.callbacks.profiler import GarbageCollection, Profiler
from megatron_moe.training.callbacks.reporting import Reporting
from megatron_moe.training.callbacks.stragglers import Stragglers
from megatron_moe.training.evaluate import gathered_parameters
from megatron_moe.training.loop import train
from megatron_moe.training.plan import evaluates_test_split, plan_run, require_profiler
from megatron_moe.training.program import ProgramParts
from megatron_moe.training.routes import Routes
from megatron_moe.training.signals import StopSignals
from megatron_moe.training.start_notes import report_start
from megatron_moe.training.trainer import Trainer
from megatron_moe.training.watchdog import Leave


def pretrain(
    run: Run,
    also: Sequence[Sink] = (),
    audit: StepAudit | None = None,
    stage: Callable[[str], None] = lambda text: None,
    *,
    callbacks: Sequence[Callback] = (),
    page_sink: MakePageSink | None = None,
    parts: ProgramParts | None = None,
    ends_process: bool = True,
) -> dict[str, Any]:
    """Train as `run` says and return the summary; rank 0's is also written to `--summary-file`.

    Args:
        also: sinks that get every event of the run, on rank 0, in addition to those that the flags ask for.
        audit: what traces the second step where `--audit-precision` asks for it; pretrain_moe.py hands in
            `megatron_moe_tools.audit.step.auditing`.
        stage: called with what begins before the first line of the log, as "building the model".
        callbacks: a program's own callbacks on this rank (`training/callback.py`).
        page_sink: makes the sink of `--report-file`; pretrain_moe.py hands in `megatron_moe_tools.pretrain.page_sink`.
        parts: what a program puts in the place of the run's own.
        ends_process: whether the watchdog ends the processes when a rank fails or hangs; False: every rank raises, and
            its process is ended only if it has not left the run after `LEAVE_SECONDS` (`training/signals.py`).

    Raises:
        ConfigError: a mistake in flags, data or folders, found before anything is allocated and equal on all ranks.
        RunFault: the run cannot go on, which all ranks have agreed on.
        KeyboardInterrupt: Ctrl-C.
        StoppedEarly: SIGTERM or SIGUSR1 with `--exit-signal-handler`, or the time limit, before the first step.
    """
    parts = parts or ProgramParts()
    _, world_size = launched_world()
    rules.check(run, world_size)  # what cannot work by the flags alone is refused first
    parts.check(run)
    _require_what_programs_lack(run, audit)
    platform.backend(run.parallel.distributed_backend)
    if run.precision.fp8_format is not None:
        fp8_form()  # refuses a device without these products
    if run.training.deterministic_mode:
        env_vars.deterministic_environment()
    begun = clean = False
    asked = run.training
    with StopSignals(save=asked.exit_signal_handler, limit_minutes=asked.exit_duration_in_mins) as stop:
        stop.before_end = _say_end
        try:
            require_profiler(run, has_gpu=platform.has_cuda())
            planned = plan_run(run, world_size)
            parts.check_resume(run, planned.start_from)
            if run.logging.dry_run:
                _say("\n".join([*planned.notes, "dry run: the configuration is sound"]))
                return {}
            _quiet_engine()
            begun = True
            leave: Leave | None = None
            outlasting: AbstractContextManager[None] = nullcontext()
            if not ends_process:
                leave = partial(_leave, stop)
            if not ends_process and world_size > 1:
                outlasting = stop.outlasting_launcher()
            with ExitStack() as resources, outlasting:
                trainer = build_trainer(planned, resources, also, stage, page_sink, parts, leave)
                report_start(trainer)
                stop.before_end = partial(_before_end, trainer)
                if run.training.skip_train:
                    trainer.reporter.message("nothing is trained or saved (--skip-train)")
                elif trainer.finished:
                    trainer.reporter.message(
                        f"nothing to train: the checkpoint is at iteration {trainer.progress.iteration} of "
                        f"--train-iters {trainer.run.training.train_iters}"  # which --train-samples may have set
                    )
                every: list[Callback] = [
                    Routes(),
                    Profiler(),
                    Stragglers(),  # before its times are reported
                    Reporting(),
                    NonFinite(),
                    Spikes(),
                    Replicas(),
                    PrecisionAudit(audit),
                    GarbageCollection(),
                    OwnCallbacks(callbacks),  # before the run decides whether it stops, and before it saves
                    Untrained(),
                    PrecisionCheck(),
                    Stopping(stop),
                    Checkpointing(),
                    Evaluation(stop),
                ]
                train(trainer, every)
                summary = _summary(trainer, planned.tokenizer, stop)
                _report_end(trainer, summary)
            clean = True
            return summary
        except StoppedEarly as early:
            _say(f"stopped {early.reason} before the first step: there is nothing to save")
            raise
        finally:
            if begun:  # a program whose run was refused keeps the groups that it had
                groups.destroy(abort=not clean)


def _require_what_programs_lack(run: Run, audit: StepAudit | None) -> None:
    if run.faults.warm_restarts is not None:
        raise ConfigError("--warm-restarts: is for pretrain_moe.py and megatron-moe train, not for a program's own run")
    if run.precision.audit_precision and audit is None:
        raise ConfigError(
            "--audit-precision needs the tracer that pretrain_moe.py hands to pretrain(); "
            "hand in audit=megatron_moe_tools.audit.step.auditing, or leave the flag out"
        )


def _report_end(trainer: Trainer, summary: dict[str, Any]) -> None:
    stopped, iteration = trainer.stop_reason, trainer.progress.iteration
    if stopped is not None:
        trainer.reporter.event("stop", f"stopped at iteration {iteration} {stopped.text}", by=stopped.text)
    elif not trainer.run.training.skip_train:
        trainer.reporter.message(f"done: {iteration} iterations")
    trainer.reporter.close(summary, FINISHED if stopped is None else f"stopped {stopped.text}")
    trainer.require_sinks()


def _say(text: str) -> None:
    """Print one line on rank 0."""
    if rank_that_prints() == 0:
        say(text)


def _say_end(reason: str, when: str = "before the first step") -> None:
    """Say, before this process is ended at once, what ends it."""
    if reason != "by SIGINT":  # whose end the program says
        _say(f"stopped {reason} {when}")


def _leave(stop: StopSignals, fault: RunFault, last_words: Callable[[], None]) -> None:
    """Let the main thread leave the run, from wherever it is."""
    stop.leave(fault, last_words)
    groups.abort_collectives()


def _before_end(trainer: Trainer, reason: str) -> None:
    """Report why, and what is saved, before what does not save ends this process at once."""
    if trainer.watchdog is not None and reason == "by SIGTERM" and trainer.watchdog.report_before_end():
        return
    trainer.reporter.on_abort(f"stopped {reason}")
    kept = "no checkpoint was saved"
    if trainer.saver is not None and trainer.saver.latest is not None:
        kept = f"the last checkpoint is {trainer.saver.latest}"
    if not trainer.run.training.exit_signal_handler:
        kept += " (--exit-signal-handler saves one first)"
    _say_end(reason, f"after iteration {trainer.progress.iteration}; {kept}")


class _ExactRecords(Sink):
    """Keeps the exact record of every step."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(exact(record))


def recorded(run: Run) -> list[dict[str, Any]]:
    """Train as `run` says, without an audit; return the exact record of every step on rank 0, nothing on the others."""
    kept = _ExactRecords()
    pretrain(
        replace(run, audit_precision=False, audit_precision_output=Run().precision.audit_precision_output), (kept,)
    )
    return kept.records


# The likeliest token each time leads a small model into a loop; this keeps to likely ones.
TEMPERATURE = 0.7


def _summary(trainer: Trainer, tokenizer: Tokenizer, stop: StopSignals) -> dict[str, Any]:
    """Evaluate the trained model and return the summary of the run."""
    summary: dict[str, Any] = {"iterations": trainer.progress.iteration, "unigram_entropy": trainer.unigram_entropy}
    # Whoever asked for the end waits, a launcher half a minute; the next start makes up for an evaluation.
    if trainer.stop_reason is None or not trainer.stop_reason.urgent:
        try:
            run, check = trainer.run, stop_check(trainer.run, stop)
            for split in trainer.splits.evaluated:
                if run.training.eval_iters and (split != "test" or evaluates_test_split(run)):
                    summary[f"{split}_loss"] = evaluate_split(trainer, split, check).loss
            if run.logging.sample_prompt is not None:
                if check is not None:
                    check()
                # The prompt and its continuation, drawn with the run's seed; the same on every rank.
                with gathered_parameters(trainer.trained.model):
                    new_ids = generate(
                        trainer.trained.model,
                        tokenizer.tokenize(run.logging.sample_prompt) or [tokenizer.eod],
                        run.logging.sample_tokens,
                        run.model.seq_length,
                        vocab_size=tokenizer.vocab_size,
                        temperature=TEMPERATURE,
                        seed=run.training.seed,
                        end_id=tokenizer.eod,
                    )
                text = tokenizer.detokenize([token for token in new_ids if token != tokenizer.eod])
                summary["sample"] = run.logging.sample_prompt + text
                trainer.reporter.message(f"sample: {summary['sample']}")
        except StopAsked as asked:
            trainer.reporter.message(f"the rest of the summary is left out: {asked}")
    if trainer.precision_warnings:
        summary["precision_warnings"] = trainer.precision_warnings
    if trainer.checkpoint_warnings:
        summary["checkpoint_warnings"] = trainer.checkpoint_warnings
    if not platform.has_cuda():
        summary["cpu_kernels"] = "torch" if choice.why_no_c() else "c"
    summary["checkpoint"] = str(trainer.saved) if trainer.saved is not None else None
    return summary


def _quiet_engine() -> None:
    """Silence the engine on all ranks but 0, its remarks on packages that are not installed, and one of FSDP2's."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r".*[Tt]ransformer[ -]?[Ee]ngine.*")
    # Nothing changes what a sharded model returns in place, which is what the warning is of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("megatron").setLevel(logging.ERROR)
        torch._logging.set_logs(all=logging.ERROR)
