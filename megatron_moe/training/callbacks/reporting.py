"""The report of every step: its metrics, and its health where that is measured.

Health is what is measured about routing, rounding and gradients at every `--health-interval`-th step. A measured step
computes the same bits as any other. Collectives here are entered by all ranks, also by those of a pipeline stage
without an MoE layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moe import platform
from megatron_moe.checkpoint.state import TrainingProgress
from megatron_moe.engine.optimizer import parts
from megatron_moe.model.fully_sharded import FullyShardedDataParallel
from megatron_moe.moe.router import TopKRouter, routers
from megatron_moe.moe.routing_probe import MARGIN_BINS, RoutingProbe, margin_percentile
from megatron_moe.optim.adam import MOMENTS, PrecisionAwareAdam
from megatron_moe.precision.packed_state import GROUP, AdamStep
from megatron_moe.report.health import Health, LayerHealth, load_health
from megatron_moe.report.records import exact
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.gradients import part_grad_norms, weights_norm
from megatron_moe.training.metrics import NO_EXPERT_LOAD, Meter, expert_load
from megatron_moe.training.step import StepResult
from megatron_moe.training.timers import interval_times, start_timing, times_text
from megatron_moe.training.trainer import Trainer

# Additions that rounding swallows: bf16 keeps 8 bits, so adding less than 1/512 of an element's value to it changes
# nothing, and no error or warning says so.

_EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""The exponent's bits; all set in an infinity and in what is no number, which keep their value for another reason."""
_MAGNITUDE = 0x7FFF
_ONE = torch.ops.aten.add_.Tensor
_MANY = torch.ops.aten._foreach_add_.List


