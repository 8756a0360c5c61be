"""A whole run in the order in which it happens: check, build, load, train, evaluate, show, tell."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from megatron_moe import platform
from megatron_moe.checkpoint import origin
from megatron_moe.checkpoint.async_save import Saver
from megatron_moe.checkpoint.errors import read_on_rank_zero
from megatron_moe.checkpoint.load import Loaded, load
from megatron_moe.checkpoint.load import verified as verified_plan
from megatron_moe.checkpoint.origin import Origin
from megatron_moe.checkpoint.plan import CheckpointPlan, plan
from megatron_moe.checkpoint.save import claim, target
from megatron_moe.checkpoint.state import Trained, TrainingProgress
from megatron_moe.config import derived, rules
from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.config.module_names import kept_in_fp32
from megatron_moe.config.schema import Run, replace
from megatron_moe.data.checks import check_data
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.fingerprint import Fingerprint, data_fingerprint, require_same_data, require_same_order
from megatron_moe.data.index_file import label_entropy
from megatron_moe.data.tokenizers import Tokenizer, build_tokenizer
from megatron_moe.hf.importing import Import, fill, plan_import
from megatron_moe.model.build import build_model
from megatron_moe.model.generate import generate
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.parallel.seeds import seed_everything
from megatron_moe.platform import advisories
from megatron_moe.precision.guard import PrecisionGuard
from megatron_moe.report.records import StepRecord, exact
from megatron_moe.report.reporter import Reporter
from megatron_moe.report.sink import Sink
from megatron_moe.training.batch_size import BatchSchedule, batch_schedule
from megatron_moe.training.evaluate import gathered_parameters
from megatron_moe.training.job import Splits, Trainer
from megatron_moe.training.loop import StepAudit, agreed_stop, train
from megatron_moe.training.optimizer import build_optimizer, build_scheduler
from megatron_moe.training.signals import StopSignals
from megatron_moe.training.state_checks import check_precision
from megatron_moe.training.watchdog import Watchdog

# ---- A short text by the trained model, for the person who waited.


# The likeliest token each time leads a small model into a loop; this keeps to likely ones.
TEMPERATURE = 0.7


def sample_text(job: Trainer, tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """The prompt and its continuation, drawn with the run's seed; the same on every rank."""
    prompt_ids = tokenizer.tokenize(prompt) or [tokenizer.eod]
    with gathered_parameters(job.trained.model):
        new_ids = generate(
            job.trained.model,
            prompt_ids,
            num_tokens,
            job.run.model.seq_length,
            vocab_size=tokenizer.vocab_size,
            temperature=TEMPERATURE,
            seed=job.run.training.seed,
            end_id=tokenizer.eod,
        )
    return prompt + tokenizer.detokenize([token for token in new_ids if token != tokenizer.eod])


# ----


def pretrain(run: Run, also: Sequence[Sink] = (), audit: StepAudit | None = None) -> dict[str, Any]:
    """Train as `run` says and return the summary; rank 0's is also written to `--summary-file`.

    Args:
        also: sinks that are told of everything too, on rank 0, next to those that the flags ask for.
        audit: what traces the second step where `--audit-precision` asks for it; pretrain_moe.py hands in
            `apps.audit.step.auditing`.

    Raises:
        ConfigError: a mistake in flags, data or folders, found before anything is allocated and equal on all ranks.
        RunFault: the run is not well, which all ranks found together.
        KeyboardInterrupt: Ctrl-C.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rules.check(run, world_size)
    if run.precision.audit_precision and audit is None:
        raise ConfigError(
            "--audit-precision needs the tracer that pretrain_moe.py hands to pretrain(); "
            "hand in audit=megatron_moe.apps.audit.step.auditing, or leave the flag out"
        )
    platform.backend(run.parallel.distributed_backend)
    schedule = batch_schedule(run, world_size)
    start_from = plan(run)
    imported = plan_import(run) if _is_imported(run, start_from) else None
    tokenizer = build_tokenizer(run.data, run.model.vocab_size)
    verified = check_data(run, tokenizer)
    data = data_fingerprint(run)
    verified += _same_data(run, data, start_from)
    if run.logging.dry_run:
        if os.environ.get("RANK", "0") == "0":
            notes = [*start_from.notes, *(imported.notes if imported else ()), *verified]
            print("\n".join([*notes, "dry run: the configuration is sound"]), flush=True)
        return {}
    _quiet_engine()
    clean = False
    with StopSignals(save=run.training.exit_signal_handler) as stop:
        try:
            with ExitStack() as held:
                job = _build(run, tokenizer, schedule, start_from, imported, verified, data, held, also)
                stop.last_words = None if job.watchdog is None else job.watchdog.last_words
                with job.reporter:
                    summary = _train_and_tell(job, tokenizer, stop, audit if run.precision.audit_precision else None)
            clean = True
            return summary
        finally:
            groups.destroy(abort=not clean)


class _Records(Sink):
    """Keeps the exact record of every step."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(exact(record))


