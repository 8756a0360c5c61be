"""Layouts near a given one: those that the rules allow, ranked by whether they fit and by their estimated time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_moe.apps.plan.plan import Machine, layout, peak_gib, recomputed, traced
from megatron_moe.apps.plan.tracing import RankTrace
from megatron_moe.apps.plan.traffic import rank_traffic
from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.schema import Run, replace

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
# Of a device's memory, by the tensors of a run: the rest is the allocator's and the communication libraries'.
_FILLED = 0.9

_UNDIVIDED: dict[str, Any] = dict.fromkeys(
    ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
)
"""What says that a rank has one stage."""


def legal(run: Run, world_size: int) -> bool:
    """Return whether the rules allow this layout on `world_size` ranks."""
    try:
        rules.check_layout(run, world_size)
    except ConfigError:
        return False
    return True


def neighbours(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield (changed flags, run) for every single change of the layout: sizes halved and doubled, and the like."""
    sections = {**vars(run.parallel), **vars(run.training)}
    for name in (*_SIZES, "micro_batch_size"):
        size = sections[name]
        for other in (size // 2, size * 2):
            if other:
                yield f"{_flag(name)} {other}", _with_sizes(run, **{name: other})
    of_first = run.derived.pipeline_stages[0].layers
    virtual = None if run.derived.virtual_pipeline_size is None else len(of_first)
    stages = run.parallel.pipeline_model_parallel_size
    by_letters = run.parallel.pipeline_model_parallel_layout is not None
    for layers in (None, 1, 2, 4):
        if stages > 1 and layers != virtual and not by_letters:
            words = f"--num-layers-per-virtual-pipeline-stage {'none' if layers is None else layers}"
            yield words, replace(run, **{**_UNDIVIDED, "num_layers_per_virtual_pipeline_stage": layers})
    for stage, strategy in enumerate(SHARDING_STRATEGIES):
        if stage != run.derived.zero_stage:
            words = f"--data-parallel-sharding-strategy {strategy}"
            yield words, _with_stage(run, strategy)
    if run.training.recompute_granularity != "full":
        words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield words, recomputed(run, "full")
    if run.training.recompute_granularity is not None:
        yield "--recompute-granularity none", recomputed(run, "none")


def nearest_legal(run: Run, world_size: int, count: int) -> list[tuple[str, Run]]:
    """Return up to `count` legal layouts that are one change away, then two, in this order."""
    found: list[tuple[str, Run]] = []
    seen = {run}
    level = [("", run)]
    for _ in range(2):
        following = []
        for words, one in level:
            for change, other in neighbours(one):
                if other in seen:
                    continue
                seen.add(other)
                following.append((f"{words} {change}".strip(), other))
                if legal(other, world_size):
                    found.append(following[-1])
            if len(found) >= count:
                return found[:count]
        level = following
    return found


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
        other = _with_stage(run, strategy)
        if legal(other, world_size):
            found.append((peak_gib(other, world_size, machine, known), strategy, other))
            if found[-1][0] <= _FILLED * machine.memory_gib:
                break
    gib, strategy, chosen = (
        found[-1] if found[-1][0] <= _FILLED * machine.memory_gib else min(found, key=lambda x: x[0])
    )
    return {
        "strategy": strategy,
        "max_memory_gib": gib,
        "fits": gib <= _FILLED * machine.memory_gib,
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
        if gib <= _FILLED * machine.memory_gib:
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


def relative_time(run: Run, world_size: int) -> float:
    """Return the time of a step over that of one without bubble and recomputation.

    Full recomputation makes three passes four. Communication, and kernels that are slower on smaller pieces, are left
    out.
    """
    stages, chunks = run.parallel.pipeline_model_parallel_size, run.derived.virtual_pipeline_size or 1
    bubble = (stages - 1) / (chunks * run.derived.num_microbatches(world_size))
    return (1 + bubble) * (4 / 3 if run.training.recompute_granularity == "full" else 1.0)


def _with_sizes(run: Run, **sizes: int) -> Run:
    """Return `run` with other sizes and with the flags that the rules require along with them.

    Sequence parallelism is on with TP; uneven ends and layouts by letters belong to the old number of stages.
    """
    changes: dict[str, Any] = dict(sizes)
    if "tensor_model_parallel_size" in sizes:
        changes["sequence_parallel"] = sizes["tensor_model_parallel_size"] > 1
    stages = sizes.get("pipeline_model_parallel_size")
    if stages is not None:
        changes |= dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
        changes["pipeline_model_parallel_layout"] = None
        if stages == 1:
            changes |= _UNDIVIDED
        # Uneven ends where the layers do not divide: full stages, and what is left on the last.
        layers = run.model.num_layers
        if layers % stages and layers > stages:
            per_stage = -(-layers // stages)
            last = layers - per_stage * (stages - 1)
            if last < 1:
                per_stage, last = layers // stages, layers - layers // stages * (stages - 1)
            changes |= {"decoder_last_pipeline_num_layers": last, **_UNDIVIDED}
    return replace(run, **changes)


def _with_stage(run: Run, strategy: str) -> Run:
    """Return `run` with another ZeRO stage, without the flags that belong to the one it had."""
    changes: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, "use_torch_fsdp2": False}
    changes |= {"use_distributed_optimizer": False, "overlap_param_gather": False, "optimizer_cpu_offload": False}
    if strategy not in ("no_shard", "optim"):
        changes |= {"overlap_grad_reduce": False, "ddp_bucket_size": None}
    changes |= {"zero_quantized_weights": False, "zero_quantized_gradients": None, "zero_hpz_partition_size": None}
    return replace(run, **changes)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
