"""Checkpoints: saved at intervals and at the end, written at once or in the background."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_moe import platform
from megatron_moe.checkpoint.errors import SaveError, on_rank_zero
from megatron_moe.checkpoint.folder import step_folder
from megatron_moe.checkpoint.save import Saver
from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.data.checks import Fingerprint, changed_since
from megatron_moe.io.object_storage import location
from megatron_moe.platform import numerics
from megatron_moe.report.run_info import versions
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.evaluate import gathered_parameters
from megatron_moe.training.state_checks import damage_on_ranks
from megatron_moe.training.step import StepResult
from megatron_moe.training.trainer import Trainer


class Checkpointing(Callback):
    """Saves every `--save-interval`, when the run is to stop, and at its end; does nothing without `--save`.

    Between these it saves local steps (`--local-save`).
    """

    def before_training(self) -> None:
        """Let the watchdog know of each rank's progress with a checkpoint that all wait for."""
        for saver in self._savers():
            saver.moved = partial(self.trainer.at, "waiting for a checkpoint")

    def before_update(self, step: Step) -> None:
        """Wait until a checkpoint in the background has copied the state, which changes now."""
        for saver in self._savers():
            saver.wait_until_copied()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Move on a checkpoint in the background, and save where one is due."""
        trainer, options = self.trainer, self.trainer.run.checkpoint
        for saver in self._savers():
            saver.poll()
        if trainer.stop_reason is not None or trainer.is_due(options.save_interval):
            save(trainer)
        elif trainer.is_due(options.local_save_interval):
            save(trainer, local=True)

    def _savers(self) -> list[Saver]:
        return [saver for saver in (self.trainer.saver, self.trainer.local_saver) if saver is not None]

    def after_training(self) -> None:
        """Save the last state, and wait for it.

        Raises:
            SaveError: the last one was not saved, whatever `--on-save-error` says: the run's result would be lost.
        """
        saver = self.trainer.saver
        save(self.trainer)
        if saver is not None:
            mark = f"iteration {self.trainer.progress.iteration}, waiting for the last checkpoint"
            self.trainer.at(mark, limited=False)
            saver.finish()
            if saver.error is not None:
                raise saver.error
        if self.trainer.local_saver is not None:
            self.trainer.local_saver.finish()
            self.trainer.local_saver.clear()

    def on_error(self, error: BaseException) -> None:
        """Finish a checkpoint in the background, which is from before the fault, or report it as lost."""
        if self.trainer.saver is not None and isinstance(error, RunFault):  # on all ranks
            try:
                self.trainer.saver.finish()
            except SaveError as lost:
                self.trainer.reporter.event("warning", str(lost))


def save(trainer: Trainer, *, local: bool = False) -> None:
    """Save a checkpoint of the present state, or begin to, unless it is saved already or `--save` was not given.

    Args:
        local: save a local step, if the run has `--local-save`.

    Raises:
        RunFault: the state is not finite.
        ConfigError: a data file has changed.
        SaveError: see `Saver`.
    """
    saver = trainer.local_saver if local else trainer.saver
    if saver is None or trainer.saved is not None:
        return
    iteration = trainer.progress.iteration
    # However long that takes: a rank that hangs makes the others' collectives run into their timeout.
    trainer.at(f"iteration {iteration}, saving", limited=False)
    trainer.check_precision("saving")
    require_unchanged_data(trainer.data)
    if (damage := damage_on_ranks(trainer.trained, trainer.rank_facts)) is not None:
        raise RunFault(
            f"saving iteration {iteration}: {damage}; nothing is written, the checkpoints that are there stay"
        )
    # What a checkpoint keeps of the run in addition to its state.
    facts: dict[str, Any] = {
        "vocab_size": trainer.vocab_size,
        "padded_vocab_size": trainer.padded_vocab_size,
        "versions": versions(),
        "tokenizer": trainer.tokenizer,
        "data": {**trainer.former_data, **trainer.data},
        "device": platform.device().type,
        "records": list(trainer.records),
    }
    if arithmetic := numerics.facts(trainer.run.training.deterministic_mode):
        facts["arithmetic"] = arithmetic
    if trainer.program:
        facts["program"] = trainer.program
    if trainer.precision_warnings:
        facts["precision_warnings"] = trainer.precision_warnings
    if trainer.splits.mixture is not None:
        facts["sources"] = trainer.splits.mixture.state(trainer.progress.consumed_samples)
    if trainer.evaluation_pending:
        facts["evaluation_owed"] = True
    trainer.reporter.flush()
    with gathered_parameters(trainer.trained.model):
        begun = saver.save(trainer.trained, trainer.progress, facts)
    if begun and not local:
        trainer.saved = step_folder(location(trainer.run.checkpoint.save or ""), iteration)


def require_unchanged_data(data: Fingerprint) -> None:
    """Refuse to go on where a data file changed since the start: what was trained on is not known any more.

    Raises:
        ConfigError: on every rank, naming the file.
    """

    def check() -> None:
        if (changed := changed_since(data)) is not None:
            raise ConfigError(
                f"{changed}: steps after the last checkpoint may have read it, so none is saved; put the file back "
                "and resume from there"
            )

    on_rank_zero(check)
