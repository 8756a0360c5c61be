"""The replay of the last step: its micro-batches and the random states it began with are kept to run it once more.

Nothing is computed for it: a step's micro-batches are a few integers per token, kept until the next step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_moe.data.batches import Batch, BatchIterator
from megatron_moe.engine.schedules import configured, gradients_kept_on_their_ranks
from megatron_moe.model.fully_sharded import FullyShardedDataParallel
from megatron_moe.moe.router import RouterSnapshot
from megatron_moe.platform.protocols import ProcessGroups
from megatron_moe.training.evaluate import gathered_parameters
from megatron_moe.training.global_batch import random_states, same_random_states, set_random_states
from megatron_moe.training.step import run_micro_batches
from megatron_moe.training.step_sums import Model, wrapped


class StepReplay:
    """The micro-batches of the present step, kept as the run's iterators give them out, to run the step once more.

    batches: one iterator of micro-batches per model chunk. on_micro_batch: is called with the number of every
    micro-batch that is taken, from 0.
    """

    def __init__(
        self,
        batches: Sequence[BatchIterator],
        pg_collection: ProcessGroups,
        on_micro_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._pg_collection = pg_collection
        self.micro_batches: list[list[Batch]] = [[] for _ in batches]
        """Per model chunk the micro-batches of the present step."""
        self._states: Any = None
        for iterator, kept in zip(batches, self.micro_batches):
            iterator.observer = partial(self._keep, kept)
        self._on_micro_batch = on_micro_batch

    def _keep(self, kept: list[Batch], batch: Batch) -> None:
        self._on_micro_batch(len(kept))
        kept.append(batch)

    def begin(self) -> None:
        """Forget the last step and record the random states that the next one begins with."""
        for kept in self.micro_batches:
            kept.clear()
        self._states = random_states()

    def run_again(self, model: Model, *, micro_batch_size: int, seq_length: int) -> None:
        """Run forward and backward of the step once more, with the present weights. Collective over all ranks.

        Afterwards the gradient buffers hold this rank's own gradients, not reduced; random states, expert_bias and
        routing counts are as before.
        """
        snapshot = RouterSnapshot.capture(model)
        for chunk in wrapped(model):
            chunk.zero_grad_buffer()
        # A fully sharded model has no room for its gradients before they are reduced: they are reduced as ever.
        reducing = [chunk for chunk in model if not isinstance(chunk, FullyShardedDataParallel)]
        try:
            with (
                # Micro-batches one after the other, by calls of whole modules, which hooks can watch.
                configured(model, no_sync_func=None, overlap_moe_expert_parallel_comm=False, timers=None),
                gathered_parameters(model),
                gradients_kept_on_their_ranks(reducing),
                same_random_states(),
            ):
                set_random_states(self._states)
                run_micro_batches(
                    model,
                    list(map(iter, self.micro_batches)),
                    None,
                    num_micro_batches=len(self.micro_batches[0]),
                    micro_batch_size=micro_batch_size,
                    seq_length=seq_length,
                    pg_collection=self._pg_collection,
                )
        finally:
            snapshot.restore()