def recorded(run: Run) -> list[dict[str, Any]]:
    """Train as `run` says, without an audit; return the exact record of every step on rank 0, nothing on the others."""
    kept = _Records()
    pretrain(
        replace(run, audit_precision=False, audit_precision_output=Run().precision.audit_precision_output), (kept,)
    )
    return kept.records


def _same_data(run: Run, data: Fingerprint, start_from: CheckpointPlan) -> list[str]:
    """Refuse to continue on other data than the step was trained on; what to tell where that is accepted."""
    source = start_from.source
    if source is None or source.weights_only or run.checkpoint.finetune:
        return []
    saved = source.state.get("data", {})
    return [
        *require_same_data(run, data, saved, str(source.step)),
        *require_same_order(run, data, source.config, saved, str(source.step)),
    ]


def _build(
    run: Run,
    tokenizer: Tokenizer,
    schedule: BatchSchedule,
    start_from: CheckpointPlan,
    imported: Import | None,
    verified: list[str],
    data: Fingerprint,
    held: ExitStack,
    also: Sequence[Sink],
) -> Trainer:
    """Process groups, seeds, model, optimizer, data, and what a checkpoint holds of them; `held` is left at the end."""
    pg_collection = groups.initialize(run)
    place = groups.rank_facts()
    watchdog = held.enter_context(_watchdog(run, place)) if run.faults.watchdog else None
    lock, lock_notes = claim(run) if run.checkpoint.save is not None else (None, [])
    if lock is not None:
        held.enter_context(lock)
    start_from = verified_plan(run, start_from, _say)
    if start_from.known_bad:  # an earlier step than the one that was looked at
        verified = [*verified, *_same_data(run, data, start_from)]
    seed_everything(run)
    vocab_size = run.model.vocab_size or tokenizer.vocab_size
    padded_vocab_size = derived.padded_vocab_size(vocab_size, run)
    guard = PrecisionGuard()
    model = build_model(run, pg_collection, vocab_size, guard=guard)
    optimizer = build_optimizer(run, model, pg_collection)
    trained = Trained(model, optimizer, build_scheduler(run, optimizer), pg_collection)
    check_precision(guard, "building the optimizer", run, trained)
    loaded = Loaded(TrainingProgress(), [], [])
    if imported is not None:
        filled = fill(run, imported, trained, _say)
        loaded = Loaded(TrainingProgress(), [*imported.notes, *filled.notes], filled.precision_warnings)
        check_precision(guard, f"importing {run.checkpoint.load_hf}", run, trained)
    elif start_from.source is not None:
        loaded = load(run, start_from.source, trained)
        check_precision(guard, f"loading {start_from.source.step}", run, trained)
    nothing: tuple[Origin, list[str]] = (Origin(), [])
    comes_from, origin_notes = read_on_rank_zero(lambda: _origin(start_from, imported), nothing)
    evaluated = run.training.eval_iters * schedule.final
    train_samples = schedule.samples_after(run.training.train_iters or 0)
    splits = build_datasets(
        run, tokenizer, train_samples, evaluated, evaluated if _has_test(run) else 0, pg_collection=pg_collection
    )
    reporter = Reporter(run, is_writer=place.rank == 0, start_iteration=loaded.progress.iteration, also=also)
    job = Trainer(run, place, trained, schedule, Splits(*splits), padded_vocab_size, loaded.progress, reporter, guard)
    job.vocab_size = vocab_size
    job.data = data
    job.watchdog = watchdog
    job.precision_warnings = loaded.precision_warnings
    job.checkpoint_warnings = start_from.warnings
    if start_from.source is not None and not run.checkpoint.finetune:
        job.records.extend(start_from.source.state.get("records", []))
        job.evaluation_owed = bool(start_from.source.state.get("evaluation_owed"))
    job.unigram_entropy = _unigram_entropy(job)
    job.tokenizer = {"type": tokenizer.name, "sha256": tokenizer.sha256}
    if start_from.continues:
        job.saved = start_from.source.step
    if run.checkpoint.save is not None:
        loaded_step = start_from.start_iteration if start_from.continues else None
        job.saver = Saver(run, target(run, lock=lock, loaded=loaded_step, origin=comes_from), reporter.message)
    if watchdog is not None:
        watchdog.folder = job.fault_folder  # not earlier: a folder for checkpoints is claimed first
    reporter.start(_facts(job))
    known = advisories.start_lines(run, place.world_size, platform.engine_version(), cuda=platform.has_cuda())
    for note in (
        *lock_notes,
        *verified,
        *start_from.notes,
        *loaded.notes,
        *origin_notes,
        *_precision_notes(run),
        *_balancing_notes(job),
        *known,
    ):
        reporter.message(note)
    return job


