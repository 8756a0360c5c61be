"""Python's garbage collector by hand (`--manual-gc`), so that all ranks collect between the same steps.

By itself it runs when enough objects were made, on each rank at another time, and each time all ranks wait for one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_moe.config.run_flags import TrainingConfig


@contextmanager
def collector_off(options: TrainingConfig) -> Iterator[None]:
    """Collect once and turn the collector off in the block, with `--manual-gc`."""
    if not options.manual_gc:
        yield
        return
    was_on = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def collect_after(iteration: int, options: TrainingConfig) -> None:
    """Collect after this iteration where it ends a `--manual-gc-interval`."""
    interval = options.manual_gc_interval
    if options.manual_gc and interval and iteration % interval == 0:
        gc.collect()


@contextmanager
def collected(options: TrainingConfig) -> Iterator[None]:
    """Collect before the block, an evaluation, and what is young after it, unless `--no-manual-gc-eval` is given."""
    by_hand = options.manual_gc and options.manual_gc_eval
    if by_hand:
        gc.collect()
    yield
    if by_hand:
        gc.collect(generation=0)
