"""Ties between experts: in a comparison of two implementations, make one follow the choices of the other.

Scores of two implementations differ in their last bits. Where two experts, or two groups of them, have almost the same
score, the implementations may choose differently, and everything computed after that differs by much more than bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.routing import MicroBatch, group_scores, ranked_values

TIE = 1e-4
"""Largest difference of two experts' scores that counts as a tie."""


@contextmanager
def following(
    chunk: torch.nn.Module, experts: dict[int, Tensor], num_sequences: int
) -> Iterator[dict[int, list[float]]]:
    """Have the routers take given choices in place of their own where the two differ by a tie.

    Args:
        chunk: the model.
        experts: the choices, layer -> [B * S, K].
        num_sequences: B.

    Yields:
        layer -> the margins of the choices that differ.
    """
    margins: dict[int, list[float]] = {layer: [] for layer in experts}
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    before = [router.choose for router in routers]

    def wrapped(router: TopKRouter, theirs: Tensor, found: list[float]) -> Any:
        choose = router.choose

        def chosen(logits: Tensor, scores: Tensor, expert_bias: Tensor | None, micro_batch: MicroBatch) -> Tensor:
            ours = choose(logits, scores, expert_bias, micro_batch)
            wanted = theirs.unflatten(0, (num_sequences, -1)).transpose(0, 1).flatten(0, 1).to(ours.device)
            if wanted.shape != ours.shape or int(wanted.max()) >= scores.shape[-1]:
                return ours  # the comparison of shapes reports it
            differs = (wanted.sort(dim=-1).values != ours.sort(dim=-1).values).any(-1)
            ranked = ranked_values(logits, scores, router.options).detach()
            margin = choice_margin(ranked, expert_bias, router.options, wanted)
            found.extend(margin[differs].tolist())
            return torch.where((differs & (margin <= TIE)).unsqueeze(-1), wanted, ours)

        return chosen

    for router in routers:
        layer = (router.layer_number or 0) - 1
        if layer in experts:
            router.choose = wrapped(router, experts[layer], margins[layer])
    try:
        yield margins
    finally:
        for router, choose in zip(routers, before):
            router.choose = choose


def choice_margin(scores: Tensor, expert_bias: Tensor | None, options: Any, wanted: Tensor) -> Tensor:
    """Return [T], by how much scores would have to change for a choice to be the best one; 0 where it is.

    Args:
        scores: [T, E], what the router ranks by before its bias.
        expert_bias: the router's bias [E], or None.
        options: the router's options.
        wanted: the choice [T, K].
    """
    scores = scores if expert_bias is None else scores + expert_bias.to(scores.dtype)
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, wanted, True)
    pool, margin = torch.ones_like(inside), scores.new_zeros(scores.shape[0])
    if options.num_groups is not None and options.group_topk is not None:
        grouped = scores.unflatten(-1, (options.num_groups, -1))
        best = group_scores(scores, options)
        used = inside.unflatten(-1, (options.num_groups, -1)).any(-1)
        last = best.topk(options.group_topk, dim=-1).values[:, -1:]
        margin = (last - best).masked_fill(~used, 0.0).amax(-1).clamp(min=0.0)
        # A group's experts are available where it is used, or ahead of the first group left out by more than a tie.
        is_all = options.group_topk == options.num_groups
        out = best.topk(options.group_topk + (not is_all), dim=-1).values[:, -1:]
        pool = (used | (best > out + TIE) | is_all).unsqueeze(-1).expand_as(grouped).flatten(-2)
    worst = scores.masked_fill(~inside, torch.inf).amin(-1)
    left_out = scores.masked_fill(inside | ~pool, -torch.inf).amax(-1)
    return torch.maximum(margin, (left_out - worst).clamp(min=0.0))