def _say(line: str) -> None:
    print(line, flush=True)


def _is_imported(run: Run, start_from: CheckpointPlan) -> bool:
    """Whether weights come from a Hugging Face folder: a step that training has saved since goes before it."""
    return run.checkpoint.load_hf is not None and start_from.source is None


def _origin(start_from: CheckpointPlan, imported: Import | None) -> tuple[Origin, list[str]]:
    """What the steps keep of the source the model was imported from, and what to tell about it."""
    if imported is not None:
        return imported.origin()
    source = start_from.source
    if source is None:
        return Origin(), []
    return origin.of_step(source.step, source.state)


def _watchdog(run: Run, place: RankFacts) -> Watchdog:
    """Watches this rank from the moment when the ranks have met."""
    return Watchdog(
        groups.side_store(),
        place.rank,
        place.world_size,
        60 * run.parallel.distributed_timeout_minutes,
        prefix=f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _precision_notes(run: Run) -> list[str]:
    """Where this run departs from the model's dtype, a line each."""
    notes = []
    if derived.params_dtype_name(run) != "float32" and not derived.grads_in_fp32(run):
        short = "bf16" if run.precision.bf16 else "fp16"
        notes.append(
            f"gradients are accumulated over micro-batches and reduced over ranks in {short}: each sum is rounded"
        )
    if kept := kept_in_fp32(run):
        more = f" and {len(kept) - 4} more" if len(kept) > 4 else ""
        notes.append(f"in fp32 by --keep-fp32: {', '.join(kept[:4])}{more}")
    return notes


def _balancing_notes(job: Trainer) -> list[str]:
    """What the balancing of the experts costs or leaves out, a line each."""
    moe = job.run.moe
    notes: list[str] = []
    if moe.num_experts is None:
        return notes
    if moe.moe_router_force_load_balancing:
        notes.append(
            "WARNING: --moe-router-force-load-balancing sends tokens to experts ROUND ROBIN: times are worth "
            "something, losses are not, and no model is trained"
        )
    if "global_aux_loss" in moe.moe_router_load_balancing_type and job.final_micro_batches > 1:
        notes.append(
            "global_aux_loss counts the whole global batch before each step, which costs one more forward pass: a "
            "third more than forward and backward alone; --moe-global-aux-loss-counts running does without"
            if moe.moe_global_aux_loss_counts == "batch"
            else "global_aux_loss goes by the micro-batches so far in a step (--moe-global-aux-loss-counts running): "
            "its gradient depends on the micro-batch size and the number of ranks"
        )
    if moe.moe_input_jitter_eps is not None:
        notes.append("--moe-input-jitter-eps draws other noise on another layout, as dropout does")
    return notes


def _train_and_tell(job: Trainer, tokenizer: Tokenizer, stop: StopSignals, audit: StepAudit | None) -> dict[str, Any]:
    run = job.run
    if job.progress.iteration >= (run.training.train_iters or 0):
        job.reporter.message(
            f"nothing to train: the checkpoint is at iteration {job.progress.iteration} of --train-iters "
            f"{run.training.train_iters}"
        )
    try:
        job.reporter.message(train(job, stop, audit))
    except RunFault:  # on all ranks; what is being written in the background is of before
        job.leave_save()
        raise
    summary: dict[str, Any] = {"iterations": job.progress.iteration, "unigram_entropy": job.unigram_entropy}
    # Asked to stop: the launcher gives a rank half a minute, the evaluation can be made up for after a restart.
    if not agreed_stop(run, stop):
        for split in ("valid", "test"):
            if run.training.eval_iters and (split == "valid" or _has_test(run)):
                summary[f"{split}_loss"] = job.evaluate(split).loss
        if run.logging.sample_prompt is not None:
            summary["sample"] = sample_text(job, tokenizer, run.logging.sample_prompt, run.logging.sample_tokens)
            job.reporter.message(f"sample: {summary['sample']}")
    if job.precision_warnings:
        summary["precision_warnings"] = job.precision_warnings
    if job.checkpoint_warnings:
        summary["checkpoint_warnings"] = job.checkpoint_warnings
    summary["checkpoint"] = str(job.saved) if job.saved is not None else None
    job.reporter.close(summary)
    return summary


def _unigram_entropy(job: Trainer) -> float | None:
    """Entropy in nats per token of the very tokens that the validation predicts, under their own frequencies.

    Computed where rank 0 reads; None where there is no validation, and on the other ranks.
    """
    if job.place.rank != 0 or not job.run.training.eval_iters or job.splits.valid is None:
        return None
    return label_entropy(job.splits.valid, job.run.training.eval_iters * job.schedule.final)


def _has_test(run: Run) -> bool:
    """Whether the run evaluates a test split: it was named, or `--split` gives it a share."""
    if run.training.eval_iters == 0 or run.data.mock_data:
        return False
    shares = [float(share) for share in (run.data.split or "").split(",") if share]
    return run.data.test_data_path is not None or (len(shares) > 2 and shares[2] > 0)


def _facts(job: Trainer) -> dict[str, Any]:
    """What is worth knowing at the start, in the order to show."""
    run, place = job.run, job.place
    parameters = derived.parameter_count(run, job.padded_vocab_size)
    facts: dict[str, Any] = {
        "device": str(platform.device()),
        "ranks": place.world_size,
        "layout": ", ".join(
            f"{axis} {getattr(place, f'{axis.lower()}_size')}" for axis in ("TP", "CP", "PP", "DP", "EP", "ETP")
        ),
        "dtype": derived.params_dtype_name(run),
        "parameters": parameters,
        "active_parameters": derived.active_parameter_count(run, job.padded_vocab_size),
        "vocabulary": job.padded_vocab_size,
        "global_batch_size": job.schedule.final,
        "tokens_per_step": job.schedule.final * run.model.seq_length,
        "start_iteration": job.progress.iteration,
        "train_iters": run.training.train_iters,
    }
    if job.unigram_entropy is not None:
        facts["unigram_entropy"] = job.unigram_entropy
    return facts


def _quiet_engine() -> None:
    """Only rank 0 speaks, and the engine's remarks on what is not installed are no news: it is what `doctor` tells."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r".*[Tt]ransformer[ -]?[Ee]ngine.*")
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("megatron").setLevel(logging.ERROR)
        torch._logging.set_logs(all=logging.ERROR)
