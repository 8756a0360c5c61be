"""Operations on all routers of a model: finding them, announcing a step, counting ahead, snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_moe.moe.load_balance import GlobalBatch, requested_counts
from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.routing import RoutedTokens
from megatron_moe.parallel.collectives import sum_over_ranks


def routers(model_chunks: Iterable[torch.nn.Module]) -> Iterator[TopKRouter]:
    """Yield every router of these chunks, wrapped or not, in the order of the layers."""
    for chunk in model_chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                yield module


def announce_global_batch(
    model_chunks: Sequence[torch.nn.Module], global_batch: GlobalBatch, counted: Sequence[Tensor] | None = None
) -> None:
    """Announce the coming global batch to every router, which forgets it when its counts are reset.

    It is called before the batch's first forward pass in training, and after any counting ahead.

    Args:
        counted: what `counting_ahead` yielded; None if nothing was counted ahead.
    """
    for index, router in enumerate(routers(model_chunks)):
        router.step.global_batch = replace(global_batch, tokens_per_expert=None if counted is None else counted[index])


@contextmanager
def counting_ahead(model_chunks: Sequence[torch.nn.Module]) -> Iterator[list[Tensor]]:
    """Count the choices of experts in the forward passes of the block, which run without gradients.

    Yields:
        A tensor [E] int64 per router. After the block it holds the sum over all ranks, by a collective over TP x CP x
        DP.
    """
    found = list(routers(model_chunks))
    counts = [torch.zeros(r.options.num_experts, dtype=torch.int64, device=r.weight.device) for r in found]
    with torch.no_grad(), ExitStack() as stack:
        for router, count in zip(found, counts):
            stack.enter_context(router.observed_by(partial(_add_demand, count), every_pass=True))
        yield counts
    if not found:
        return
    total = sum_over_ranks(torch.cat(counts), found[0].groups.tp_dp_cp)
    for count, of_all_ranks in zip(counts, total.split([len(count) for count in counts])):
        count.copy_(of_all_ranks)


def _add_demand(count: Tensor, _: TopKRouter, routed: RoutedTokens) -> None:
    count += requested_counts(routed).sum(dim=0)


@dataclass(frozen=True)
class RouterSnapshot:
    """A copy of the routers' state that a step may change, made before the step.

    A step that is not committed (overflow, NaN, rerun) restores it: the bias keeps its bits, and the counts of the
    abandoned step are discarded. The tensors are E floats per layer.
    """

    model_chunks: tuple[torch.nn.Module, ...]
    expert_bias: tuple[Tensor | None, ...]

    @classmethod
    def capture(cls, model_chunks: Iterable[torch.nn.Module]) -> RouterSnapshot:
        """Copy the biases and reset all counts, since what was counted before belongs to no step."""
        chunks = tuple(model_chunks)
        biases = []
        for router in routers(chunks):
            router.reset_counts()
            biases.append(None if router.expert_bias is None else router.expert_bias.clone())
        return cls(chunks, tuple(biases))

    @property
    def biases(self) -> list[Tensor]:
        """The copied expert biases, without the routers that have none."""
        return [bias for bias in self.expert_bias if bias is not None]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the step: restore the bits of each bias, and reset counts and auxiliary losses."""
        for router, bias in zip(routers(self.model_chunks), self.expert_bias):
            if bias is not None:
                router.expert_bias.copy_(bias)
            router.reset_counts()
