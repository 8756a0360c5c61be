"""The trainer: a run in progress, with what it was built from."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint.local import LocalSaver
from megatron_moe.checkpoint.save import Saver
from megatron_moe.checkpoint.state import TrainingProgress, TrainState
from megatron_moe.config.paths import is_url
from megatron_moe.config.schema import Run
from megatron_moe.data.checks import Fingerprint
from megatron_moe.data.mixture import Mixture
from megatron_moe.engine.cuda_graphs import CudaGraphs
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.precision.contract import PrecisionGuard
from megatron_moe.report.reporter import Reporter
from megatron_moe.training.batch_size import BatchSchedule
from megatron_moe.training.metrics import raise_together
from megatron_moe.training.state_checks import check_precision
from megatron_moe.training.step import StepResult
from megatron_moe.training.watchdog import Watchdog

RECORDS_KEPT = 512
"""Steps whose exact records a checkpoint keeps: megatron-moe verify-resume compares a replay with them."""


def fault_folder(run: Run) -> Path | None:
    """Return the folder for the reports of faults; None where the flags name none on a disk."""
    if run.faults.fault_dir is not None:
        return Path(run.faults.fault_dir)
    save = run.checkpoint.save
    return None if save is None or is_url(save) else Path(save) / "faults"


@dataclass(frozen=True)
class StopReason:
    """What ends a run before `--train-iters`."""

    text: str
    """As it follows "stopped at iteration 7": "by SIGTERM"."""
    urgent: bool
    """Whether whoever asked for it waits: a final evaluation is left out."""


@dataclass(frozen=True)
class Splits:
    """The datasets of a run.

    train: None where nothing is trained. evaluated: by name, `valid` and `test`, or `valid/NAME` of named sets.
    """

    train: Any
    evaluated: dict[str, Any]

    @property
    def mixture(self) -> Mixture | None:
        """The named sources of what is trained, on every rank; None without names."""
        return getattr(self.train, "mixture", None)

    @property
    def validation(self) -> list[str]:
        """The names of what is evaluated at intervals."""
        return [name for name in self.evaluated if name != "test"]


@dataclass(kw_only=True)
class Trainer:
    """A run in progress: what it was built from, complete when it is constructed, and how far it has come."""

    run: Run
    rank_facts: RankFacts
    trained: TrainState
    schedule: BatchSchedule
    splits: Splits
    vocab_size: int
    """Tokens of the vocabulary, without padding; kept in every checkpoint, where no flag may say it."""
    padded_vocab_size: int
    program: dict[str, str]
    """The parts of a program that the run trains with, by name; kept in every checkpoint."""
    tokenizer: dict[str, Any]
    """Type and hash of the tokenizer, and its ids that end and begin a document; kept in every checkpoint."""
    data: Fingerprint
    """The data files as they were at the start; kept in every checkpoint."""
    former_data: Fingerprint
    """Those of sources that the run has no more, as the checkpoint has them: they may come back."""
    reporter: Reporter
    started_from: Path | str | None
    """The checkpoint or the imported folder."""
    build_notes: list[str]
    """What was noted while the run was built, for the start of the log."""
    has_own_sinks: bool
    """A program has handed in sinks, on some rank."""
    guard: PrecisionGuard
    watchdog: Watchdog | None
    """Ends all ranks when one dies or hangs; None with --no-watchdog."""
    saver: Saver | None
    """Writes the checkpoints of a run that has `--save`."""
    local_saver: LocalSaver | None
    """Writes the local steps of a run that has `--local-save`."""
    unigram_entropy: float | None
    """Entropy of the validation's tokens in nats; known to rank 0."""
    predicted_bytes: dict[str, int]
    """Bytes of the text that an evaluation of a split predicts, where rank 0 knows them."""
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
    graphs: CudaGraphs | None = None
    """Those that the model's layers replay; None: none."""
    stop_reason: StopReason | None = None
    """Why the run ends before `--train-iters`."""

    @property
    def finished(self) -> bool:
        """Whether no step is left to train."""
        options = self.run.training
        return options.skip_train or self.progress.iteration >= (options.train_iters or 0)

    def count(self, result: StepResult) -> None:
        """Count a step, skipped or not: its sequences are consumed."""
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
        options = self.run.training
        self.evaluation_pending = options.eval_iters > 0 and self.is_due(options.eval_interval)
        self.stop_at_end_of_sources()

    def stop_at_end_of_sources(self) -> None:
        """End the run where its sources have no whole global batch any more."""
        mixture, consumed = self.splits.mixture, self.progress.consumed_samples
        if mixture is None or self.finished or self.stop_reason is not None:
            return
        if not mixture.lasts(consumed + self.schedule.global_batch_size(consumed)):
            self.end_run("(a source of --data-config ended)")

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

    def at_step(self, mark: str) -> None:
        """Report to the watchdog how far the step after those counted has come."""
        self.at(f"iteration {self.progress.iteration + 1}, {mark}")

    def is_due(self, interval: int | None) -> bool:
        """Whether this iteration ends an interval; the end of the run has its own evaluation and checkpoint."""
        done = self.progress.iteration
        return bool(interval) and done % (interval or 1) == 0 and not self.finished

    def end_run(self, reason: str) -> None:
        """End the run after this step, saved; `reason` follows "stopped at iteration 7"."""
        self.stop_reason = StopReason(reason, urgent=False)

    def check_precision(self, boundary: str) -> None:
        """Check every dtype of model and optimizer against the contract; `boundary` is for messages."""
        check_precision(self.guard, f"{boundary} (iteration {self.progress.iteration})", self.run, self.trained)
