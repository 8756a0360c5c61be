"""The trainer: a run in progress, with what it was built from, and how it saves and evaluates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_moe import platform
from megatron_moe.checkpoint.async_save import Saver
from megatron_moe.checkpoint.errors import SaveError
from megatron_moe.checkpoint.folder import step_folder
from megatron_moe.checkpoint.state import Trained, TrainingProgress
from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.config.schema import Run
from megatron_moe.data.batches import BatchIterator, batch_iterators
from megatron_moe.data.fingerprint import Fingerprint, changed_since
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.platform import numerics
from megatron_moe.precision.contract import PrecisionGuard
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.reporter import Reporter
from megatron_moe.report.run_info import versions
from megatron_moe.training.batch_size import BatchSchedule
from megatron_moe.training.evaluate import evaluate, gathered_parameters
from megatron_moe.training.garbage import collected
from megatron_moe.training.metrics import raise_together
from megatron_moe.training.state_checks import check_precision, damage_on_ranks
from megatron_moe.training.step import StepResult
from megatron_moe.training.watchdog import Watchdog

RECORDS_KEPT = 512
"""Steps whose exact records a checkpoint keeps: megatron-moe verify-resume compares a replay with them."""


def fault_folder(run: Run) -> Path | None:
    """Return the folder for the reports of faults; None where the flags name none."""
    if run.faults.fault_dir is not None:
        return Path(run.faults.fault_dir)
    return None if run.checkpoint.save is None else Path(run.checkpoint.save) / "faults"


@dataclass(frozen=True)
class Splits:
    """The engine's datasets; None where a split is not used."""

    train: Any
    valid: Any
    test: Any


