"""Plan a run without its ranks: parameters, memory, traffic, FLOPs and speed of every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe_tools.plan import orthogonalization
from megatron_moe_tools.plan.neighbours import Machine, vocabulary
from megatron_moe_tools.plan.saving import gathering_bytes, saving_memory
from megatron_moe_tools.plan.tracing import RankTrace, trace_ranks
from megatron_moe_tools.plan.traffic import rank_traffic

GIB = 2**30
# Memory.


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of a rank, in bytes.

    Attributes:
        weights: the engine's parameter buffers, padding included; the fp32 shards of a fully sharded model, which are
            its masters too.
        gradients: the engine's gradient buffers, padding included.
        optimizer: masters and moments.
        activations: peak above these three during the forward and backward passes of a step, with the weights that a
            fully sharded model gathers.
        in_flight: micro-batches (of one chunk each) that wait for their backward pass at once.
        logits: peak of the logits in one micro-batch, part of the activations.
        dispatch: peak of the dispatch buffers in one micro-batch, part of the activations.
        update: peak above weights, gradients and optimizer during the update, when the activations are freed.
        saving: what `--save` takes on the device, between steps.
        host: moments in a device's host memory, with `--optimizer-cpu-offload`; from ZeRO's stage 2 on main weights
            and gradients, too.
        host_activations: activations there, of all micro-batches in flight.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int
    logits: int
    dispatch: int
    update: int
    saving: int
    host: int = 0
    host_activations: int = 0

    @property
    def peak(self) -> int:
        """The peak of all parts together."""
        return self.weights + self.gradients + self.optimizer + max(self.activations, self.update, self.saving)


def rank_memory(run: Run, trace: RankTrace, world_size: int) -> PlannedMemory:
    """Return the memory of a rank, for the data-parallel rank that holds most of the optimizer."""
    if trace.units:
        return _sharded_memory(run, trace, world_size)
    optimizer = update = host = 0
    for buffer in trace.buffers:
        share = buffer.numel // len(buffer.ranks) if run.derived.zero_stage == 1 else buffer.used
        matrices = buffer.fewest_matrices if run.derived.zero_stage == 1 else buffer.matrices
        masters = run.derived.main_weight_bytes(share, buffer.parameter_bytes)
        moments = run.derived.moment_bytes(share, matrices)
        if trace.offloaded and run.derived.packs_main_weights:
            masters, moments = 0, moments + masters  # the rests are with the moments
        moments += run.derived.average_bytes(share)  # is where they are
        optimizer += masters + (0 if trace.offloaded else moments)
        host += moments if trace.offloaded else 0
        update += share * 4 if buffer.gradient_bytes < 4 else 0  # gradients are widened for the update
    flight = _in_flight(run, trace, run.derived.num_microbatches(world_size))
    return PlannedMemory(
        weights=trace.weights,
        gradients=sum(buffer.numel * buffer.gradient_bytes for buffer in trace.buffers),
        optimizer=optimizer,
        activations=flight.peak,
        in_flight=flight.most_waiting,
        logits=max(chunk.logits for chunk in trace.chunks),
        dispatch=max(chunk.dispatch for chunk in trace.chunks),
        update=update + orthogonalization.memory(run, trace),
        saving=gathering_bytes(run, trace),
        host=host,
        host_activations=flight.host,
    )


def _sharded_memory(run: Run, trace: RankTrace, world_size: int) -> PlannedMemory:
    """Return the memory of a rank of a fully sharded model; what it gathers and reduces is among the activations."""
    shards, matrices = sum(unit.share for unit in trace.units), sum(unit.matrices for unit in trace.units)
    on_device = 0 if trace.offloaded else shards
    in_host_memory = shards - on_device
    moments = run.derived.moment_bytes(shards, matrices) + run.derived.average_bytes(shards)
    micro_batches = run.derived.num_microbatches(world_size)
    flight = _in_flight(run, trace, micro_batches)
    return PlannedMemory(
        weights=4 * on_device,
        gradients=4 * on_device,
        optimizer=0 if trace.offloaded else moments,
        host=8 * in_host_memory + (moments if trace.offloaded else 0),
        # Of one micro-batch alone the gradients come about during its backward pass.
        activations=flight.peak if micro_batches > 1 else max(flight.peak - 4 * on_device, 0),
        in_flight=flight.most_waiting,
        host_activations=flight.host,
        logits=max(chunk.logits for chunk in trace.chunks),
        dispatch=max(chunk.dispatch for chunk in trace.chunks),
        update=orthogonalization.memory(run, trace),
        saving=0,
    )


@dataclass(frozen=True)
class _InFlight:
    """The peak bytes of activations on the device and in host memory, and the most passes that wait at a time."""

    peak: int
    host: int
    most_waiting: int


ROUNDS = 3
"""Rounds of `stages` micro-batches after which nothing new waits: fewer than (chunks + 1) x stages forward passes go
ahead, then the passes repeat themselves every chunks x stages."""


def _in_flight(run: Run, trace: RankTrace, micro_batches: int) -> _InFlight:
    """Follow the schedule's passes, each of which keeps something until its backward pass."""
    stages = run.parallel.pipeline_model_parallel_size
    live = peak = host = most_host = most_waiting = 0
    ahead = run.moe.overlap_moe_expert_parallel_comm
    waiting: list[int] = []  # the chunks of the passes, in their order; of a chunk, the first comes back first
    leaving = 0  # what the last forward pass has not yet freed, while it waits
    passes = schedule(len(trace.chunks), stages, trace.stage, min(micro_batches, ROUNDS * stages), ahead)
    for is_forward, number in passes:
        chunk = trace.chunks[number]
        if is_forward:
            peak = max(peak, live + chunk.forward_peak)
            live, host, leaving = live + chunk.kept, host + chunk.moved, chunk.leaving
            waiting.append(number)
        else:
            place = waiting.index(number)
            if place == len(waiting) - 1:
                leaving = 0  # its own, which is in its peak
            del waiting[place]
            live -= chunk.kept
            peak = max(peak, live + leaving + chunk.backward_peak)
            host -= chunk.moved
        most_host, most_waiting = max(most_host, host), max(most_waiting, len(waiting))
    return _InFlight(peak, most_host, most_waiting)


