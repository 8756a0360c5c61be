"""Layouts near a given one: those that the rules allow, ranked by whether they fit and by their estimated time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_moe.apps.plan.plan import Machine, layout, peak_gib, recomputed
from megatron_moe.apps.plan.tracing import RankTrace
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
    virtual = run.parallel.num_layers_per_virtual_pipeline_stage
    stages = run.parallel.pipeline_model_parallel_size
    for layers in (None, 1, 2, 4):
        if stages > 1 and layers != virtual:
            words = f"--num-layers-per-virtual-pipeline-stage {'none' if layers is None else layers}"
            yield words, replace(run, num_layers_per_virtual_pipeline_stage=layers)
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

    Sequence parallelism is on with TP; uneven ends and virtual stages belong to the old number of stages.
    """
    changes: dict[str, Any] = dict(sizes)
    if "tensor_model_parallel_size" in sizes:
        changes["sequence_parallel"] = sizes["tensor_model_parallel_size"] > 1
    stages = sizes.get("pipeline_model_parallel_size")
    if stages is not None:
        changes |= dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
        if stages == 1:
            changes["num_layers_per_virtual_pipeline_stage"] = None
        # Uneven ends where the layers do not divide: full stages, and what is left on the last.
        layers = run.model.num_layers
        if layers % stages and layers > stages:
            per_stage = -(-layers // stages)
            last = layers - per_stage * (stages - 1)
            if last < 1:
                per_stage, last = layers // stages, layers - layers // stages * (stages - 1)
            changes |= {"decoder_last_pipeline_num_layers": last, "num_layers_per_virtual_pipeline_stage": None}
    return replace(run, **changes)


def _with_stage(run: Run, strategy: str) -> Run:
    """Return `run` with another ZeRO stage, without the flags that belong to the one it had."""
    changes: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, "use_torch_fsdp2": False}
    changes |= {"use_distributed_optimizer": False, "overlap_param_gather": False}
    return replace(run, **changes)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
