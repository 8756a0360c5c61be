"""Python's garbage collector by hand (`--manual-gc`), so that all ranks collect between the same steps.

By itself it runs when enough objects were made, on each rank at another time, and each time all ranks wait for one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_moe.config.run_flags import TrainingConfig
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.step import StepResult


class GarbageCollection(Callback):
    """Turns Python's collector off while the run trains, and collects at intervals, with `--manual-gc`."""

    _was_on = False

    def before_training(self) -> None:
        """Collect once and turn the collector off."""
        if self.trainer.run.training.manual_gc:
            self._was_on = gc.isenabled()
            gc.disable()
            gc.collect()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Collect at the end of each `--manual-gc-interval`."""
        options = self.trainer.run.training
        if options.manual_gc and options.manual_gc_interval and step.iteration % options.manual_gc_interval == 0:
            gc.collect()

    def close(self) -> None:
        """Turn the collector on again."""
        if self._was_on:
            gc.enable()


@contextmanager
def collected(options: TrainingConfig) -> Iterator[None]:
    """Collect before the block, an evaluation, and what is young after it, unless `--no-manual-gc-eval` is given."""
    by_hand = options.manual_gc and options.manual_gc_eval
    if by_hand:
        gc.collect()
    yield
    if by_hand:
        gc.collect(generation=0)
