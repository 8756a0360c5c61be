"""What Muon adds to a step on paper: its exchange of matrices, its iteration, and the memory of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_moe.config.schema import Run
from megatron_moe.training.muon import DTYPES, update_bytes
from megatron_moe_tools.plan.buffers import Buffer
from megatron_moe_tools.plan.gathering import GatheredUnit
from megatron_moe_tools.plan.tracing import RankTrace


@dataclass(frozen=True)
class _Matrices:
    """The matrices of the dense weights or of the experts that data-parallel `ranks` orthogonalize together.

    tp_ranks: those with the other parts. elements: on a tensor-parallel rank. flops: of a step of the iteration, of a
    rank. largest: elements of the largest block, whole.
    """

    ranks: tuple[int, ...]
    tp_ranks: tuple[int, ...]
    elements: int
    flops: float
    largest: int


def _matrices(run: Run, trace: RankTrace) -> Iterator[_Matrices]:
    if run.optimizer.optimizer != "muon":
        return
    for expert, tp in (
        (False, run.parallel.tensor_model_parallel_size),
        (True, run.derived.expert_tensor_parallel_size),
    ):
        parts: tuple[Buffer | GatheredUnit, ...] = (*trace.buffers, *trace.units)
        every = [part for part in parts if part.expert == expert and part.matrices]
        if every:
            ranks = every[0].ranks
            shards = len(ranks) if trace.units else 1
            yield _Matrices(
                ranks,
                tuple(trace.ranks[:tp]),
                sum(part.matrices for part in every) * shards,
                sum(rate * count for part in every for rate, count in part.rates.items()) * shards / len(ranks),
                max(part.largest_block for part in every) * tp,
            )


def memory(run: Run, trace: RankTrace) -> int:
    """Return what Muon takes during the update: for the dense weights, or for the experts, which come after them."""
    dtype, replicated = DTYPES[run.optimizer.muon_fp32_matmul_prec], run.derived.zero_stage == 0
    wide = trace.products_in_fp32
    return max(
        (
            update_bytes(
                dtype, one.elements, one.largest, len(one.ranks), len(one.tp_ranks), replicated=replicated, wide=wide
            )
            for one in _matrices(run, trace)
        ),
        default=0,
    )


def flops(run: Run, trace: RankTrace) -> float:
    """Return the FLOPs of Muon's iteration on a rank in a step of the training; ranks have about as much to do."""
    return run.optimizer.muon_num_ns_steps * sum(one.flops for one in _matrices(run, trace))


def exchanges(run: Run, trace: RankTrace) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield what Muon exchanges in a step: ranks, and the bytes that each of them has for all, itself included.

    What a rank updates goes to the matrices' owners, and their results come back, over the data-parallel ranks and then
    over the tensor-parallel ones. Where each data-parallel rank updates all, results alone are sent there.
    """
    size = DTYPES[run.optimizer.muon_fp32_matmul_prec].itemsize
    for one in _matrices(run, trace):
        share = one.elements / len(one.ranks)
        yield one.ranks, size * (one.elements if run.derived.zero_stage == 0 else 2 * share)
        yield one.tp_ranks, size * 2 * share
