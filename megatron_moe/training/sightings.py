"""Where a number that is not finite first shows: hooks on every module, router and weight of one replayed step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.state import routers
from megatron_moe.training.finite_state import described, global_names, is_finite

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, order=True)
class Sighting:
    """A tensor with an element that is not finite. Sorted, what came first in a step comes first.

    phase, micro_batch, stage and order say when: the virtual pipeline stage counts in the direction of the pass.
    """

    phase: int
    micro_batch: int
    stage: int
    order: int
    what: str
    value: str = field(compare=False)


class Sightings:
    """Collects what shows while `watching`.

    Args:
        model: wrapped chunks.
        num_micro_batches: of this rank in the step.
        pp: pipeline stage of this rank, and how many there are.
    """

    def __init__(self, model: Sequence[torch.nn.Module], num_micro_batches: int, pp: tuple[int, int]) -> None:
        self._model = model
        self._num_micro_batches = num_micro_batches
        self._stage, self._stages = pp
        self._order = 0
        self._backward_of = 0
        self._micro_batches = [-1 for _ in model]
        self.seen: list[Sighting] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Forward and backward passes within are looked at; what they compute is what they would compute."""
        with ExitStack() as stack:
            for index, chunk in enumerate(self._model):
                names = global_names(chunk)
                stack.callback(chunk.register_forward_pre_hook(partial(self._begins, index)).remove)
                for name, module in chunk.named_modules():
                    hook = partial(self._output, index, names[name])
                    stack.callback(module.register_forward_hook(hook).remove)
                for name, parameter in chunk.named_parameters():
                    if parameter.requires_grad:
                        hook = partial(self._gradient, index, None, f"the gradient of {names[name]}")
                        stack.callback(parameter.register_hook(hook).remove)
                known = {id(module): names[name] for name, module in chunk.named_modules()}
                for router in routers([chunk]):
                    stack.callback(setattr, router, "probe", router.probe)
                    router.probe = _RouterWatch(partial(self._see_forward, index), known[id(router)])  # type: ignore[assignment]
            yield

    def _begins(self, chunk: int, _module: Any, _inputs: Any) -> None:
        # A step that counts ahead passes twice over its micro-batches.
        self._micro_batches[chunk] = (self._micro_batches[chunk] + 1) % self._num_micro_batches

    def _output(self, chunk: int, name: str, _module: Any, _inputs: Any, output: Any) -> None:
        micro_batch = self._micro_batches[chunk]
        what = f"the output of {name}" if name else "the loss per token, or what this stage sends on"
        for tensor in _floating(output):
            self._see_forward(chunk, what, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, chunk, micro_batch, f"the gradient of {what}"))

    def _see_forward(self, chunk: int, what: str, tensor: Tensor) -> None:
        self._order += 1
        if not is_finite(tensor):
            stage = chunk * self._stages + self._stage
            place = (FORWARD, self._micro_batches[chunk], stage, self._order)
            self.seen.append(Sighting(*place, what, described(tensor)))

    def _gradient(self, chunk: int, micro_batch: int | None, what: str, gradient: Tensor) -> None:
        self._order += 1
        # A weight's gradient comes between those of activations, which know their micro-batch.
        self._backward_of = self._backward_of if micro_batch is None else micro_batch
        if not is_finite(gradient):
            stage = -(chunk * self._stages + self._stage)
            place = (BACKWARD, self._backward_of, stage, self._order)
            self.seen.append(Sighting(*place, what, described(gradient)))


class _RouterWatch:
    """Stands where a router holds its probe: our MoE layer calls a router's `route`, past module hooks."""

    def __init__(self, see: Any, name: str) -> None:
        self._see, self._name = see, name

    def see(self, router: TopKRouter, hidden: Tensor, logits: Tensor, scores: Tensor, decision: Any, _: Any) -> None:
        for what, tensor in (("input", hidden), ("logits", logits), ("scores", scores), ("weights", decision.probs)):
            self._see(f"the {what} of {self._name}", tensor)


def _floating(output: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf
