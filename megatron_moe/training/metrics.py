"""From what a step did to what is told about it: rates, FLOPs, expert load, time left."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_moe import platform
from megatron_moe.config import derived
from megatron_moe.config.schema import Run
from megatron_moe.report.records import Health, StepRecord, load_max_over_mean
from megatron_moe.training.finalize_model_grads import RouterUpdate
from megatron_moe.training.step import StepResult

_TERA = 1e12


@dataclass(frozen=True)
class ExpertLoad:
    """The routers of the whole model in one step: per MoE layer its E counts, over all ranks."""

    tokens_per_expert: dict[int, list[int]]
    expert_bias_max: float | None
    aux_losses: dict[str, float]
    dropped_per_expert: dict[int, list[int]] = field(default_factory=dict)
    """Beside tokens_per_expert, of the layers whose experts have a capacity: the choices beyond it."""

    @property
    def worst(self) -> float | None:
        """max / mean of the most uneven layer."""
        loads = [load_max_over_mean(counts) for counts in self.tokens_per_expert.values()]
        return max((load for load in loads if load is not None), default=None)

    @property
    def empty(self) -> int:
        """(layer, expert) pairs without a token."""
        return sum(counts.count(0) for counts in self.tokens_per_expert.values())


NO_EXPERT_LOAD = ExpertLoad({}, None, {})


def expert_load(update: RouterUpdate, pg_collection: ProcessGroupCollection) -> ExpertLoad:
    """Gather the routers of all pipeline stages. Collective over the pipeline group where there is one.

    aux_losses are means over the layers that have the loss.
    """
    local = [
        (layer, counts.tolist(), None if bias is None else float(bias.abs().max()), _floats(losses), _list(dropped))
        for layer, counts, bias, losses, dropped in zip(
            update.layer_numbers,
            update.tokens_per_expert,
            update.expert_bias,
            update.aux_losses,
            update.dropped_per_expert,
        )
    ]
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


def _list(counts: torch.Tensor | None) -> list[int] | None:
    return None if counts is None else counts.tolist()


def _floats(losses: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in losses.items()}


class Meter:
    """Turns step results into records; remembers the last steps' times for the time left."""

    def __init__(self, run: Run, *, world_size: int, padded_vocab_size: int) -> None:
        self._run = run
        self._world_size = world_size
        self._flops_per_token = derived.flops_per_token(run, padded_vocab_size)
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
    ) -> StepRecord:
        """One step's record. Rates are those of the whole job, FLOPs those of one device."""
        tokens = global_batch_size * self._run.model.seq_length
        # The first step also builds buffers and loads kernels: it says nothing about the others.
        if len(self._recent) == 1 and self._recent[0] > 2 * seconds:
            self._recent.clear()
        self._recent.append(seconds)
        per_step = sum(self._recent) / len(self._recent)
        tflops = self._flops_per_token * tokens / seconds / self._world_size / _TERA
        peak = self._run.logging.peak_tflops
        return StepRecord(
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
            model_tflops=tflops,
            mfu=tflops / peak if peak else None,
            tokens_per_expert=load.tokens_per_expert,
            expert_load=load.worst,
            empty_experts=load.empty,
            expert_bias_max=load.expert_bias_max,
            aux_losses=load.aux_losses,
            seconds_left=per_step * max((self._run.training.train_iters or 0) - iteration, 0),
            global_batch_size=global_batch_size,
            memory_bytes=platform.max_memory_bytes(),
            health=health,
            dropped_per_expert=load.dropped_per_expert,
            mtp_losses=list(result.mtp_losses),
            data_hash=result.data_hash,
            expert_bias_hash=result.expert_bias_hash,
        )
