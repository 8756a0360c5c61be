"""Load balancing, as pure functions: counts, the bias update, the auxiliary losses."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_FP32_INTEGER = 2**24
"""Every integer up to this one is a float32; a count beyond it would be rounded."""


class LostTokens(RuntimeError):
    """A step's counts are not its tokens x K: some were lost on the way, or counted twice."""


def count_tokens(
    expert_ids: Tensor, num_experts: int, is_padding: Tensor | None = None, num_sequences: int = 1
) -> Tensor:
    """Tokens per sequence and expert, [B, E] int64, of a decision.

    Args:
        expert_ids: [T, K]; token t belongs to sequence t % B, as in the engine's [S, B] order.
        num_experts: E.
        is_padding: [T] bool, True for tokens that are not counted; None if none is padding.
        num_sequences: B.
    """
    num_tokens = expert_ids.shape[0]
    valid = (
        torch.ones_like(expert_ids) if is_padding is None else (~is_padding).long().unsqueeze(-1).expand_as(expert_ids)
    )
    counts = torch.zeros(num_sequences * num_experts, dtype=torch.int64, device=expert_ids.device)
    cell = expert_ids
    if num_sequences > 1:
        sequence = torch.arange(num_tokens, device=expert_ids.device) % num_sequences
        cell = expert_ids + sequence.unsqueeze(-1) * num_experts
    # Integer addition: atomics on a GPU may add in any order and still give the same bits, without a host sync.
    return counts.scatter_add_(0, cell.flatten(), valid.flatten()).view(num_sequences, num_experts)


def updated_expert_bias(
    expert_bias: Tensor, tokens_per_expert: Tensor, update_rate: float, center: bool = False
) -> Tensor:
    """One step of the auxiliary-loss-free balancing (arXiv 2408.15664): up for experts below the mean, down above.

    The sign is decided in integers: an expert is below the mean where E x count < total. No division, no rounding,
    no dependence on the order in which ranks were summed.

    Args:
        expert_bias: [..., E] fp32.
        tokens_per_expert: [..., E] int64, summed over all ranks that share the global batch.
        update_rate: the step.
        center: take the mean (in fp64) off the result. The choice of experts depends on differences only, so it stays
            the same. Without this the mean drifts: not as many experts lie below the mean load as above it.

    Returns:
        A new [..., E] fp32.

    Raises:
        TypeError: if the bias is not float32 or the counts are not int64.
    """
    if expert_bias.dtype != torch.float32 or tokens_per_expert.dtype != torch.int64:
        raise TypeError(
            f"the expert bias update needs a float32 bias and int64 counts, got {expert_bias.dtype} and "
            f"{tokens_per_expert.dtype}"
        )
    total = tokens_per_expert.sum(dim=-1, keepdim=True)
    direction = torch.sign(total - tokens_per_expert * tokens_per_expert.shape[-1])
    updated = expert_bias + direction.to(torch.float32) * update_rate
    if not center:
        return updated
    wide = updated.double()
    return (wide - wide.mean(dim=-1, keepdim=True)).to(torch.float32)


def balance_share(scores: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """This rank's share of a load-balancing loss (Switch, arXiv 2101.03961, for K choices), summed over its tokens.

    For one set of tokens the loss is E x sum_i f_i P_i, with f_i the share of the choices that fell on expert i and
    P_i the mean score of expert i. Returned is loss x tokens, summed over the sets: divided by the tokens it is their
    mean, weighted by tokens. f is over all ranks that share a set; the scores are this rank's, so that the sum of all
    ranks' shares is the whole.

    Args:
        scores: [T, E] fp32 or fp64, one distribution per valid local token, rows of padding zero; token t is in set
            t % B.
        tokens_per_expert: [B, E] int64, choices per set and expert over all ranks that share the set.
    """
    num_sets, num_experts = tokens_per_expert.shape
    choices = tokens_per_expert.sum(dim=-1, keepdim=True).clamp(min=1)
    f = (tokens_per_expert.double() / choices).to(scores.dtype)  # counts of a global batch may pass 2^24
    return num_experts * (f * scores.view(-1, num_sets, num_experts).sum(dim=0)).sum()


def z_loss_share(logits: Tensor, is_padding: Tensor | None = None) -> Tensor:
    """This rank's share of the router z-loss (ST-MoE, arXiv 2202.08906): the sum over tokens of logsumexp(logits)^2."""
    squares = torch.logsumexp(logits, dim=-1).square()
    if is_padding is not None:
        squares = squares.masked_fill(is_padding, 0.0)
    return squares.sum()
