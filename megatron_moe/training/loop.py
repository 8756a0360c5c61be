"""The training loop: steps one after the other, with the callbacks around them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_moe.data.batches import BatchIterator, batch_iterators
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.replay import StepReplay
from megatron_moe.training.step import connect, train_step
from megatron_moe.training.trainer import Trainer


def train(trainer: Trainer, callbacks: Sequence[Callback]) -> None:
    """Train until `--train-iters` are done or a callback ends the run (`trainer.stop_reason`).

    Raises:
        RunFault: a callback found that the run cannot go on, on all ranks.
        SaveError: a checkpoint could not be written, and `--on-save-error` is stop or it was the last.
    """
    trainer.stop_at_end_of_sources()
    trained, consumed = trainer.trained, trainer.progress.consumed_samples
    batches: list[BatchIterator] = []
    if not trainer.finished:
        batches = batch_iterators(
            trainer.splits.train, trainer.run, consumed_samples=consumed, pg_collection=trained.pg_collection
        )
    connect(trained.model, trained.optimizer)
    replay = StepReplay(batches, trained.pg_collection, lambda number: trainer.at_step(f"micro-batch {number}"))
    for callback in callbacks:
        callback.attach(trainer)
        for note in callback.notes():
            trainer.reporter.message(note)
    try:
        for callback in callbacks:
            callback.before_training()
        while trainer.stop_reason is None and not trainer.finished:
            run_step(trainer, callbacks, batches, replay)
        for callback in callbacks:
            callback.after_training()
    except BaseException as error:
        for callback in callbacks:
            callback.on_error(error)
        raise
    finally:
        for callback in reversed(callbacks):
            callback.close()


def run_step(
    trainer: Trainer, callbacks: Sequence[Callback], batches: Sequence[BatchIterator], replay: StepReplay
) -> None:
    """Run the next step and count it, with the callbacks before, within and after it."""
    run, trained, progress = trainer.run, trainer.trained, trainer.progress
    trainer.at_step("begins")
    replay.begin()
    step = Step(
        iteration=progress.iteration + 1,
        first_sample=progress.consumed_samples,
        num_micro_batches=trainer.schedule.num_micro_batches(progress.consumed_samples),
        replay=replay,
    )

    def before_update() -> None:
        trainer.at_step("update")
        for callback in callbacks:
            callback.before_update(step)

    with step.contexts:
        for callback in callbacks:
            callback.before_step(step)
        result = train_step(
            trained.model,
            trained.optimizer,
            trained.scheduler,
            batches,
            num_micro_batches=step.num_micro_batches,
            micro_batch_size=run.training.micro_batch_size,
            seq_length=run.model.seq_length,
            pg_collection=trained.pg_collection,
            average=trained.average,
            probe=step.probe,
            before_update=before_update,
            zeros_counted=step.counts_zeros,
            graphs=trainer.graphs,
        )
    trainer.count(result)
    trainer.at(f"iteration {step.iteration}, counted", limited=False)  # what follows may take long
    for callback in callbacks:
        callback.after_step(step, result)
