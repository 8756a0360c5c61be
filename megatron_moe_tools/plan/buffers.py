"""The engine's flat gradient buffers on paper: their elements, and those that Muon updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Rates = Mapping[float, int]
"""FLOPs of a step of Muon's iteration over the elements of a matrix -> how many elements have as many."""


@dataclass(frozen=True)
class Buffer:
    """A flat gradient buffer of the engine: elements with and without padding, and the ranks it is reduced over.

    rates: of what Muon updates. fewest_matrices: elements that Muon updates on the rank that has fewest of them, where
    each updates a part. largest_block: of the largest that it updates at once, on a tensor-parallel rank.
    """

    numel: int
    used: int
    rates: Rates
    fewest_matrices: int
    largest_block: int
    parameter_bytes: int
    gradient_bytes: int
    ranks: tuple[int, ...]
    expert: bool

    @property
    def matrices(self) -> int:
        """Elements that Muon updates."""
        return sum(self.rates.values())


def rates_of(weights: Iterable[tuple[Any, int]]) -> Rates:
    """Return the rates of what Muon updates, of weights that `mark_matrices` has seen, each with its elements."""
    found: Counter[float] = Counter()
    for weight, numel in weights:
        if hasattr(weight, "orthogonalized"):
            found[weight.iteration_flops] += numel
    return found


def buffers_of(chunks: Sequence[Any]) -> Iterator[Buffer]:
    """Yield the gradient buffers of wrapped chunks."""
    for chunk in chunks:
        for expert, buffers in ((False, chunk.buffers), (True, chunk.expert_parallel_buffers)):
            for one in buffers:
                yield Buffer(
                    numel=one.numel,
                    used=one.numel_unpadded,
                    rates=rates_of((weight, weight.numel()) for weight in one.param_index_map),
                    fewest_matrices=_fewest_matrices(one),
                    largest_block=max((getattr(p, "orthogonalized", 0) for p in one.param_index_map), default=0),
                    parameter_bytes=one.param_dtype.itemsize,
                    gradient_bytes=one.grad_dtype.itemsize,
                    ranks=tuple(torch.distributed.get_process_group_ranks(one.data_parallel_group)),
                    expert=expert,
                )


def _fewest_matrices(buffer: Any) -> int:
    """Return the elements that Muon updates on the rank that has fewest, where each bucket is cut among the ranks."""
    ranks = buffer.data_parallel_group.size()
    found = [0] * ranks
    for parameter, (start, end, number) in buffer.param_index_map.items():
        if hasattr(parameter, "orthogonalized"):
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // ranks
            start, end = start - bucket.offset, end - bucket.offset
            for rank in range(start // share, -(-end // share)):
                found[rank] += min(end, (rank + 1) * share) - max(start, rank * share)
    return min(found)
