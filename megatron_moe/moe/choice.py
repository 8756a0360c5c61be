"""Which experts a token gets: by its scores, by Sinkhorn's normalisation, or round robin; a `routing.Choice` each."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_moe.moe.groups import MoEGroups
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.routing import Choice, MicroBatch, choose_experts, ranked_values
from megatron_moe.moe.sinkhorn import balanced_scores


def positions(num_tokens: int, num_sequences: int, groups: MoEGroups, device: torch.device) -> Tensor:
    """Where this rank's T tokens stand in their micro-batch: [T] int64, the index in [S, B] order that one rank
    with the whole micro-batch would have.

    Under sequence parallelism TP rank r holds the r-th piece of what its context-parallel rank holds, and that is
    chunks c and 2 CP - 1 - c of the sequence's 2 CP chunks.
    """
    tp, tp_rank = groups.tp.size(), groups.tp.rank()
    cp, cp_rank = groups.tp_cp.size() // tp, groups.tp_cp.rank() // tp  # TP ranks are neighbours
    token = torch.arange(num_tokens, device=device)
    length = num_tokens // num_sequences
    place = tp_rank * length + token // num_sequences  # in the context-parallel rank's part of the sequence
    if cp > 1:
        half = length * tp // 2
        chunk = torch.where(place < half, cp_rank, 2 * cp - 1 - cp_rank)
        place = chunk * half + place % half
    return place * num_sequences + token % num_sequences


class ByScore:
    """The K best by score plus bias, within the token's groups."""

    def __init__(self, options: MoEOptions) -> None:
        self.options = options

    def __call__(self, logits: Tensor, scores: Tensor, expert_bias: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        return choose_experts(ranked_values(logits, scores, self.options), expert_bias, self.options)


class BySinkhorn:
    """In training the K best after Sinkhorn's normalisation over the micro-batch's tokens, those of all TP x CP ranks
    together; in evaluation the K best. Megatron-LM's, but that there every rank normalises its own tokens."""

    def __init__(self, options: MoEOptions, groups: MoEGroups) -> None:
        self.options, self.groups = options, groups

    def __call__(self, logits: Tensor, scores: Tensor, expert_bias: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        if not micro_batch.training:
            return choose_experts(scores, None, self.options)
        balanced = balanced_scores(logits, micro_batch.is_padding, self.groups.tp_cp)
        return balanced.topk(self.options.topk, dim=-1).indices


class RoundRobin:
    """Experts in turn, whatever the scores: token p of the micro-batch gets p K, p K + 1, ... modulo E.

    Every expert gets the same number of choices where E divides the micro-batch's tokens x K.
    """

    def __init__(self, options: MoEOptions, groups: MoEGroups) -> None:
        self.options, self.groups = options, groups

    def __call__(self, logits: Tensor, scores: Tensor, expert_bias: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        place = positions(logits.shape[0], micro_batch.num_sequences, self.groups, logits.device)
        turn = torch.arange(self.options.topk, device=logits.device)
        return (place.unsqueeze(1) * self.options.topk + turn) % self.options.num_experts


def build_choice(options: MoEOptions, groups: MoEGroups) -> Choice:
    """The choice that the options ask for."""
    if options.force_load_balancing:
        return RoundRobin(options, groups)
    return BySinkhorn(options, groups) if options.sinkhorn else ByScore(options)
