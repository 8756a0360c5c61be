"""What a rank sends to others in a step, and how much of it leaves its machine."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_moe.config.schema import Run
from megatron_moe.model.fully_sharded import Sharding
from megatron_moe_tools.plan import orthogonalization
from megatron_moe_tools.plan.gathering import GatheredUnit
from megatron_moe_tools.plan.tracing import RankTrace

# Bytes that a rank sends over those of the whole tensor, without the factor (n - 1) / n of n ranks.
_SENT_MULTIPLES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "broadcast": 1}


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends per step, and those of them that go to another machine."""

    sent: float
    between_nodes: float


def rank_traffic(run: Run, trace: RankTrace, world_size: int, gpus_per_node: int) -> dict[str, Traffic]:
    """Return the traffic of the stage's first rank: TP, CP, EP (its all-to-all), PP, DP, expert DP and Muon, if any.

    A ring is assumed for reductions and gathers: a rank sends (n - 1) / n of the tensor to its neighbour, twice for an
    all-reduce, and a link leaves the machine where two neighbours are on different ones. An all-to-all sends each of
    the others an equal share.
    """
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(name: str, kind: str, ranks: tuple[int, ...], size: float) -> None:
        if len(ranks) > 1:
            one = sent_by_a_rank(kind, ranks, size, gpus_per_node)
            totals[name][0] += one.sent
            totals[name][1] += one.between_nodes

    micro_batches = run.derived.num_microbatches(world_size)
    for chunk in trace.chunks:
        for call in chunk.forward + chunk.backward:
            if call.kind != "broadcast":
                add(purpose(call.kind, call.ranks, trace), call.kind, call.ranks, call.bytes * micro_batches)
    for unit in trace.units:
        name = "expert DP" if unit.expert else "DP"
        for kind, ranks, size in _of_unit(run, unit, micro_batches):
            add(name, kind, ranks, size)
    for buffer in trace.buffers if not trace.units else ():
        name, size = "expert DP" if buffer.expert else "DP", buffer.numel
        if run.derived.zero_stage == 1:
            add(name, "reduce-scatter", buffer.ranks, size * buffer.gradient_bytes)
            add(name, "all-gather", buffer.ranks, size * buffer.parameter_bytes)
        else:
            add(name, "all-reduce", buffer.ranks, size * buffer.gradient_bytes)
    for ranks, size in orthogonalization.exchanges(run, trace):
        add("Muon", "all-to-all", ranks, size)
    stages = run.parallel.pipeline_model_parallel_size
    if stages > 1:
        # A stage sends gradients of what it receives, and what the next stage receives.
        arriving = [stage.receives for stage in run.derived.pipeline_stages]
        messages = sum(arriving[trace.stage :: stages]) + sum((arriving[1:] + [0])[trace.stage :: stages])
        sent = trace.boundary * micro_batches * messages
        leaves = trace.ranks[0] // gpus_per_node != (trace.ranks[0] + len(trace.ranks)) // gpus_per_node
        totals["PP"] = [sent, sent * leaves]
    return {name: Traffic(*totals[name]) for name in sorted(totals)}


def sent_by_a_rank(kind: str, ranks: tuple[int, ...], size: float, gpus_per_node: int) -> Traffic:
    """Return what one of `ranks` sends in a collective over `size` bytes."""
    if len(ranks) < 2:
        return Traffic(0.0, 0.0)
    sent = _SENT_MULTIPLES[kind] * size * (len(ranks) - 1) / len(ranks)
    return Traffic(sent, sent * _share_between_nodes(kind, ranks, gpus_per_node))


def _of_unit(run: Run, unit: GatheredUnit, micro_batches: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield what a fully sharded model sends of a unit in a step: kind, ranks, bytes of all ranks' parts together."""
    sharding, ranks, count = Sharding.from_run(run), unit.ranks, len(unit.ranks)
    plain = unit.share * unit.parameter_bytes
    rounds = sharding.quantized_weights and not unit.is_island
    row = sum(unit.segments.sizes(unit.parameter_bytes, 8)) if rounds else plain
    # Stage 2 keeps gathered weights for all micro-batches; the root's stay for the backward pass at stage 3 too.
    yield "all-gather", ranks, count * row * (1 if sharding.keep_gathered else micro_batches)
    if not sharding.keep_gathered and not unit.is_root:
        if sharding.machine is None or unit.neighbours == count:
            yield "all-gather", ranks, count * row * micro_batches
        else:
            yield "all-gather", ranks[: unit.neighbours], count * plain * micro_batches
    if sharding.gradient_bits is None or unit.is_island:
        yield "reduce-scatter", ranks, count * unit.share * 4 * micro_batches
        return
    row = sum(unit.segments.sizes(4, sharding.gradient_bits)) * micro_batches
    if not 1 < unit.neighbours < count:
        yield "all-to-all", ranks, count * row
        return
    yield "all-to-all", ranks[: unit.neighbours], count * row
    across = ranks[:: unit.neighbours]
    yield "all-to-all", across, len(across) * row


def purpose(kind: str, ranks: tuple[int, ...], trace: RankTrace) -> str:
    """Return what a collective of a pass is for: EP, TP, CP, or TP x CP."""
    if kind == "all-to-all":
        return "EP"
    return next((name for name, group in trace.groups.items() if group == ranks), "TP x CP")


@functools.cache
def _share_between_nodes(kind: str, ranks: tuple[int, ...], gpus_per_node: int) -> float:
    nodes = [rank // gpus_per_node for rank in ranks]
    if kind == "all-to-all":
        return sum(node != nodes[0] for node in nodes) / (len(nodes) - 1)
    return sum(one != other for one, other in zip(nodes, nodes[1:] + nodes[:1])) / len(nodes)