def schedule(
    chunks: int, stages: int, stage: int, micro_batches: int, ahead: bool = False
) -> Iterator[tuple[bool, int]]:
    """Yield the passes of one stage in the engine's order: (is it a forward pass, of which chunk).

    With one chunk per stage there are as many forward passes as stages follow, then one forward and one backward pass
    in turn. With several, `stages` micro-batches at a time go through the chunks. With `ahead` there is one more
    forward pass first, so that a forward and a backward pass that run at a time do not wait for one another.
    """
    total = chunks * micro_batches
    warm_up = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm_up = min(warm_up + ahead, total)

    def chunk(index: int) -> int:
        return index % (stages * chunks) // stages

    for index in range(total + warm_up):
        if index < total:
            yield True, chunk(index)
        if index >= warm_up:
            yield False, chunks - 1 - chunk(index - warm_up)


def bubble_share(chunks: int, stages: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage waits, (PP - 1) / (VPP x micro-batches + PP - 1).

    All passes are assumed to take equally long.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


# The plan.


def traced(
    run: Run,
    world_size: int,
    machine: Machine,
    known: dict[Any, RankTrace] | None = None,
    stages: Sequence[int] | None = None,
) -> list[RankTrace]:
    """Return the traces of a layout on such machines. `known` and `stages`: see `trace_ranks`."""
    return trace_ranks(
        run,
        world_size,
        vocabulary(run),
        device=machine.device,
        imbalance=machine.imbalance,
        gpus_per_node=machine.gpus_per_node,
        stages=stages,
        known=known,
    )


def make_plan(run: Run, world_size: int, machine: Machine, known: dict[Any, RankTrace] | None = None) -> dict[str, Any]:
    """Return the plan of a layout as plain data (bytes, unless a key says otherwise).

    Args:
        run: a run that has passed the rules for `world_size` ranks.
        world_size: number of ranks.
        machine: what it is to run on.
        known: see `trace_ranks`.
    """
    size = vocabulary(run)
    traces = traced(run, world_size, machine, known)
    whole: dict[str, int] = {}
    for trace in traces:
        whole |= trace.whole
    micro_batches, stages = run.derived.num_microbatches(world_size), len(traces)
    per_token = run.derived.flops_per_token(size)
    ranks = [_rank(run, trace, world_size, machine) for trace in traces]
    computed = sum(sum(chunk.flops for chunk in trace.chunks) for trace in traces)
    per_stage = world_size // stages
    in_job = computed * micro_batches * per_stage
    tokens = run.derived.global_batch_size(world_size) * run.model.seq_length
    of_muon = max(orthogonalization.flops(run, trace) for trace in traces)
    return {
        "world_size": world_size,
        "layout": layout(run, world_size),
        "total_params": sum(whole.values()),
        "active_params": run.derived.active_parameter_count(size),
        "max_memory_gib": max(rank["memory"]["peak"] for rank in ranks) / GIB,
        "device_memory_gib": machine.memory_gib,
        "saving": vars(saving_memory(run, traces, machine.gpus_per_node)),
        "imbalance": machine.imbalance,
        "ranks": ranks,
        "model_flops_per_token": per_token,
        "computed_flops_per_token": in_job / tokens,
        "bubble_share": bubble_share(len(traces[0].chunks), stages, micro_batches),
        "micro_batches": micro_batches,
        "global_batch_size": run.derived.global_batch_size(world_size),
        **_speed(run, machine, tokens, tokens * per_token / world_size, of_muon),
    }


def _speed(run: Run, machine: Machine, tokens: int, of_model: float, of_muon: float) -> dict[str, float | None]:
    """Return the speed of steps of `tokens` by a rank's FLOPs, the model's and Muon's; None for an unknown peak."""
    known = machine.device != "cpu" or run.logging.peak_tflops is not None
    seconds = (of_model + of_muon) / (machine.mfu * machine.peak_tflops * 1e12)
    return {
        "mfu": machine.mfu,
        "peak_tflops": machine.peak_tflops if known else None,
        "tokens_per_second": tokens / seconds if known else None,
        "seconds_per_step": seconds if known else None,
        "muon_share": of_muon / (of_model + of_muon),
    }


def _rank(run: Run, trace: RankTrace, world_size: int, machine: Machine) -> dict[str, Any]:
    memory = rank_memory(run, trace, world_size)
    return {
        "stage": trace.stage,
        "ranks": [trace.ranks[0], trace.ranks[-1]],
        "layers": list(trace.layers),
        "dense_params": trace.dense,
        "expert_params": trace.expert,
        "params": trace.dense + trace.expert,
        "memory": {**vars(memory), "peak": memory.peak},
        "traffic": {
            name: vars(one) for name, one in rank_traffic(run, trace, world_size, machine.gpus_per_node).items()
        },
        "flops_per_micro_batch": sum(chunk.flops for chunk in trace.chunks),
    }


def peak_gib(
    run: Run,
    world_size: int,
    machine: Machine,
    known: dict[Any, RankTrace],
    imbalance: float | None = None,
) -> float:
    """Return the largest peak memory of a rank, in GiB.

    The stages that can be the largest are traced: the first two and the last, all of a layout by letters.
    `known`: see `trace_ranks`.
    """
    stages = run.parallel.pipeline_model_parallel_size
    some = sorted({0, min(1, stages - 1), stages - 1})
    if run.parallel.pipeline_model_parallel_layout is not None:
        some = list(range(stages))
    on = machine if imbalance is None else dataclasses.replace(machine, imbalance=imbalance)
    traces = traced(run, world_size, on, known, some)
    return max(rank_memory(run, trace, world_size).peak for trace in traces) / GIB


def layout(run: Run, world_size: int) -> dict[str, Any]:
    """Return the sizes of the layout, micro-batch size and recomputation."""
    p = run.parallel
    offloaded = run.training.offload_modules if run.training.fine_grained_activation_offloading else None
    return {
        "TP": p.tensor_model_parallel_size,
        "PP": p.pipeline_model_parallel_size,
        "VPP": run.derived.virtual_pipeline_size or 1,
        "CP": p.context_parallel_size,
        "EP": p.expert_model_parallel_size,
        "ETP": run.derived.expert_tensor_parallel_size,
        "DP": run.derived.data_parallel_size(world_size),
        "EDP": run.derived.expert_data_parallel_size(world_size),
        "micro_batch_size": run.training.micro_batch_size,
        "recompute": _recompute_words(run.training.recompute_granularity, run.training.recompute_modules),
        **({"offload": " ".join(offloaded)} if offloaded else {}),
    }


def _recompute_words(granularity: str | None, modules: Sequence[str] | None) -> str:
    if granularity == "selective":
        return "selective: " + " ".join(modules or ("core_attn",))
    return granularity or "none"
