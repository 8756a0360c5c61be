"""How many sequences a step takes: constant, or growing over the first samples (`--rampup-batch-size`).

megatron-core has a calculator for this, but 0.19 dropped the ramp-up from it (the argument is accepted and ignored).
A ramp that depends on the version would make runs incomparable, so it is computed here, without state: the batch size
is a function of the samples consumed, which is what a checkpoint keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run


@dataclass(frozen=True)
class BatchSchedule:
    """Sequences per optimizer step as a function of the sequences consumed so far.

    `final` is the global batch size after the ramp. With `ramp` = (start, increment, samples) it begins at `start` and
    grows by `increment` in equal shares of the first `samples` sequences (Megatron-LM's rule).
    """

    micro_batch_size: int
    data_parallel_size: int
    final: int
    ramp: tuple[int, int, int] | None = None

    def global_batch_size(self, consumed_samples: int) -> int:
        """Return the number of sequences of the next step, over all ranks."""
        if self.ramp is None:
            return self.final
        start, increment, samples = self.ramp
        increments = (self.final - start) // increment
        if increments == 0 or consumed_samples >= samples:
            return self.final
        return min(self.final, start + consumed_samples * increments // samples * increment)

    @property
    def samples_per_micro_batch(self) -> int:
        """Sequences of one micro-batch of all ranks."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def final_micro_batches(self) -> int:
        """Micro-batches per rank of a global batch after any ramp-up."""
        return self.final // self.samples_per_micro_batch

    def num_micro_batches(self, consumed_samples: int) -> int:
        """Return the number of micro-batches of the next step, per rank."""
        return self.global_batch_size(consumed_samples) // self.samples_per_micro_batch

    def samples_after(self, steps: int, consumed: int = 0) -> int:
        """Return how many sequences are consumed when so many further steps are done."""
        for done in range(steps):
            size = self.global_batch_size(consumed)
            if size == self.final:
                return consumed + (steps - done) * self.final
            consumed += size
        return consumed

    def steps_to(self, samples: int, consumed: int = 0) -> int:
        """Return how many further whole steps fit until so many sequences are consumed."""
        steps = 0
        while consumed + (size := self.global_batch_size(consumed)) <= samples:
            if size == self.final:
                return steps + (samples - consumed) // size
            consumed += size
            steps += 1
        return steps


def batch_schedule(run: Run, world_size: int) -> BatchSchedule:
    """Return the batch size schedule of a run.

    Raises:
        ConfigError: a ramp that is not START INCREMENT SAMPLES, does not end at the global batch size, or passes a
            size that micro-batch-size x DP does not divide.
    """
    training = run.training
    dp = run.derived.data_parallel_size(world_size)
    final = run.derived.global_batch_size(world_size)
    if (ramp := training.rampup_batch_size) is None:
        return BatchSchedule(training.micro_batch_size, dp, final)
    step, shown = training.micro_batch_size * dp, " ".join(map(str, ramp))
    if len(ramp) != 3 or min(ramp) < 1:
        raise ConfigError(
            f"--rampup-batch-size {shown}: give START INCREMENT SAMPLES, three positive numbers, "
            f"for example {step} {step} {10 * final}"
        )
    start, increment, _ = ramp
    if start > final or (final - start) % increment:
        raise ConfigError(
            f"--rampup-batch-size {shown}: steps of {increment} from {start} do not reach --global-batch-size {final}; "
            f"the difference {final - start} must be a multiple of the increment"
        )
    if start % step or increment % step:
        raise ConfigError(
            f"--rampup-batch-size {shown}: every size on the way must be a multiple of micro-batch-size x DP = {step}; "
            f"for example {step} {step} {ramp[2]}"
        )
    return BatchSchedule(training.micro_batch_size, dp, final, (start, increment, ramp[2]))
