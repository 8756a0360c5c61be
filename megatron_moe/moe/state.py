"""The routers' state of a whole model: finding it, taking a snapshot, putting it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.moe.router import TopKRouter


def routers(model_chunks: Iterable[torch.nn.Module]) -> Iterator[TopKRouter]:
    """Every router of these chunks, wrapped or not, in the order of the layers."""
    for chunk in model_chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                yield module


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

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the step: bias bits as captured, counts and trackers empty."""
        for router, bias in zip(routers(self.model_chunks), self.expert_bias):
            if bias is not None:
                router.expert_bias.copy_(bias)
            router.reset_counts()
