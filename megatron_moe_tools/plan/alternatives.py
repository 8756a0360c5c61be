"""Layouts near a given one: those that the rules allow, ranked by whether they fit and by their estimated time."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.schema import Run, replace
from megatron_moe_tools.plan.neighbours import (
    Machine,
    legal,
    neighbours,
    relative_time,
    with_stage,
)
from megatron_moe_tools.plan.plan import layout, peak_gib, traced
from megatron_moe_tools.plan.tracing import RankTrace
from megatron_moe_tools.plan.traffic import rank_traffic

# Of a device's memory, by the tensors of a run: the rest is the allocator's and the communication libraries'.
FILLED = 0.9


def ranked(
    run: Run, world_size: int, machine: Machine, count: int, known: dict[Any, RankTrace]
) -> list[dict[str, Any]]:
    """Return up to `count` legal layouts one change away, the most promising first. `known`: see `trace_ranks`.

    Those that fit the device come before those that do not, then a smaller estimated time (less recomputation, a
    smaller bubble), then a smaller memory.
    """
    rows: list[dict[str, Any]] = []
    for words, other in neighbours(run):
        if legal(other, world_size):
            gib = peak_gib(other, world_size, machine, known)
            rows.append(
                {
                    "change": words,
                    "layout": layout(other, world_size),
                    "max_memory_gib": gib,
                    "fits": gib <= machine.memory_gib,
                    "relative_time": relative_time(other, world_size),
                }
            )
    rows.sort(key=lambda row: (not row["fits"], round(row["relative_time"], 3), row["max_memory_gib"]))
    return rows[:count]


def recommended_stage(run: Run, world_size: int, machine: Machine, known: dict[Any, RankTrace]) -> dict[str, Any]:
    """Return the lowest ZeRO stage whose peak leaves a tenth of the device free, or the one that takes least.

    The allocator and the communication libraries need the tenth. A higher stage sends more. Stage 0 is looked at where
    there is nothing to share: stage 1 takes less and sends less. `known`: see `trace_ranks`.

    Returns:
        strategy, max_memory_gib, fits, between_nodes (bytes that a rank sends to other machines in a step); switches:
        flags of ZeRO++ that send less of it, with between_nodes_with_switches and max_memory_gib_with_switches.
    """
    shared = run.derived.data_parallel_size(world_size) * run.parallel.context_parallel_size
    found: list[tuple[float, str, Run]] = []
    for strategy in SHARDING_STRATEGIES[min(shared - 1, 1) :]:
        other = with_stage(run, strategy)
        if legal(other, world_size):
            found.append((peak_gib(other, world_size, machine, known), strategy, other))
            if found[-1][0] <= FILLED * machine.memory_gib:
                break
    gib, strategy, chosen = found[-1] if found[-1][0] <= FILLED * machine.memory_gib else min(found, key=lambda x: x[0])
    return {
        "strategy": strategy,
        "max_memory_gib": gib,
        "fits": gib <= FILLED * machine.memory_gib,
        "between_nodes": _between_nodes(chosen, world_size, machine, known),
        **_with_switches(chosen, world_size, machine, known),
    }


def _with_switches(run: Run, world_size: int, machine: Machine, known: dict[Any, RankTrace]) -> dict[str, Any]:
    """Return the flags of ZeRO++ that fit, and what they leave of the traffic; none if it stays on one machine."""
    between = _between_nodes(run, world_size, machine, known) if run.derived.zero_stage >= 2 else 0.0
    if not between:
        return {"switches": []}
    size = machine.gpus_per_node // run.parallel.tensor_model_parallel_size
    for partition in (size, None) if size > 1 else (None,):
        other = replace(
            run, zero_quantized_weights=True, zero_quantized_gradients="int8", zero_hpz_partition_size=partition
        )
        if not legal(other, world_size):
            continue
        gib = peak_gib(other, world_size, machine, known)
        if gib <= FILLED * machine.memory_gib:
            words = ["--zero-quantized-weights", "--zero-quantized-gradients int8"]
            return {
                "switches": words + ([] if partition is None else [f"--zero-hpz-partition-size {partition}"]),
                "between_nodes_with_switches": _between_nodes(other, world_size, machine, known),
                "max_memory_gib_with_switches": gib,
            }
    return {"switches": []}


def _between_nodes(run: Run, world_size: int, machine: Machine, known: dict[Any, RankTrace]) -> float:
    """Return the most bytes that a rank sends to other machines in a step for data parallelism."""
    traces = traced(run, world_size, machine, known)
    sent = (rank_traffic(run, trace, world_size, machine.gpus_per_node) for trace in traces)
    return max(sum(one[name].between_nodes for name in ("DP", "expert DP") if name in one) for one in sent)
