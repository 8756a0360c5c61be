"""Bytes of one rank, part by part: what it always holds, and what the micro-batches in flight add at their peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_moe.apps.plan.tracing import RankTrace
from megatron_moe.config import derived
from megatron_moe.config.schema import Run

# Adam's two moments, and the fp32 copy of a half-precision weight.
_MOMENTS, _MASTER = 8, 4


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes of a rank.

    weights, gradients: the engine's buffers, padding included. optimizer: fp32 masters and moments. activations: the
    most above these during the forward and backward passes of a step; of that, in_flight micro-batches (of one chunk
    each) are waiting for their backward pass at once. logits, dispatch: the most of these in one micro-batch, within
    the activations. update: the most above weights, gradients and optimizer during the update, when the activations
    are gone.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int
    logits: int
    dispatch: int
    update: int

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return self.weights + self.gradients + self.optimizer + max(self.activations, self.update)


def rank_memory(run: Run, trace: RankTrace, world_size: int) -> PlannedMemory:
    """The memory of a rank, of the data-parallel rank that holds most of the optimizer."""
    optimizer = update = 0
    for buffer in trace.buffers:
        share = buffer.numel // len(buffer.ranks) if run.optimizer.use_distributed_optimizer else buffer.used
        optimizer += share * (_MOMENTS + (_MASTER if buffer.parameter_bytes < 4 else 0))
        update += share * 4 if buffer.gradient_bytes < 4 else 0  # gradients are widened for the update
    activations, in_flight = _activation_peak(run, trace, derived.num_microbatches(run, world_size))
    return PlannedMemory(
        weights=trace.weights,
        gradients=sum(buffer.numel * buffer.gradient_bytes for buffer in trace.buffers),
        optimizer=optimizer,
        activations=activations,
        in_flight=in_flight,
        logits=max(chunk.logits for chunk in trace.chunks),
        dispatch=max(chunk.dispatch for chunk in trace.chunks),
        update=update,
    )


def _activation_peak(run: Run, trace: RankTrace, micro_batches: int) -> tuple[int, int]:
    """The most bytes of activations while the schedule runs, and how many passes then wait for their backward."""
    stages = run.parallel.pipeline_model_parallel_size
    held = peak = waiting = most_waiting = 0
    # After the first rounds the schedule repeats itself.
    for is_forward, number in schedule(len(trace.chunks), stages, trace.stage, min(micro_batches, 4 * stages)):
        chunk = trace.chunks[number]
        if is_forward:
            peak = max(peak, held + chunk.forward_peak)
            held, waiting = held + chunk.kept, waiting + 1
        else:
            held, waiting = held - chunk.kept, waiting - 1
            peak = max(peak, held + chunk.backward_peak)
        most_waiting = max(most_waiting, waiting)
    return peak, most_waiting


def schedule(chunks: int, stages: int, stage: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
    """The passes of one stage in the engine's order: (is it a forward pass, of which chunk).

    One chunk per stage: as many forward passes as stages follow, then one forward and one backward in turn. Several:
    rounds of `stages` micro-batches walk through the chunks.
    """
    total = chunks * micro_batches
    warm_up = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm_up = min(warm_up, total)

    def chunk(index: int) -> int:
        return index % (stages * chunks) // stages

    for index in range(total + warm_up):
        if index < total:
            yield True, chunk(index)
        if index >= warm_up:
            yield False, chunks - 1 - chunk(index - warm_up)


def bubble_share(chunks: int, stages: int, micro_batches: int) -> float:
    """Share of a step in which a stage waits: (PP - 1) / (VPP x micro-batches + PP - 1), all passes equally long."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)
