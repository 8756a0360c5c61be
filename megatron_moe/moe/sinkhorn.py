"""Sinkhorn's normalisation: scores that choose every expert about equally often within a micro-batch.

S-BASE (arXiv 2202.01169), with Megatron-LM's iteration and tolerance, but in fp64, and with each token's logits taken
relative to their largest, so that none overflows; a token's own factor changes nothing in the order of its experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_moe.parallel.collectives import sum_over_ranks

TOLERANCE = 1e-4
_EPSILON = 1e-8
MAX_ROUNDS = 1000
"""More are of no use: the choice stays a sound one, only less even."""


@torch.no_grad()
def balanced_scores(logits: Tensor, is_padding: Tensor | None, group: Any) -> Tensor:
    """exp(logits) [T, E], times the factor per expert that makes all experts' shares of the tokens alike; fp64.

    Rows and columns are normalised in turn until the experts' factors change by less than 1e-4 in the mean. The sums
    over tokens are over all ranks of `group`, so that the result does not depend on how a micro-batch is split. The end
    is decided on the host: one synchronisation, and one all-reduce of E numbers, per round.

    Args:
        logits: [T, E] of this rank.
        is_padding: [T] bool, True for tokens that take no part; their rows are 0.
        group: the ranks that share the micro-batch.
    """
    wide = logits.double()
    cost = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    valid = torch.ones_like(wide[:, 0])
    if is_padding is not None:
        valid = (~is_padding).double()
        cost = cost * valid.unsqueeze(-1)
    num_tokens, num_experts = sum_over_ranks(valid.sum(), group), cost.shape[1]
    factors = cost.new_ones(num_experts)
    for _ in range(MAX_ROUNDS):
        token_factors = 1 / (num_tokens * (cost @ factors + _EPSILON))
        columns = sum_over_ranks(token_factors @ cost, group)
        updated = 1 / (num_experts * (columns + _EPSILON))
        change = (updated - factors).abs().mean()
        factors = updated
        if not bool(change > TOLERANCE):  # also where a logit is not a number: the step will not be applied
            break
    return cost * factors
