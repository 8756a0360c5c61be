"""The layouts next to one, and what a plan is asked for; refusals that need no trace. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.schema import Run, replace
from megatron_moe.platform import host

# Recomputation at its extremes and between: what the flags become.
RECOMPUTATION: dict[str, dict[str, Any]] = {
    "none": {"recompute_granularity": None},
    "selective: core_attn": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "selective: core_attn moe": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe")},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
_NO_RECOMPUTATION = dict.fromkeys(("recompute_method", "recompute_num_layers", "recompute_modules"))
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_UNDIVIDED: dict[str, Any] = dict.fromkeys(
    ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
)
"""What says that a rank has one stage."""


@dataclass(frozen=True)
class Machine:
    """The machines that the run is planned for.

    Attributes:
        device: one of host.DEVICE_KINDS.
        gpus_per_node: ranks of one machine.
        memory_gib: memory of one device.
        peak_tflops: peak of one device.
        mfu: share of the peak that the model's FLOPs are assumed to reach.
        imbalance: rows that a rank's experts get, over the mean.
        node_bandwidth, network_bandwidth: what a rank sends to its machine and to others, in GB/s.
        host_bandwidth: what a device exchanges with its machine's memory, in GB/s.
        memory_bandwidth: what a device reads or writes of its own memory, in GB/s.
        host_memory_gib: memory of one machine.
    """

    device: str = host.DEVICE_KINDS[0]
    gpus_per_node: int = 8
    memory_gib: float = 80.0
    peak_tflops: float = 989.0
    mfu: float = 0.4
    imbalance: float = 1.0
    node_bandwidth: float = 300.0
    network_bandwidth: float = 40.0
    host_bandwidth: float = 40.0
    memory_bandwidth: float = 3350.0
    host_memory_gib: float = 2000.0


def vocabulary(run: Run) -> int:
    """Return the number of rows of the embedding table.

    Raises:
        ConfigError: the run does not say how large its vocabulary is.
    """
    if run.model.vocab_size is None:
        raise ConfigError("no --vocab-size: a plan reads no tokenizer; give --vocab-size, e.g. --vocab-size 32000")
    return run.derived.padded_vocab_size(run.model.vocab_size)


def recomputed(run: Run, kind: str) -> Run:
    """Return `run` with one of the kinds of `RECOMPUTATION`."""
    return replace(run, **{**_NO_RECOMPUTATION, **RECOMPUTATION[kind]})


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
                yield f"{_flag(name)} {other}", with_sizes(run, **{name: other})
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
            yield words, with_stage(run, strategy)
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


def relative_time(run: Run, world_size: int) -> float:
    """Return the time of a step over that of one without bubble and recomputation.

    Full recomputation makes three passes four. Communication, and kernels that are slower on smaller pieces, are left
    out.
    """
    stages, chunks = run.parallel.pipeline_model_parallel_size, run.derived.virtual_pipeline_size or 1
    bubble = (stages - 1) / (chunks * run.derived.num_microbatches(world_size))
    return (1 + bubble) * (4 / 3 if run.training.recompute_granularity == "full" else 1.0)


def with_sizes(run: Run, **sizes: int) -> Run:
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


def with_stage(run: Run, strategy: str) -> Run:
    """Return `run` with another ZeRO stage, without the flags that belong to the one it had."""
    changes: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, "use_torch_fsdp2": False}
    changes |= {"use_distributed_optimizer": False, "overlap_param_gather": False, "optimizer_cpu_offload": False}
    if strategy not in ("no_shard", "optim"):
        changes |= {"overlap_grad_reduce": False, "ddp_bucket_size": None}
    changes |= {"zero_quantized_weights": False, "zero_quantized_gradients": None, "zero_hpz_partition_size": None}
    return replace(run, **changes)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
