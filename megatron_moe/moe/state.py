"""The routers' state of a whole model: finding it, telling them of a step, taking a snapshot, putting it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_moe.moe.load_balance import GlobalBatch
from megatron_moe.moe.router import TopKRouter
from megatron_moe.parallel.collectives import sum_over_ranks


def routers(model_chunks: Iterable[torch.nn.Module]) -> Iterator[TopKRouter]:
    """Every router of these chunks, wrapped or not, in the order of the layers."""
    for chunk in model_chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                yield module


def tell_routers(model_chunks: Sequence[torch.nn.Module], global_batch: GlobalBatch) -> None:
    """Tell every router of the global batch that comes; it forgets when its counts are reset, at the end of the step.

    Before the batch's first forward pass in training, and after any counting ahead.
    """
    for router in routers(model_chunks):
        ahead = router.ahead
        router.ahead = None
        router.global_batch = replace(global_batch, tokens_per_expert=ahead)


@contextmanager
def counting_ahead(model_chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Forward passes within the block only count what tokens ask for: no loss is attached, nothing else is counted.

    Afterwards every router holds the counts of all ranks for `tell_routers`. Collective over TP x CP x DP.
    """
    found = list(routers(model_chunks))
    for router in found:
        router.ahead = torch.zeros(router.options.num_experts, dtype=torch.int64, device=router.weight.device)
    yield
    if not found:
        return
    counts = sum_over_ranks(torch.cat([r.ahead for r in found if r.ahead is not None]), found[0].groups.tp_dp_cp)
    for router, count in zip(found, counts.split([router.options.num_experts for router in found])):
        router.ahead = count


@dataclass(frozen=True)
class RouterSnapshot:
    """What a step may change in the routers, as it was before the step.

    A step that is not committed (overflow, NaN, rerun) puts it back: the bias keeps its bits, and nothing of the
    abandoned step stays in the counts. The tensors are E floats per layer.
    """

    model_chunks: tuple[torch.nn.Module, ...]
    expert_bias: tuple[Tensor | None, ...]

    @classmethod
    def capture(cls, model_chunks: Iterable[torch.nn.Module]) -> RouterSnapshot:
        """Remember the bias and start counting anew: whatever was counted before belongs to no step."""
        chunks = tuple(model_chunks)
        biases = []
        for router in routers(chunks):
            router.reset_counts()
            biases.append(None if router.expert_bias is None else router.expert_bias.clone())
        return cls(chunks, tuple(biases))

    @property
    def biases(self) -> list[Tensor]:
        """Every expert_bias that there is."""
        return [bias for bias in self.expert_bias if bias is not None]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the step: bias bits as captured, counts and trackers empty."""
        for router, bias in zip(routers(self.model_chunks), self.expert_bias):
            if bias is not None:
                router.expert_bias.copy_(bias)
            router.reset_counts()