@dataclass(kw_only=True)
class Trainer:
    """A run in progress: what it was built from, complete when it is constructed, and how far it has come."""

    run: Run
    rank_facts: RankFacts
    trained: Trained
    schedule: BatchSchedule
    splits: Splits
    vocab_size: int
    """Tokens of the vocabulary, without padding; kept in every checkpoint, where no flag may say it."""
    padded_vocab_size: int
    tokenizer: dict[str, Any]
    """Type and hash of the tokenizer, and its ids that end and begin a document; kept in every checkpoint."""
    data: Fingerprint
    """The data files as they were at the start; kept in every checkpoint."""
    reporter: Reporter
    has_own_sinks: bool
    """A program has handed in sinks, on some rank."""
    guard: PrecisionGuard
    watchdog: Watchdog | None
    """Ends all ranks when one dies or hangs; None with --no-watchdog."""
    saver: Saver | None
    """Writes the checkpoints of a run that has `--save`."""
    unigram_entropy: float | None
    """Entropy of the validation's tokens in nats; known to rank 0."""
    precision_warnings: list[str]
    """fp32 state that was rounded before it came into this run; shown at the start, kept in every checkpoint."""
    checkpoint_warnings: list[str]
    """Damaged steps that were passed over, and a check that was left out; shown at the start and in the summary."""

    # State that changes while the run trains.
    progress: TrainingProgress
    saved: Path | None
    """The checkpoint of the present weights, once it is written or being written."""
    evaluation_pending: bool
    """The evaluation of the present weights is due: a start from a checkpoint of them begins with it."""
    records: deque[dict[str, Any]]
    """`report.records.exact` of the last steps, those of earlier incarnations among them."""

    @property
    def finished(self) -> bool:
        """Whether `--train-iters` steps are done."""
        return self.progress.iteration >= (self.run.training.train_iters or 0)

    def count(self, result: StepResult) -> int:
        """Count a step, skipped or not: its sequences are consumed. Return how many these were."""
        size = self.schedule.global_batch_size(self.progress.consumed_samples)
        past = self.progress
        self.progress = TrainingProgress(
            iteration=past.iteration + 1,
            consumed_samples=past.consumed_samples + size,
            skipped_iterations=past.skipped_iterations + (not result.committed),
            loss_scale_raised=past.loss_scale_raised + (result.next_loss_scale > result.loss_scale),
            loss_scale_lowered=past.loss_scale_lowered + (result.next_loss_scale < result.loss_scale),
            skipped_samples=past.skipped_samples + (0 if result.committed else size),
        )
        self.saved = None
        return size

    def require_sinks(self) -> None:
        """Raise on all ranks what a program's own sink raised on one. Collective where the program has some.

        Raises:
            RunFault: naming the sink.
        """
        if self.has_own_sinks:
            raise_together(self.reporter.sink_failure)

    def at(self, mark: str, limited: bool = True) -> None:
        """Report to the watchdog how far the run has come; `limited`: what begins has to end within the timeout."""
        if self.watchdog is not None:
            self.watchdog.at(mark, limited)

    def batches(self, dataset: Any, consumed_samples: int) -> list[BatchIterator]:
        """Return one iterator of micro-batches per model chunk, all beginning behind `consumed_samples` sequences."""
        return batch_iterators(
            dataset,
            self.run,
            consumed_samples=consumed_samples,
            pg_collection=self.trained.pg_collection,
        )

    def evaluate(self, split: str, between: Callable[[], None] | None = None) -> EvalRecord:
        """Return and report the mean loss over the first `--eval-iters` global batches of a split.

        Args:
            between: see `evaluate.evaluate`.
        """
        batches = self.batches(getattr(self.splits, split), 0)
        for iterator in batches:
            iterator.observer = lambda _: self.at(f"iteration {self.progress.iteration}, evaluation ({split})")
        with collected(self.run.training):
            record = evaluate(
                self.trained.model,
                batches,
                split=split,
                iteration=self.progress.iteration,
                num_micro_batches=self.run.training.eval_iters * self.schedule.final_micro_batches,
                micro_batch_size=self.run.training.micro_batch_size,
                seq_length=self.run.model.seq_length,
                pg_collection=self.trained.pg_collection,
                in_fp32=self.run.precision.eval_in_fp32,
                between=between,
            )
        self.reporter.evaluation(record)
        self.at(f"iteration {self.progress.iteration}, evaluated", limited=False)
        return record

    def check_precision(self, boundary: str) -> None:
        """Check every dtype of model and optimizer against the contract; `boundary` is for messages."""
        check_precision(self.guard, f"{boundary} (iteration {self.progress.iteration})", self.run, self.trained)

    def check_data(self) -> None:
        """Refuse to go on where a data file changed since the start: what was trained on is not known any more.

        Raises:
            ConfigError: on every rank, naming the file.
        """
        changed = [changed_since(self.data) if self.rank_facts.rank == 0 else None]
        torch.distributed.broadcast_object_list(changed, src=0)
        if changed[0] is not None:
            raise ConfigError(
                f"{changed[0]}: steps after the last checkpoint may have read it, so none is saved; put the file back "
                "and resume from there"
            )

    def save(self) -> None:
        """Save a checkpoint of the present state, or begin to, unless it is saved already or `--save` was not given."""
        if self.saver is None or self.saved is not None:
            return
        # However long that takes: a rank that hangs makes the others' collectives run into their timeout.
        self.at(f"iteration {self.progress.iteration}, saving", limited=False)
        self.check_precision("saving")
        self.check_data()
        if (damage := damage_on_ranks(self.trained, self.rank_facts)) is not None:
            raise RunFault(
                f"saving iteration {self.progress.iteration}: {damage}; nothing is written, the checkpoints that are "
                "there stay"
            )
        facts: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "padded_vocab_size": self.padded_vocab_size,
            "versions": versions(),
            "tokenizer": self.tokenizer,
            "data": self.data,
            "device": platform.device().type,
            "records": list(self.records),
        }
        if arithmetic := numerics.facts(self.run.training.deterministic_mode):
            facts["arithmetic"] = arithmetic
        if self.precision_warnings:
            facts["precision_warnings"] = self.precision_warnings
        if self.evaluation_pending:
            facts["evaluation_owed"] = True
        self.reporter.flush()
        with gathered_parameters(self.trained.model):
            begun = self.saver.save(self.trained, self.progress, facts)
        if begun:
            self.saved = step_folder(Path(self.run.checkpoint.save or ""), self.progress.iteration)

    def poll_save(self) -> None:
        """Check, at a step boundary, whether a checkpoint in the background is written."""
        if self.saver is not None:
            self.saver.poll()

    def wait_for_copy(self) -> None:
        """Wait, before the state changes, until a checkpoint in the background has copied it."""
        if self.saver is not None:
            self.saver.wait_until_copied()

    def leave_save(self) -> None:
        """Finish a checkpoint in the background, or report it as lost, where a run ends with an error of its own."""
        if self.saver is not None:
            try:
                self.saver.finish()
            except SaveError as error:
                self.reporter.event("warning", str(error))

    def finish_save(self) -> None:
        """Wait, at the end, for a checkpoint in the background.

        Raises:
            SaveError: the last one was not saved, whatever `--on-save-error` says: the run's result would be lost.
        """
        if self.saver is not None:
            self.at(f"iteration {self.progress.iteration}, waiting for the last checkpoint", limited=False)
            self.saver.finish()
            if self.saver.error is not None:
                raise self.saver.error
