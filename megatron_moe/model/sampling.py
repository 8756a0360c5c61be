"""Which token comes next: the likeliest, or one drawn from the likely ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits.

    temperature: 0 takes the likeliest token; else the logits are divided by it and a token is drawn.
    top_k: draw from so many likeliest tokens; None: from all.
    top_p: draw from the fewest likeliest tokens that have this probability together, after `top_k`.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token for logits [V], fp32 on the CPU; `generator` is used where a token is drawn."""
    if sampling.temperature <= 0.0:
        return int(logits.argmax())
    probs = torch.softmax(_likely(logits / sampling.temperature, sampling), dim=-1)
    return int(torch.multinomial(probs, 1, generator=generator))


def _likely(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits with -inf in place of the tokens that are not drawn from. Of equally likely ones the first ids stay."""
    if sampling.top_k is None and sampling.top_p >= 1.0:
        return logits
    ranked, ids = logits.sort(descending=True, stable=True)
    ranked, ids = ranked[: sampling.top_k], ids[: sampling.top_k]
    if sampling.top_p < 1.0:
        probs = torch.softmax(ranked, dim=-1)
        # A token stays while those before it have less than top_p: the likeliest one always does.
        stays = probs.cumsum(-1) - probs < sampling.top_p
        ranked, ids = ranked[stays], ids[stays]
    return torch.full_like(logits, float("-inf")).scatter(0, ids, ranked)
