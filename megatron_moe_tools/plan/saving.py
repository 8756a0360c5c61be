"""What a save takes of the memory of a rank and of its machine (`checkpoint/gather.py`, `checkpoint/writer.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_moe.checkpoint.gather import piece_numel
from megatron_moe.config.schema import Run
from megatron_moe_tools.plan.buffers import Buffer
from megatron_moe_tools.plan.gathering import GatheredUnit
from megatron_moe_tools.plan.tracing import RankTrace

_FP32 = 4


@dataclass(frozen=True)
class SavingMemory:
    """The memory that a save takes, in bytes; small state such as expert_bias is left out.

    Attributes:
        host_rank: host memory of the rank that takes most.
        host_node: host memory of the machine that takes most.
        kept: whether it is kept from save to save, page-locked on a GPU's machine; otherwise it is pageable and is
            freed when the step is written.
    """

    host_rank: int
    host_node: int
    kept: bool


def saving_memory(run: Run, traces: Sequence[RankTrace], gpus_per_node: int) -> SavingMemory:
    """Return the memory that a save of the whole job takes; traces of all its stages."""
    by_rank: Counter[int] = Counter()
    for trace in traces:
        for rank in trace.ranks if trace.units else ():
            by_rank[rank] += sum(_host_bytes_of_shards(run, unit) for unit in trace.units)
        for buffer in trace.buffers if not trace.units else ():
            # Data parallelism is the slowest dimension of a stage: the first ranks are the first of the groups.
            for rank in trace.ranks[: len(trace.ranks) // len(buffer.ranks)]:
                by_rank[rank] += _host_bytes(run, buffer)
            for rank in trace.ranks if run.derived.zero_stage == 1 else ():
                by_rank[rank] += _average_bytes(run, buffer.used // len(buffer.ranks))
    by_node: Counter[int] = Counter()
    for rank, size in by_rank.items():
        by_node[rank // gpus_per_node] += size
    return SavingMemory(max(by_rank.values()), max(by_node.values()), run.checkpoint.async_save)


def _host_bytes(run: Run, buffer: Buffer) -> int:
    """Return what the first rank of a buffer's group holds in host memory for a save."""
    in_background, per_element = run.checkpoint.async_save, 0
    if not run.checkpoint.no_save_optim:
        if run.derived.zero_stage == 1:
            only_matrices = run.optimizer.optimizer == "muon" and buffer.matrices == buffer.used
            per_element += (2 if only_matrices else 3) * _FP32  # main weights and moments are gathered there
        elif in_background or _unpacks(run):
            per_element += 2 * _FP32 + (_FP32 if buffer.parameter_bytes < _FP32 else 0)
    if in_background:
        per_element += buffer.parameter_bytes
    average = 0 if run.derived.zero_stage == 1 else _average_bytes(run, buffer.used)
    return buffer.used * per_element + average


def _unpacks(run: Run) -> bool:
    """Return whether moments are made fp32 tensors in host memory to be written: `training/precision_aware_adam.py`."""
    options = run.optimizer
    offloaded_muon = options.optimizer == "muon" and options.optimizer_cpu_offload and run.derived.zero_stage < 2
    return options.use_precision_aware_optimizer or offloaded_muon


def _average_bytes(run: Run, numel: int) -> int:
    """Return what a rank copies of the average of so many weights; a save that is waited for writes it as it is."""
    copied = run.checkpoint.async_save and not run.checkpoint.no_save_optim
    return run.derived.average_bytes(numel) if copied else 0


def _host_bytes_of_shards(run: Run, unit: GatheredUnit) -> int:
    """Return what a rank holds in host memory for a save of its shards: they are written where they are.

    Packed moments are unpacked there.
    """
    if not run.checkpoint.async_save:
        unpacked = _unpacks(run) and not run.checkpoint.no_save_optim
        return unit.share * 2 * _FP32 if unpacked else 0
    optimizer = 0 if run.checkpoint.no_save_optim else 2 * _FP32 + (_FP32 if unit.parameter_bytes < _FP32 else 0)
    return unit.share * (unit.parameter_bytes + optimizer) + _average_bytes(run, unit.share)


def gathering_bytes(run: Run, trace: RankTrace) -> int:
    """Return what a save takes on the device of the rank that gathers: two pieces received and two sent."""
    if run.checkpoint.save is None or run.checkpoint.no_save_optim or run.derived.zero_stage != 1:
        return 0
    taken = [0]
    for buffer in trace.buffers:
        size = len(buffer.ranks)
        if size > 1:
            taken.append(2 * _FP32 * (size + 1) * piece_numel(buffer.numel // size, size))
    return max(taken)
