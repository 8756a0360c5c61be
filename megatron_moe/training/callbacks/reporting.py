"""The report of every step: its metrics, and its health where that is measured.

Health is what is measured about routing, rounding and gradients at every `--health-interval`-th step. A measured step
computes the same bits as any other. Collectives here are entered by all ranks, also by those of a pipeline stage
without an MoE layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moe import platform
from megatron_moe.checkpoint.state import TrainingProgress
from megatron_moe.data.batches import SOURCES, Batch
from megatron_moe.engine.optimizer import parts
from megatron_moe.engine.schedules import Timers, configure, get_model_config
from megatron_moe.model.fully_sharded import FullyShardedDataParallel
from megatron_moe.moe.load_balance import TokenCountError
from megatron_moe.moe.router import routers
from megatron_moe.moe.routing_probe import MARGIN_BINS, RoutingProbe, margin_percentile
from megatron_moe.optim.adam import PrecisionAwareAdam
from megatron_moe.platform.protocols import EngineOptimizer
from megatron_moe.precision.packed_state import GROUP, AdamStep
from megatron_moe.report.health import Health, LayerHealth, load_health
from megatron_moe.report.records import exact
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.gradients import part_grad_norms, weights_norm
from megatron_moe.training.metrics import NO_EXPERT_LOAD, Meter, expert_load
from megatron_moe.training.step import ForwardStep, StepResult
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
    """

    def __init__(self, gradient_buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._gradients = {buffer.untyped_storage().data_ptr() for buffer in gradient_buffers}
        self._seen: dict[tuple[bool, torch.device], Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and compare before and after where it is one of those watched."""
        kwargs = kwargs or {}
        if func is _ONE:
            pairs = [(args[0], args[1])]
        elif func is _MANY:
            pairs = list(zip(args[0], args[1]))
        else:
            return func(*args, **kwargs)
        watched = []
        for to, added in pairs:
            if to.dtype in _EXPONENT and to.dim() and kwargs.get("alpha", 1):
                watched.append((to, added, to.clone()))
        result = func(*args, **kwargs)
        for to, added, old in watched:
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
        if key in self._seen:
            numbers += self._seen[key]
        self._seen[key] = numbers

    def counted(self, *, gradients: bool) -> tuple[int, int]:
        """(additions, swallowed ones) so far on this rank: into the gradient buffers, or all others."""
        additions = swallowed = 0
        for (into_gradients, _), numbers in self._seen.items():
            if into_gradients == gradients:
                number, lost = numbers.tolist()
                additions, swallowed = additions + number, swallowed + lost
        return additions, swallowed


# Moments that are stored in fewer bytes than fp32 are rounded at random, so that they are right on average. What one
# step of the optimizer adds to them, and to the update that they would make, is measured on a sample of the elements.

SAMPLE = 8 * GROUP
"""Elements of each weight, from the middle of what a rank updates of it."""


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
    def watching(self, optimizer: EngineOptimizer) -> Iterator[None]:
        """Compare what the block's step stores with what it computes of the gradients, which are clipped already."""
        samples: list[tuple[PrecisionAwareAdam, Tensor, int, int, list[Tensor], AdamStep]] = []
        for part in parts(optimizer):
            adam = part.optimizer
            if part.is_stub_optimizer or not (isinstance(adam, PrecisionAwareAdam) and adam.uses_stochastic_rounding):
                continue
            for group in adam.param_groups:
                step = AdamStep(group["lr"], group["betas"], group["eps"], group["weight_decay"], group["step"] + 1)
                for param in group["params"]:
                    if param.grad is None or not param.numel():
                        continue
                    begin = max(param.numel() - SAMPLE, 0) // 2 // GROUP * GROUP
                    end = min(begin + SAMPLE, param.numel())
                    grad = param.grad.reshape(-1)[begin:end]
                    first, *second = (adam.values_of(param, name, begin, end) for name in adam.moments_of(param))
                    computed = [first.lerp(grad, 1 - adam.first_beta(param, group))]
                    if second:
                        computed.append(second[0].lerp(grad.square(), 1 - step.betas[1]))
                    samples.append((adam, param, begin, end, computed, step))
        yield
        for adam, param, begin, end, computed, step in samples:
            names = adam.moments_of(param)
            stored = [adam.values_of(param, name, begin, end) for name in names]
            if adam.state[param][names[0]].dtype != torch.float32:
                self._count(0, stored[0], computed[0])
            if len(names) == 1:
                continue
            if adam.state[param][names[1]].dtype != torch.float32:
                self._count(1, stored[1].sqrt(), computed[1].sqrt())
            # The update that moments make, but for the learning rate, which all elements share.
            correction = step.factors()["root_correction"]
            updates = [first / (second.sqrt() / correction + step.eps) for first, second in (stored, computed)]
            self._count(2, *updates)

    def _count(self, row: int, stored: Tensor, computed: Tensor) -> None:
        exact = computed.double()
        self.sums[row] += torch.stack([(stored.double() - exact).square().sum(), exact.square().sum()])


_LOW_PERCENTILE = 0.05


class HealthProbe:
    """The measurement of one step of a model; a new one is made for every measured step.

    sample_tokens: tokens per layer and rank whose routing is compared with fp64. sources: the names of sources.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        sample_tokens: int,
        num_micro_batches: int,
        sources: Sequence[str] = (),
    ) -> None:
        self._routers, self._sources = list(routers(model)), list(sources)
        self._probes = [RoutingProbe(sample_tokens, num_micro_batches, len(sources)) for _ in self._routers]
        self._grad_norms = (math.nan, math.nan)
        self._moments = MomentRounding()
        buffers: list[Tensor] = []  # in which the engine's DDP wrapper adds up gradients
        for chunk in model:
            if not isinstance(chunk, FullyShardedDataParallel):  # which has none in half precision
                wrapper: Any = chunk  # a DistributedDataParallel, whose `buffers` is a list
                buffers += (buffer.grad_data for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers))
        # Watching costs time at every operation; where gradients are added up in fp32 there is nothing to find.
        self._lost: LostUpdates | None = None
        if any(buffer.dtype in _EXPONENT for buffer in buffers):
            self._lost = LostUpdates(buffers)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe forward and backward of all micro-batches, which run in the block."""
        with ExitStack() as stack:
            for router, probe in zip(self._routers, self._probes):
                stack.enter_context(router.observed_by(probe.see))
            if self._lost is not None:
                stack.enter_context(self._lost)
            yield

    def following(self, forward_step: ForwardStep) -> ForwardStep:
        """Return `forward_step`, which tells the routers of the chunk the sources of each micro-batch.

        Recomputation runs routers again, when other micro-batches may have been forward: where the backward pass of a
        micro-batch begins, its sources are told once more. Any other pass raises an error.
        """
        if not self._sources:
            return forward_step
        probes = dict(zip(self._routers, self._probes))

        def step(batches: Iterator[Batch], chunk: torch.nn.Module, *flags: bool, **options: bool) -> tuple[Any, Any]:
            batch, of_chunk = next(batches), [probes[router] for router in routers([chunk])]

            def tell(sources: Tensor | None) -> None:
                for probe in of_chunk:
                    probe.sources = sources

            tell(batch[SOURCES])
            output, loss_func = forward_step(iter([batch]), chunk, *flags, **options)
            # A plan (`model/overlap.py`) runs before the next one is made, and recomputes no router.
            if isinstance(output, Tensor):
                tell(None)
                if output.requires_grad:
                    output.register_hook(lambda _: tell(batch[SOURCES]))
            return output, loss_func

        return step

    def see_gradients(self, optimizer: EngineOptimizer) -> None:
        """Measure the norms of the reduced gradients before they are clipped. Collective over all ranks."""
        self._grad_norms = part_grad_norms(optimizer)

    def watching_update(self, optimizer: EngineOptimizer) -> AbstractContextManager[None]:
        """Return the context in which the rounding of stored moments is measured."""
        return self._moments.watching(optimizer)

    def health(
        self, tokens_per_expert: dict[int, list[int]], progress: TrainingProgress, pp: dist.ProcessGroup
    ) -> Health:
        """Return what was measured, the same on every rank. Collective over all ranks.

        tokens_per_expert: per MoE layer of the whole model its E counts in the step. progress: with this step.
        """
        own = [0, 0, 0, 0, 0]
        if self._lost is not None:
            own = [*self._lost.counted(gradients=True), *self._lost.counted(gradients=False), 1]
        counted = torch.tensor(own, dtype=torch.int64, device=platform.device())
        dist.all_reduce(counted)
        gradient_additions, gradient_swallowed, *others, watching_ranks = counted.tolist()
        if not watching_ranks:
            others = [None, None]
        dist.all_reduce(self._moments.sums)
        rounding: list[float | None] = [None, None, None]
        for row, (lost, of) in enumerate(self._moments.sums.tolist()):
            if of:
                rounding[row] = math.sqrt(lost / of)
        grad_norms: list[float | None] = [None, None]
        for number, norm in enumerate(self._grad_norms):
            if math.isfinite(norm):
                grad_norms[number] = norm
        return Health(
            gradient_additions=gradient_additions,
            gradient_swallowed=gradient_swallowed,
            other_additions=others[0],
            other_swallowed=others[1],
            dense_grad_norm=grad_norms[0],
            expert_grad_norm=grad_norms[1],
            skipped_iterations=progress.skipped_iterations,
            skip_rate=progress.skipped_iterations / max(progress.iteration, 1),
            loss_scale_raised=progress.loss_scale_raised,
            loss_scale_lowered=progress.loss_scale_lowered,
            layers=self._layers(tokens_per_expert, pp),
            first_moment_rounding=rounding[0],
            second_moment_rounding=rounding[1],
            update_rounding=rounding[2],
        )

    def _layers(self, tokens_per_expert: dict[int, list[int]], pp: dist.ProcessGroup) -> dict[int, LayerHealth]:
        """Return the health of all layers of all pipeline stages, in order. Collective over all ranks.

        A stage adds up per layer what its ranks sampled (sampled, flipped, margin_sum, then the histogram, and the
        choices by source), in fp64, which holds the counts exactly up to 2^53, and takes the largest logit.

        Raises:
            TokenCountError: the choices by source are not all choices.
        """
        local: dict[int, LayerHealth] = {}
        if self._routers:
            counted = max(router.options.num_experts for router in self._routers) * len(self._sources)
            size = (len(self._routers), 3 + MARGIN_BINS + counted)
            sums = torch.zeros(size, dtype=torch.float64, device=platform.device())
            largest = torch.zeros(len(self._routers), dtype=torch.float64, device=platform.device())
            for row, probe in enumerate(self._probes):
                if probe.sums is not None and probe.margin_histogram is not None and probe.max_logit is not None:
                    own = [probe.sums, probe.margin_histogram.double()]
                    if probe.tokens_per_source is not None:
                        own.append(probe.tokens_per_source.double().flatten())
                    known = torch.cat(own)
                    sums[row, : len(known)] = known
                    largest[row] = probe.max_logit
            group = self._routers[0].groups.tp_dp_cp
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            for router, of_layer, max_logit in zip(self._routers, sums.tolist(), largest.tolist()):
                sampled, flips, margin_sum, *numbers = of_layer
                numbers = list(map(int, numbers))
                counts, by_source = numbers[:MARGIN_BINS], numbers[MARGIN_BINS:]
                margin_mean: float | None = None
                flip_rate: float | None = None
                logit: float | None = None
                if math.isfinite(max_logit):
                    logit = max_logit
                if sum(counts):
                    margin_mean = margin_sum / sum(counts)
                if sampled:
                    flip_rate = flips / sampled
                of_bias: tuple[float | None, float | None, float | None] = (None, None, None)
                if (bias := router.expert_bias) is not None:
                    of_bias = float(bias.min()), float(bias.max()), float(bias.double().mean())
                number, experts = router.layer_number or 0, router.options.num_experts
                of_sources = {name: by_source[experts * k :][:experts] for k, name in enumerate(self._sources)}
                total = tokens_per_expert.get(number, [])
                together = [sum(column) for column in zip(*of_sources.values())]
                if of_sources and together != total:
                    raise TokenCountError(f"layer {number}: experts got {total}, of all sources together {together}")
                local[number] = LayerHealth(
                    load_health(total),
                    int(sampled),
                    margin_mean,
                    margin_percentile(counts, _LOW_PERCENTILE),
                    flip_rate,
                    logit,
                    *of_bias,
                    of_sources,
                )
        stages: list[dict[int, LayerHealth]] = [local]
        if pp.size() > 1:
            stages *= pp.size()
            dist.all_gather_object(stages, local, group=pp)
        every: dict[int, LayerHealth] = {}
        for stage in stages:
            every.update(stage)
        return dict(sorted(every.items()))


# The engine's timers by `--timing-log-level`, in the order of a step: 1 a step's parts, 2 every micro-batch. Every rank
# asks for the same names, whichever of them its stage has: the times of all ranks are gathered in one collective.
_TIMED = {
    1: ("forward-backward", "all-grads-sync", "non-tensor-parallel-grads-all-reduce", "embedding-grads-all-reduce")
    + ("optimizer",),
    2: ("forward-compute", "backward-compute", "forward-recv", "forward-send", "backward-recv", "backward-send"),
}


class Reporting(Callback):
    """Measures each step and reports its metrics; at log intervals also what takes a measurement by itself."""

    def attach(self, trainer: Trainer) -> None:
        """Start the timers."""
        super().attach(trainer)
        world_size, vocabulary = trainer.rank_facts.world_size, trainer.padded_vocab_size
        level = trainer.run.logging.timing_log_level
        # Level 1 and above put a barrier before each part, so that waiting for other ranks is not counted as work.
        configure(trainer.trained.model, timers=Timers(level, "minmax") if level else None)
        self._timed: list[str] = []
        for of_level, names in _TIMED.items():
            if of_level <= level:
                self._timed += names
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
            names: list[str] = []
            if (mixture := self.trainer.splits.mixture) is not None:
                names = [source.name for source in mixture.sources]
            sample_tokens = run.logging.health_sample_tokens
            self._probe = HealthProbe(self.trainer.trained.model, sample_tokens, step.num_micro_batches, names)
            step.probe = self._probe

    def after_step(self, step: Step, result: StepResult) -> None:
        """Report the step's metrics. Collective over all ranks.

        Raises:
            RunFault: a metric or a sink that a program has added failed.
        """
        trainer, options = self.trainer, self.trainer.run.logging
        groups = trainer.trained.pg_collection
        load, times, health, params_norm, epochs = NO_EXPERT_LOAD, None, None, None, None
        if self._is_logged(step) or self._probe is not None:
            load = expert_load(result.router_update, groups)
        timers = get_model_config(trainer.trained.model[0]).timers
        if self._is_logged(step) and timers is not None:  # least and most seconds of any rank per iteration
            times = timers._get_global_min_max_time(self._timed, True, False, float(options.log_interval))
        if self._probe is not None:
            health = self._probe.health(load.tokens_per_expert, trainer.progress, groups.pp)
        if self._is_logged(step) and options.log_params_norm:
            params_norm = weights_norm(trainer.trained.optimizer)
        if trainer.splits.mixture is not None:
            epochs = trainer.splits.mixture.epochs(trainer.progress.consumed_samples)
        step.record = self._meter.record(
            result,
            load,
            iteration=step.iteration,
            consumed_samples=trainer.progress.consumed_samples,
            global_batch_size=trainer.progress.consumed_samples - step.first_sample,
            seconds=time.perf_counter() - step.began,
            health=health,
            epochs=epochs,
            params_norm=params_norm,
            part_seconds={name: slowest for name, (_, slowest) in (times or {}).items()},
            rank_seconds=step.rank_seconds,
        )
        trainer.records.append(exact(step.record))
        trainer.reporter.step(step.record)
        trainer.require_sinks()
        if times is not None:
            lines = ["(min, max) time across ranks (ms):"]
            for name, (least, most) in times.items():
                dotted = f"{name} ".ljust(48, ".")
                lines.append(f"    {dotted}: ({1e3 * least:.2f}, {1e3 * most:.2f})")
            trainer.reporter.message("\n".join(lines))

    def _is_logged(self, step: Step) -> bool:
        return step.iteration % self.trainer.run.logging.log_interval == 0
