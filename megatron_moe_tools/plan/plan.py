"""Plan a run without its ranks: parameters, memory, traffic, FLOPs and speed of every rank, and layouts nearby."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.schema import Run, replace
from megatron_moe_tools.plan.layouts import (
    GIB,
    Machine,
    legal,
    nearby_layouts,
    relative_time,
    vocabulary,
    with_stage,
)
from megatron_moe_tools.plan.rank_costs import (
    bubble_share,
    muon_flops,
    rank_memory,
    rank_traffic,
    saving_memory,
)
from megatron_moe_tools.plan.tracing import RankTrace, trace_ranks


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
    of_muon = max(muon_flops(run, trace) for trace in traces)
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
    recompute = run.training.recompute_granularity or "none"
    if recompute == "selective":
        recompute += ": " + " ".join(run.training.recompute_modules or ("core_attn",))
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
        "recompute": recompute,
        **({"offload": " ".join(offloaded)} if offloaded else {}),
    }


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
    for words, other in nearby_layouts(run):
        if not legal(other, world_size):
            continue
        gib = peak_gib(other, world_size, machine, known)
        row = {"change": words, "layout": layout(other, world_size), "max_memory_gib": gib}
        row |= {"fits": gib <= machine.memory_gib, "relative_time": relative_time(other, world_size)}
        rows.append(row)
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
    limit, least = FILLED * machine.memory_gib, float("inf")
    for strategy in SHARDING_STRATEGIES[min(shared - 1, 1) :]:
        other = with_stage(run, strategy)
        if least <= limit or not legal(other, world_size):
            continue
        gib = peak_gib(other, world_size, machine, known)
        if gib < least:
            least, chosen, its_strategy = gib, other, strategy
    return {
        "strategy": its_strategy,
        "max_memory_gib": least,
        "fits": least <= limit,
        "between_nodes": _between_nodes(chosen, world_size, machine, known),
        **_with_switches(chosen, world_size, machine, known),
    }


def _with_switches(run: Run, world_size: int, machine: Machine, known: dict[Any, RankTrace]) -> dict[str, Any]:
    """Return the flags of ZeRO++ that fit, and what they leave of the traffic; none if it stays on one machine."""
    if run.derived.zero_stage < 2 or not _between_nodes(run, world_size, machine, known):
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
            if partition is not None:
                words.append(f"--zero-hpz-partition-size {partition}")
            return {
                "switches": words,
                "between_nodes_with_switches": _between_nodes(other, world_size, machine, known),
                "max_memory_gib_with_switches": gib,
            }
    return {"switches": []}


def _between_nodes(run: Run, world_size: int, machine: Machine, known: dict[Any, RankTrace]) -> float:
    """Return the most bytes that a rank sends to other machines in a step for data parallelism."""
    traces = traced(run, world_size, machine, known)
    sent = (rank_traffic(run, trace, world_size, machine.gpus_per_node) for trace in traces)
    return max(sum(one[name].between_nodes for name in ("DP", "expert DP") if name in one) for one in sent)
