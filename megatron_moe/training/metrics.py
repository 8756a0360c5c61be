"""The facts of a step that its metrics are computed from: expert load over all stages, times, FLOPs, time left."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_moe import platform
from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run
from megatron_moe.report.health import Health
from megatron_moe.report.metric import ExpertLoad, MetricError, StepFacts, added_metrics, with_added_metrics
from megatron_moe.report.records import StepRecord
from megatron_moe.training.finalize_model_grads import RouterUpdate
from megatron_moe.training.step import StepResult

NO_EXPERT_LOAD = ExpertLoad({}, None, {})


def expert_load(update: RouterUpdate, pg_collection: ProcessGroupCollection) -> ExpertLoad:
    """Gather the load of all pipeline stages' routers. Collective over the pipeline group where there is one.

    aux_losses are means over the layers that have the loss.
    """
    local = _layer_loads(update)
    layers = local
    if pg_collection.pp.size() > 1:
        gathered: list[Any] = [None] * pg_collection.pp.size()
        torch.distributed.all_gather_object(gathered, local, group=pg_collection.pp)
        layers = [layer for stage in gathered for layer in stage]
    layers.sort(key=lambda layer: layer[0])
    biases = [bias for _, _, bias, *_ in layers if bias is not None]
    names = sorted({name for *_, losses, _ in layers for name in losses})
    means = {}
    for name in names:
        values = [losses[name] for *_, losses, _ in layers if name in losses]
        means[name] = sum(values) / len(values)
    return ExpertLoad(
        {number: counts for number, counts, *_ in layers},
        max(biases, default=None),
        means,
        {number: dropped for number, *_, dropped in layers if dropped is not None},
    )


LayerLoad = tuple[int, list[int], float | None, dict[str, float], list[int] | None]
"""Of a layer: number, tokens per expert, largest bias, auxiliary losses, dropped choices per expert."""


def _layer_loads(update: RouterUpdate) -> list[LayerLoad]:
    """Return the load of each layer of this rank, with one read from the device."""
    pieces: list[torch.Tensor] = []
    for counts, bias, losses, dropped in zip(
        update.tokens_per_expert, update.expert_bias, update.aux_losses, update.dropped_per_expert
    ):
        pieces += [counts, *([] if bias is None else [bias.abs().max()]), *losses.values()]
        pieces += [] if dropped is None else [dropped]
    if not pieces:
        return []
    # fp64 has every count up to 2^53.
    numbers = iter(torch.cat([piece.double().flatten() for piece in pieces]).tolist())

    def whole(like: torch.Tensor) -> list[int]:
        return [int(number) for number in islice(numbers, like.numel())]

    layers: list[LayerLoad] = []
    for layer, counts, bias, losses, dropped in zip(
        update.layer_numbers, update.tokens_per_expert, update.expert_bias, update.aux_losses, update.dropped_per_expert
    ):
        load, largest = whole(counts), None if bias is None else next(numbers)
        values = {name: next(numbers) for name in losses}
        layers.append((layer, load, largest, values, None if dropped is None else whole(dropped)))
    return layers


class Meter:
    """Makes the records of steps from their results; it keeps the last steps' times to estimate the time left."""

    def __init__(self, run: Run, *, world_size: int, padded_vocab_size: int) -> None:
        self._run = run
        self._world_size = world_size
        self._flops_per_token = run.derived.flops_per_token(padded_vocab_size)
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
        params_norm: float | None = None,
        part_seconds: Mapping[str, float] | None = None,
    ) -> StepRecord:
        """Return one step's record.

        Raises:
            MetricError: a metric failed.
        """
        # The first step also builds buffers and loads kernels: it says nothing about the others.
        if len(self._recent) == 1 and self._recent[0] > 2 * seconds:
            self._recent.clear()
        self._recent.append(seconds)
        seconds_left = fmean(self._recent) * max((self._run.training.train_iters or 0) - iteration, 0)
        flags, part_seconds = self._run.logging, part_seconds or {}
        tokens = global_batch_size * self._run.model.seq_length
        model_tflops = self._flops_per_token * tokens / seconds / self._world_size / 1e12
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
            mfu=model_tflops / flags.peak_tflops if flags.peak_tflops else None,
            tokens_per_expert=load.tokens_per_expert,
            expert_load=load.worst,
            empty_experts=load.empty,
            expert_bias_max=load.expert_bias_max,
            aux_losses=load.aux_losses,
            seconds_left=seconds_left,
            global_batch_size=global_batch_size,
            memory_bytes=platform.max_memory_bytes(),
            health=health,
            dropped_per_expert=load.dropped_per_expert,
            mtp_losses=list(result.mtp_losses),
            params_norm=params_norm,
            num_zeros=result.gradient_zeros,
            max_attention_logit=result.max_attention_logit,
            clipped_heads=result.clipped_heads,
            timers={"iteration": seconds, **part_seconds} if flags.log_timers_to_tensorboard else {},
            memory=platform.memory_statistics() if flags.log_memory_to_tensorboard else {},
            world_size=self._world_size if flags.log_world_size_to_tensorboard else None,
            data_hash=result.data_hash,
            expert_bias_hash=result.expert_bias_hash,
        )
        facts = StepFacts(self._run, self._world_size, record, load, self._flops_per_token, part_seconds)
        return with_added_metrics(facts)


def agreed_record(meter: Meter, result: StepResult, load: ExpertLoad, **numbers: Any) -> StepRecord:
    """Return `meter.record(...)`, where every rank could compute it.

    Collective over all ranks where a program has added metrics: one of them may fail on one rank alone.

    Raises:
        RunFault: on all ranks, naming the metric.
    """
    record, failure = None, None
    try:
        record = meter.record(result, load, **numbers)
    except MetricError as error:
        failure = error
    if added_metrics():
        raise_together(failure, "; the step is applied, and not reported")
    if record is None:
        assert failure is not None
        raise failure
    return record


def raise_together(failure: Exception | None, then: str = "") -> None:
    """Raise the failure of any rank on all ranks; `then` ends the message. Collective over all ranks.

    Raises:
        RunFault: one rank has failed.
    """
    failed = torch.tensor([failure is not None], dtype=torch.int32, device=platform.device())
    torch.distributed.all_reduce(failed, op=torch.distributed.ReduceOp.MAX)
    if not failed.item():
        return
    reasons: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, None if failure is None else str(failure))
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
    raise RunFault(f"{reason} (rank {rank}){then}") from failure
