"""The report of every step: its metrics, and what is measured for them."""

from __future__ import annotations

import time

from megatron_moe.report.records import exact
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.callbacks.health import HealthProbe
from megatron_moe.training.gradients import weights_norm
from megatron_moe.training.metrics import NO_EXPERT_LOAD, Meter, expert_load
from megatron_moe.training.step import StepResult
from megatron_moe.training.timers import interval_times, start_timing, times_text
from megatron_moe.training.trainer import Trainer


class Reporting(Callback):
    """Measures each step and reports its metrics; at log intervals also what takes a measurement by itself."""

    def attach(self, trainer: Trainer) -> None:
        """Start the timers."""
        super().attach(trainer)
        world_size, vocabulary = trainer.rank_facts.world_size, trainer.padded_vocab_size
        start_timing(trainer.trained.model, trainer.run.logging.timing_log_level)
        self._meter = Meter(trainer.run, world_size=world_size, padded_vocab_size=vocabulary)
        self._probe: HealthProbe | None = None

    def before_step(self, step: Step) -> None:
        """Measure the step's health at the end of each `--health-interval`."""
        run = self.trainer.run
        step.began = time.perf_counter()
        step.counts_zeros = run.logging.log_num_zeros_in_grad and self._is_logged(step)
        self._probe = None
        interval = run.derived.health_interval
        if interval and step.iteration % interval == 0:
            sample_tokens = run.logging.health_sample_tokens
            self._probe = HealthProbe(self.trainer.trained.model, sample_tokens, step.num_micro_batches)
            step.probe = self._probe

    def after_step(self, step: Step, result: StepResult) -> None:
        """Report the step's metrics. Collective over all ranks.

        Raises:
            RunFault: a metric or a sink that a program has added failed.
        """
        trainer, options = self.trainer, self.trainer.run.logging
        model, groups = trainer.trained.model, trainer.trained.pg_collection
        load, times, health, params_norm = NO_EXPERT_LOAD, None, None, None
        if self._is_logged(step) or self._probe is not None:
            load = expert_load(result.router_update, groups)
        if self._is_logged(step):
            times = interval_times(model, options.timing_log_level, options.log_interval)
        if self._probe is not None:
            health = self._probe.health(load.tokens_per_expert, trainer.progress, groups.pp)
        if self._is_logged(step) and options.log_params_norm:
            params_norm = weights_norm(trainer.trained.optimizer)
        step.record = self._meter.record(
            result,
            load,
            iteration=step.iteration,
            consumed_samples=trainer.progress.consumed_samples,
            global_batch_size=trainer.progress.consumed_samples - step.first_sample,
            seconds=time.perf_counter() - step.began,
            health=health,
            params_norm=params_norm,
            part_seconds={name: slowest for name, (_, slowest) in (times or {}).items()},
        )
        trainer.records.append(exact(step.record))
        trainer.reporter.step(step.record)
        trainer.require_sinks()
        if times is not None:
            trainer.reporter.message(times_text(times))

    def _is_logged(self, step: Step) -> bool:
        return step.iteration % self.trainer.run.logging.log_interval == 0
