"""Bytes that one rank sends in a step, by what for, and how much of it leaves the machine."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_moe.config import derived
from megatron_moe.config.schema import Run
from megatron_moe.planning.tracing import RankTrace

# Bytes a rank sends, over those of the whole tensor and without the factor (n - 1) / n of n ranks.
_TRIPS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "broadcast": 1}


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends per step, and those of them that go to another machine."""

    sent: float
    between_nodes: float


def rank_traffic(run: Run, trace: RankTrace, world_size: int, gpus_per_node: int) -> dict[str, Traffic]:
    """Traffic of the stage's first rank: TP, CP, EP (its all-to-all), PP, DP and expert DP, where there is any.

    A ring is assumed for reductions and gathers: a rank sends (n - 1) / n of the tensor to its neighbour, twice for an
    all-reduce, and as many of the ring's links leave the machine as neighbours live on different ones. An all-to-all
    sends each of the others an equal share.
    """
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(name: str, kind: str, ranks: tuple[int, ...], size: float) -> None:
        if len(ranks) > 1:
            sent = _TRIPS[kind] * size * (len(ranks) - 1) / len(ranks)
            totals[name][0] += sent
            totals[name][1] += sent * _share_between_nodes(kind, ranks, gpus_per_node)

    micro_batches = derived.num_microbatches(run, world_size)
    for chunk in trace.chunks:
        for call in chunk.forward + chunk.backward:
            if call.kind != "broadcast":
                add(_purpose(call.kind, call.ranks, trace), call.kind, call.ranks, call.bytes * micro_batches)
    for buffer in trace.buffers:
        name, size = "expert DP" if buffer.expert else "DP", buffer.numel
        if run.optimizer.use_distributed_optimizer:
            add(name, "reduce-scatter", buffer.ranks, size * buffer.gradient_bytes)
            add(name, "all-gather", buffer.ranks, size * buffer.parameter_bytes)
        else:
            add(name, "all-reduce", buffer.ranks, size * buffer.gradient_bytes)
    stages = run.parallel.pipeline_model_parallel_size
    if stages > 1:
        ends = (trace.stage == stages - 1) + (trace.stage == 0)
        sent = trace.boundary * micro_batches * (2 * len(trace.chunks) - ends)
        leaves = trace.ranks[0] // gpus_per_node != (trace.ranks[0] + len(trace.ranks)) // gpus_per_node
        totals["PP"] = [sent, sent * leaves]
    return {name: Traffic(*totals[name]) for name in sorted(totals)}


def _purpose(kind: str, ranks: tuple[int, ...], trace: RankTrace) -> str:
    if kind == "all-to-all":
        return "EP"
    return next((name for name, group in trace.groups.items() if group == ranks), "TP x CP")


def _share_between_nodes(kind: str, ranks: tuple[int, ...], gpus_per_node: int) -> float:
    nodes = [rank // gpus_per_node for rank in ranks]
    if kind == "all-to-all":
        return sum(node != nodes[0] for node in nodes) / (len(nodes) - 1)
    return sum(one != other for one, other in zip(nodes, nodes[1:] + nodes[:1])) / len(nodes)
