"""A run in progress: what it was built from, how far it has come, and how it saves and evaluates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_moe import platform
from megatron_moe.checkpoint.async_save import Saver
from megatron_moe.checkpoint.errors import SaveError
from megatron_moe.checkpoint.folder import step_folder
from megatron_moe.checkpoint.state import Trained, TrainingProgress
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.data.batches import BatchIterator, batch_iterators
from megatron_moe.data.fingerprint import Fingerprint, changed_since
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.precision.guard import PrecisionGuard
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.reporter import Reporter
from megatron_moe.report.summary import versions
from megatron_moe.training.batch_size import BatchSchedule
from megatron_moe.training.evaluate import evaluate, gathered_parameters
from megatron_moe.training.state_checks import check_precision, require_finite_state
from megatron_moe.training.watchdog import Watchdog

RECORDS_KEPT = 512
"""Steps whose exact records a checkpoint keeps: what tools/verify_resume.py holds a replay against."""


@dataclass(frozen=True)
class Splits:
    """The engine's datasets; None where a split is not used."""

    train: Any
    valid: Any
    test: Any


@dataclass
class Trainer:
    """Everything the loop works on. `progress` moves; the rest is built once."""

    run: Run
    place: RankFacts
    trained: Trained
    schedule: BatchSchedule
    splits: Splits
    padded_vocab_size: int
    progress: TrainingProgress
    reporter: Reporter
    guard: PrecisionGuard
    watchdog: Watchdog | None = None
    """Ends the job when a rank dies or hangs; None with --no-watchdog."""
    saver: Saver | None = None
    """Writes the checkpoints of a run that has `--save`."""
    saved: Path | None = None
    """The step that holds the present weights, once there is one or it is on its way."""
    vocab_size: int | None = None
    """Tokens of the vocabulary, without padding; kept in every checkpoint, where no flag may say it."""
    tokenizer: dict[str, str] = field(default_factory=dict)
    """Kind and hash of the tokenizer; kept in every checkpoint."""
    evaluation_owed: bool = False
    """A signal stopped the run where an evaluation was due: the next start makes it up."""
    unigram_entropy: float | None = None
    """Entropy of the validation's tokens, nats; known to rank 0."""
    data: Fingerprint = field(default_factory=dict)
    """The data files as they were at the start; kept in every checkpoint."""
    records: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECORDS_KEPT))
    """`report.records.exact` of the last steps, those of earlier incarnations among them."""
    precision_warnings: list[str] = field(default_factory=list)
    """fp32 state that was rounded before it came into this run; told at the start, kept in every checkpoint."""
    checkpoint_warnings: list[str] = field(default_factory=list)
    """Damaged steps that were passed over, and a check that was left out; told at the start and in the summary."""

    @property
    def fault_folder(self) -> Path | None:
        """For what is written down about faults."""
        flags = self.run
        if flags.faults.fault_dir is not None:
            return Path(flags.faults.fault_dir)
        return None if flags.checkpoint.save is None else Path(flags.checkpoint.save) / "faults"

    def at(self, mark: str, limited: bool = True) -> None:
        """Tell the watchdog how far the run has come; not limited where what begins may take longer than a timeout."""
        if self.watchdog is not None:
            self.watchdog.at(mark, limited)

    def batches(self, dataset: Any, consumed_samples: int) -> list[BatchIterator]:
        """One iterator of micro-batches per model chunk, all beginning behind `consumed_samples` sequences."""
        return batch_iterators(
            dataset,
            self.run,
            consumed_samples=consumed_samples,
            pg_collection=self.trained.pg_collection,
            num_chunks=len(self.trained.model),
        )

    def evaluate(self, split: str) -> EvalRecord:
        """Mean loss over the first `--eval-iters` global batches of a split: the same sequences every time."""
        batches = self.batches(getattr(self.splits, split), 0)
        for iterator in batches:
            iterator.observer = lambda _: self.at(f"iteration {self.progress.iteration}, evaluation ({split})")
        record = evaluate(
            self.trained.model,
            batches,
            split=split,
            iteration=self.progress.iteration,
            num_micro_batches=self.run.training.eval_iters * self.final_micro_batches,
            micro_batch_size=self.run.training.micro_batch_size,
            seq_length=self.run.model.seq_length,
            pg_collection=self.trained.pg_collection,
            in_fp32=self.run.precision.eval_in_fp32,
        )
        self.reporter.evaluation(record)
        self.at(f"iteration {self.progress.iteration}, evaluated", limited=False)
        return record

    def check_precision(self, boundary: str) -> None:
        """Hold every dtype of model and optimizer to the contract; `boundary` and the iteration are for messages."""
        check_precision(self.guard, f"{boundary} (iteration {self.progress.iteration})", self.run, self.trained)

    def check_data(self) -> None:
        """Refuse to go on where a data file changed since the start: what was trained on is not known any more.

        Raises:
            ConfigError: on every rank, naming the file.
        """
        verdict = [changed_since(self.data) if self.place.rank == 0 else None]
        torch.distributed.broadcast_object_list(verdict, src=0)
        if verdict[0] is not None:
            raise ConfigError(
                f"{verdict[0]}: steps after the last checkpoint may have read it, so none is saved; put the file back "
                "and resume from there"
            )

    @property
    def final_micro_batches(self) -> int:
        """Micro-batches per rank of a global batch after any ramp-up."""
        return self.schedule.final // (self.schedule.micro_batch_size * self.schedule.data_parallel_size)

    def save(self) -> None:
        """Save a checkpoint of the present state, or begin to, unless it is saved already or `--save` was not given."""
        if self.saver is None or self.saved is not None:
            return
        # However long that takes: a rank that hangs makes the others' collectives run into their timeout.
        self.at(f"iteration {self.progress.iteration}, saving", limited=False)
        self.check_precision("saving")
        self.check_data()
        require_finite_state(self.trained, self.place, f"saving iteration {self.progress.iteration}")
        facts: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "padded_vocab_size": self.padded_vocab_size,
            "versions": versions(),
            "tokenizer": self.tokenizer,
            "data": self.data,
            "device": platform.device().type,
            "records": list(self.records),
        }
        if self.precision_warnings:
            facts["precision_warnings"] = self.precision_warnings
        if self.evaluation_owed:
            facts["evaluation_owed"] = True
        self.reporter.flush()
        with gathered_parameters(self.trained.model):
            begun = self.saver.save(self.trained, self.progress, facts)
        if begun:
            self.saved = step_folder(Path(self.run.checkpoint.save or ""), self.progress.iteration)

    def poll_save(self) -> None:
        """At a step boundary: see whether a checkpoint in the background is written."""
        if self.saver is not None:
            self.saver.poll()

    def wait_for_copy(self) -> None:
        """Before the state changes: until a checkpoint in the background has what it needs of it."""
        if self.saver is not None:
            self.saver.wait_until_copied()

    def leave_save(self) -> None:
        """Where a run ends with an error of its own: a checkpoint in the background is finished, or told as lost."""
        if self.saver is not None:
            try:
                self.saver.finish()
            except SaveError as error:
                self.reporter.message(str(error))

    def finish_save(self) -> None:
        """At the end: wait for a checkpoint in the background.

        Raises:
            SaveError: the last one was not saved, whatever `--on-save-error` says: the run's result would be lost.
        """
        if self.saver is not None:
            self.at(f"iteration {self.progress.iteration}, waiting for the last checkpoint", limited=False)
            self.saver.finish()
            if self.saver.error is not None:
                raise self.saver.error