class LostUpdates(TorchDispatchMode):
    """A mode that counts the in-place additions of a tensor to a bf16 or fp16 tensor, and those lost in rounding.

    An element counts as an addition where something other than zero was added, and as swallowed where it kept its
    value all the same. Additions into the gradient buffers, which add up micro-batches, are counted apart from others,
    such as autograd's sums where a tensor was used twice. Scalars are left out: sums of losses are not accumulators of
    this kind. Sums within a kernel or a collective are not seen: they are no operation of torch's.

    Args:
        gradient_buffers: tensors whose storage holds the gradients.
    """

    def __init__(self, gradient_buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._gradients = {buffer.untyped_storage().data_ptr() for buffer in gradient_buffers}
        self._seen: dict[tuple[bool, torch.device], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and compare before and after where it is one of those watched."""
        kwargs = kwargs or {}
        if func is _ONE:
            pairs = [(args[0], args[1])]
        elif func is _MANY:
            pairs = list(zip(args[0], args[1]))
        else:
            return func(*args, **kwargs)
        watched = [(to, added) for to, added in pairs if to.dtype in _EXPONENT and to.dim() and kwargs.get("alpha", 1)]
        before = [to.clone() for to, _ in watched]
        result = func(*args, **kwargs)
        for (to, added), old in zip(watched, before):
            self._count(to, added, old)
        return result

    def _count(self, to: Tensor, added: Tensor | float, before: Tensor) -> None:
        # Integers: comparisons of half-precision numbers are several times as slow on a CPU.
        bits, exponent = to.view(torch.int16), _EXPONENT[to.dtype]
        kept = (bits == before.view(torch.int16)) & ((bits & exponent) != exponent)
        if isinstance(added, Tensor) and added.dtype in _EXPONENT:
            something = ((added.view(torch.int16) & _MAGNITUDE) != 0).expand_as(to)
        else:
            something = (torch.as_tensor(added, device=to.device) != 0).expand_as(to)
        numbers = torch.stack([torch.count_nonzero(something), torch.count_nonzero(something & kept)])
        key = (to.untyped_storage().data_ptr() in self._gradients, to.device)
        self._seen[key] = self._seen[key] + numbers if key in self._seen else numbers

    def counted(self, *, gradients: bool) -> tuple[int, int]:
        """(additions, swallowed ones) so far on this rank: into the gradient buffers, or all others."""
        found = [numbers.tolist() for (kind, _), numbers in self._seen.items() if kind == gradients]
        return sum(number for number, _ in found), sum(lost for _, lost in found)


# Moments that are stored in fewer bytes than fp32 are rounded at random, so that they are right on average. What one
# step of the optimizer adds to them, and to the update that they would make, is measured on a sample of the elements.

SAMPLE = 8 * GROUP
"""Elements of each weight, from the middle of what a rank updates of it."""


class _Sample(NamedTuple):
    """Elements `begin` to `end` of a weight, and the moments that a step makes of them, fp32 [end - begin] each."""

    adam: PrecisionAwareAdam
    param: Tensor
    begin: int
    end: int
    moments: tuple[Tensor, ...]
    step: AdamStep


class MomentRounding:
    """Measures how far the stored moments of one step are from those that were computed.

    sums: fp64 [3, 2] on the device, of this rank: of the first moment, of the second one's root, by which an update is
    divided, and of AdamW's update, the squares of what rounding changed and those of the values. Zeros of moments that
    are not rounded.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(3, 2, dtype=torch.float64, device=platform.device())

    @contextmanager
    @torch.no_grad()
    def watching(self, optimizer: Any) -> Iterator[None]:
        """Compare what the block's step stores with what it computes of the gradients, which are clipped already."""
        samples = list(_samples(optimizer))
        yield
        for sample in samples:
            self._add(sample)

    def _add(self, sample: _Sample) -> None:
        adam, param, begin, end, computed, step = sample
        stored = tuple(adam.values_of(param, name, begin, end) for name in adam.moments_of(param))
        for number, (one, other) in enumerate(zip(stored, computed)):
            if adam.state[param][MOMENTS[number]].dtype != torch.float32:
                self._count(number, *(moment.sqrt() if number else moment for moment in (one, other)))
        if len(computed) == len(MOMENTS):
            self._count(2, _update(stored, step), _update(computed, step))

    def _count(self, row: int, stored: Tensor, computed: Tensor) -> None:
        exact = computed.double()
        self.sums[row] += torch.stack([(stored.double() - exact).square().sum(), exact.square().sum()])


def _samples(optimizer: Any) -> Iterator[_Sample]:
    """Yield the samples of this rank's weights whose moments are rounded."""
    for part in parts(optimizer):
        adam = part.optimizer
        if part.is_stub_optimizer or not (isinstance(adam, PrecisionAwareAdam) and adam.uses_stochastic_rounding):
            continue
        for group in adam.param_groups:
            step = AdamStep(group["lr"], group["betas"], group["eps"], group["weight_decay"], group["step"] + 1)
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    yield _sample(adam, param, step, adam.first_beta(param, group))


def _sample(adam: PrecisionAwareAdam, param: Any, step: AdamStep, first_beta: float) -> _Sample:
    begin = max(param.numel() - SAMPLE, 0) // 2 // GROUP * GROUP
    end = min(begin + SAMPLE, param.numel())
    grad = param.grad.reshape(-1)[begin:end]
    old = [adam.values_of(param, name, begin, end) for name in adam.moments_of(param)]
    computed = [old[0].lerp(grad, 1 - first_beta)]
    computed += [second.lerp(grad.square(), 1 - step.betas[1]) for second in old[1:]]
    return _Sample(adam, param, begin, end, tuple(computed), step)


def _update(moments: tuple[Tensor, ...], step: AdamStep) -> Tensor:
    """Return the update that moments make, but for the learning rate, which all elements share."""
    first, second = moments
    return first / (second.sqrt() / step.factors()["root_correction"] + step.eps)


_LOW_PERCENTILE = 0.05


class HealthProbe:
    """The measurement of one step of a model; a new one is made for every measured step.

    Args:
        model: wrapped model chunks of this rank.
        sample_tokens: tokens per layer and rank whose routing is compared with fp64.
        num_micro_batches: micro-batches of this rank in the step.
    """

    def __init__(self, model: Sequence[torch.nn.Module], sample_tokens: int, num_micro_batches: int) -> None:
        self._routers = list(routers(model))
        self._probes = [RoutingProbe(sample_tokens, num_micro_batches) for _ in self._routers]
        self._grad_norms: tuple[float, float] | None = None
        self._moments = MomentRounding()
        buffers = list(_gradient_buffers(model))
        # Watching costs time at every operation; where gradients are added up in fp32 there is nothing to find.
        half = any(buffer.dtype in (torch.bfloat16, torch.float16) for buffer in buffers)
        self._lost = LostUpdates(buffers) if half else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe forward and backward of all micro-batches, which run in the block."""
        with ExitStack() as stack:
            for router, probe in zip(self._routers, self._probes):
                stack.enter_context(router.observed_by(probe.see))
            if self._lost is not None:
                stack.enter_context(self._lost)
            yield

    def see_gradients(self, optimizer: Any) -> None:
        """Measure the norms of the reduced gradients before they are clipped. Collective over all ranks."""
        self._grad_norms = part_grad_norms(optimizer)

    def watching_update(self, optimizer: Any) -> AbstractContextManager[None]:
        """Return the context in which the rounding of stored moments is measured."""
        return self._moments.watching(optimizer)

    def health(
        self, tokens_per_expert: dict[int, list[int]], progress: TrainingProgress, pp: dist.ProcessGroup
    ) -> Health:
        """Return what was measured, the same on every rank. Collective over all ranks.

        Args:
            tokens_per_expert: per MoE layer of the whole model its E counts in the step.
            progress: up to and with this step.
            pp: the pipeline group.
        """
        additions, watching = [0, 0, 0, 0], self._lost is not None
        if self._lost is not None:
            additions = [*self._lost.counted(gradients=True), *self._lost.counted(gradients=False)]
        counted = torch.tensor([*additions, watching], dtype=torch.int64, device=platform.device())
        dist.all_reduce(counted)
        gradient_additions, gradient_swallowed, other_additions, other_swallowed, watching_ranks = counted.tolist()
        dist.all_reduce(self._moments.sums)
        first, second, update = (math.sqrt(lost / of) if of else None for lost, of in self._moments.sums.tolist())
        dense, experts = (None if n is None or not math.isfinite(n) else n for n in self._grad_norms or (None, None))
        return Health(
            gradient_additions=gradient_additions,
            gradient_swallowed=gradient_swallowed,
            other_additions=other_additions if watching_ranks else None,
            other_swallowed=other_swallowed if watching_ranks else None,
            dense_grad_norm=dense,
            expert_grad_norm=experts,
            skipped_iterations=progress.skipped_iterations,
            skip_rate=progress.skipped_iterations / max(progress.iteration, 1),
            loss_scale_raised=progress.loss_scale_raised,
            loss_scale_lowered=progress.loss_scale_lowered,
            layers=self._layers(tokens_per_expert, pp),
            first_moment_rounding=first,
            second_moment_rounding=second,
            update_rounding=update,
        )

    def _layers(self, tokens_per_expert: dict[int, list[int]], pp: dist.ProcessGroup) -> dict[int, LayerHealth]:
        """Return the health of all layers of all pipeline stages, in order."""
        local = [
            (router.layer_number or 0, *_figures(sums, max_logit), *_bias_range(router.expert_bias))
            for router, sums, max_logit in zip(self._routers, *_probe_sums(self._routers, self._probes))
        ]
        layers = local
        if pp.size() > 1:
            gathered: list[Any] = [None] * pp.size()
            dist.all_gather_object(gathered, local, group=pp)
            layers = [layer for stage in gathered for layer in stage]
        return {
            number: LayerHealth(load_health(tokens_per_expert.get(number, [])), *figures)
            for number, *figures in sorted(layers, key=lambda layer: layer[0])
        }


def _gradient_buffers(model: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors in which the engine's DDP wrapper adds up gradients; a fully sharded model has none in half."""
    for chunk in model:
        if isinstance(chunk, FullyShardedDataParallel):
            continue
        wrapper: Any = chunk  # a DistributedDataParallel, whose `buffers` is a list
        for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
            yield buffer.grad_data


def _probe_sums(found: list[TopKRouter], probes: list[RoutingProbe]) -> tuple[list[list[float]], list[float]]:
    """Add up per layer (sampled, flipped, margin_sum, then the histogram), and take the largest logit, over all ranks.

    fp64 holds the counts exactly up to 2^53.
    """
    if not found:
        return [], []
    device = platform.device()
    sums = torch.zeros(len(found), 3 + MARGIN_BINS, dtype=torch.float64, device=device)
    largest = torch.zeros(len(found), dtype=torch.float64, device=device)
    for row, probe in enumerate(probes):
        if probe.sums is not None and probe.margin_histogram is not None and probe.max_logit is not None:
            sums[row] = torch.cat([probe.sums, probe.margin_histogram.double()])
            largest[row] = probe.max_logit
    group = found[0].groups.tp_dp_cp
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return sums.tolist(), largest.tolist()


def _figures(sums: list[float], max_logit: float) -> tuple[int, float | None, float | None, float | None, float | None]:
    """Return sampled_tokens, margin_mean, margin_p5, flip_rate and max_logit of a `LayerHealth`."""
    sampled, flips, margin_sum, *histogram = sums
    counts = [int(number) for number in histogram]
    return (
        int(sampled),
        margin_sum / sum(counts) if sum(counts) else None,
        margin_percentile(counts, _LOW_PERCENTILE),
        flips / sampled if sampled else None,
        max_logit if math.isfinite(max_logit) else None,
    )


def _bias_range(bias: Tensor | None) -> tuple[float | None, float | None, float | None]:
    """Return minimum, maximum and mean of expert_bias; None where there is none."""
    if bias is None:
        return None, None, None
    return float(bias.min()), float(bias.max()), float(bias.double().mean())


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
