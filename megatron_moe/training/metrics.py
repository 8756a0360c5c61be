"""The facts of a step that its metrics are computed from: expert load over all stages, times, FLOPs, time left."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from statistics import fmean

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.checkpoint.errors import all_gather_object
from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run
from megatron_moe.platform.protocols import ProcessGroups
from megatron_moe.report.health import Health
from megatron_moe.report.metric import ExpertLoad, MetricError, StepFacts, added_metrics, with_added_metrics
from megatron_moe.report.records import SourceStep, StepRecord
from megatron_moe.training.finalize_model_grads import RouterUpdate
from megatron_moe.training.step import StepResult
from megatron_moe.training.step_sums import max_over_ranks

NO_EXPERT_LOAD = ExpertLoad({}, None, {})


@dataclass
class LayerLoad:
    """What the router of one layer did in a step, read from the device; see `RouterUpdate` and `ExpertLoad`."""

    number: int
    tokens_per_expert: list[int]
    aux_losses: dict[str, float]
    expert_bias_max: float | None = None
    dropped_per_expert: list[int] | None = None
    expert_bias_error: float | None = None


def expert_load(update: RouterUpdate, pg_collection: ProcessGroups) -> ExpertLoad:
    """Gather the load of all pipeline stages' routers. Collective over the pipeline group where there is one.

    aux_losses are means over the layers that have the loss.
    """
    layers = _layer_loads(update)
    if pg_collection.pp.size() > 1:
        stages: list[list[LayerLoad]] = [[]] * pg_collection.pp.size()
        torch.distributed.all_gather_object(stages, layers, group=pg_collection.pp)
        layers = list(chain.from_iterable(stages))
    tokens, dropped = {}, {}
    biases: list[float] = []
    errors: list[float] = []
    losses: defaultdict[str, list[float]] = defaultdict(list)
    for layer in sorted(layers, key=attrgetter("number")):
        tokens[layer.number] = layer.tokens_per_expert
        if layer.dropped_per_expert is not None:
            dropped[layer.number] = layer.dropped_per_expert
        if layer.expert_bias_max is not None:
            biases.append(layer.expert_bias_max)
        if layer.expert_bias_error is not None:
            errors.append(layer.expert_bias_error)
        for name, loss in layer.aux_losses.items():
            losses[name].append(loss)
    means = {name: sum(losses[name]) / len(losses[name]) for name in sorted(losses)}
    return ExpertLoad(tokens, max(biases, default=None), means, dropped, max(errors, default=None))


def _layer_loads(update: RouterUpdate) -> list[LayerLoad]:
    """Return the load of each layer of this rank, with one read from the device."""
    layers = list(zip(*vars(update).values()))
    tensors: list[Tensor] = []
    for _, counts, bias, losses, dropped, error in layers:
        tensors += [counts, *losses.values()]
        if bias is not None:
            tensors.append(bias.abs().max())
        if dropped is not None:
            tensors.append(dropped)
        if error is not None:
            tensors.append(error)
    if not tensors:
        return []
    # fp64 has every count up to 2^53.
    numbers = iter(torch.cat([tensor.double().flatten() for tensor in tensors]).tolist())
    loads = []
    for number, counts, bias, losses, dropped, error in layers:
        tokens = list(map(int, islice(numbers, counts.numel())))
        values = dict(zip(losses, numbers))
        load = LayerLoad(number, tokens, values)
        if bias is not None:
            load.expert_bias_max = next(numbers)
        if dropped is not None:
            load.dropped_per_expert = list(map(int, islice(numbers, dropped.numel())))
        if error is not None:
            load.expert_bias_error = next(numbers)
        loads.append(load)
    return loads


class Meter:
    """Makes the records of steps from their results; it keeps the last steps' times to estimate the time left."""

    def __init__(self, run: Run, *, world_size: int, padded_vocab_size: int) -> None:
        self._run, self._world_size = run, world_size
        self._padded_vocab_size = padded_vocab_size
        self._recent: deque[float] = deque(maxlen=50)

    def record(
        self,
        result: StepResult,
        load: ExpertLoad,
        *,
        iteration: int,
        consumed_samples: int,
        global_batch_size: int,
        seconds: float,
        health: Health | None = None,
        epochs: Mapping[str, float] | None = None,
        params_norm: float | None = None,
        part_seconds: Mapping[str, float] | None = None,
        rank_seconds: Mapping[str, list[float]] | None = None,
    ) -> StepRecord:
        """Return one step's record; epochs: the passes over each named source so far.

        Collective over all ranks where a program has added metrics: one of them may fail on one rank alone.

        Raises:
            RunFault: on all ranks, naming the metric that failed.
        """
        # The first step also builds buffers and loads kernels: it says nothing about the others.
        if len(self._recent) == 1 and self._recent[0] > 2 * seconds:
            self._recent.clear()
        self._recent.append(seconds)
        seconds_left = fmean(self._recent) * max((self._run.training.train_iters or 0) - iteration, 0)
        flags, part_seconds = self._run.logging, part_seconds or {}
        tokens = global_batch_size * self._run.model.seq_length - result.padding
        keys = None
        if result.attended_pairs:
            keys = result.attended_pairs / tokens - 0.5  # half of each document's square, as of a sequence's
        flops_per_token = self._run.derived.flops_per_token(self._padded_vocab_size, keys)
        model_tflops = flops_per_token * tokens / seconds / self._world_size / 1e12
        mfu, timers, memory, world_size = None, {}, {}, None
        if flags.peak_tflops:
            mfu = model_tflops / flags.peak_tflops
        if flags.log_timers_to_tensorboard:
            timers = {"iteration": seconds, **part_seconds}
        if flags.log_memory_to_tensorboard:
            memory = platform.memory_statistics()
        if flags.log_world_size_to_tensorboard:
            world_size = self._world_size
        names, sums = epochs or {}, result.source_sums
        sources = {}
        for (name, passes), loss, count in zip(names.items(), sums[: len(names)], sums[len(names) :]):
            sources[name] = SourceStep(loss / count if count else None, int(count), passes)
        record = StepRecord(
            iteration=iteration,
            consumed_samples=consumed_samples,
            loss=result.loss,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            skipped=not result.committed,
            tokens=tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            model_tflops=model_tflops,
            mfu=mfu,
            tokens_per_expert=load.tokens_per_expert,
            expert_load=load.worst,
            empty_experts=load.empty,
            expert_bias_max=load.expert_bias_max,
            expert_bias_error=load.expert_bias_error,
            aux_losses=load.aux_losses,
            seconds_left=seconds_left,
            global_batch_size=global_batch_size,
            memory_bytes=platform.max_memory_bytes(),
            health=health,
            dropped_per_expert=load.dropped_per_expert,
            mtp_losses=list(result.mtp_losses),
            sources=sources,
            params_norm=params_norm,
            num_zeros=result.gradient_zeros,
            max_attention_logit=result.max_attention_logit,
            clipped_heads=result.clipped_heads,
            timers=timers,
            rank_seconds=rank_seconds or {},
            memory=memory,
            world_size=world_size,
            data_hash=result.data_hash,
            expert_bias_hash=result.expert_bias_hash,
        )
        if not added_metrics():
            return record
        facts = StepFacts(self._run, self._world_size, record, load, flops_per_token, part_seconds)
        failure = None
        try:
            record = with_added_metrics(facts)
        except MetricError as error:
            failure = error
        raise_together(failure, "; the step is applied, and not reported")
        return record


def raise_together(failure: Exception | None, then: str = "") -> None:
    """Raise the failure of any rank on all ranks; `then` ends the message. Collective over all ranks.

    Raises:
        RunFault: one rank has failed.
    """
    if max_over_ranks(failure is not None)[0]:
        for rank, reason in enumerate(all_gather_object(None if failure is None else str(failure))):
            if reason is not None:
                raise RunFault(f"{reason} (rank {rank}){then}") from failure
