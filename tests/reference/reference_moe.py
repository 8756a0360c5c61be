"""A slow, readable mixture of experts: one token at a time, one expert at a time, torch only.

Nothing is shared with the package. `Routing` holds the options by their meaning, not by the package's classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Routing:
    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    normalise: bool = True
    scaling_factor: float | None = None
    num_groups: int | None = None
    group_topk: int | None = None
    group_score: str = "top2"


def allowed_experts(choice: Tensor, routing: Routing) -> list[int]:
    """Experts of the best groups, for one token's scores-plus-bias [E]."""
    experts = list(range(len(choice)))
    if routing.num_groups is None:
        return experts
    size = len(choice) // routing.num_groups
    groups = [experts[g * size : (g + 1) * size] for g in range(routing.num_groups)]
    count = 1 if routing.group_score == "max" else 2
    worth = [sum(sorted((choice[e].item() for e in group), reverse=True)[:count]) for group in groups]
    best = sorted(range(len(groups)), key=lambda g: -worth[g])[: routing.group_topk]
    return [e for g in best for e in groups[g]]


def route_one(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[list[int], Tensor]:
    """The chosen experts of one token and the weight of each, from its logits [E]."""
    scores = torch.softmax(logits, 0) if routing.score_function == "softmax" else torch.sigmoid(logits)
    choice = scores.detach() if bias is None else scores.detach() + bias
    allowed = allowed_experts(choice, routing)
    chosen = sorted(allowed, key=lambda e: -choice[e].item())[: routing.topk]
    if routing.score_function == "softmax" and not routing.pre_softmax and routing.normalise:
        weights = torch.softmax(logits[chosen], 0)
    else:
        weights = scores[chosen]
        if routing.normalise:
            weights = weights / weights.sum()
    if routing.scaling_factor:
        weights = weights * routing.scaling_factor
    return chosen, weights


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def expert(x: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
    """x [H], weight1 [2, F, H] (gate, up), weight2 [H, F]."""
    return weight2 @ (silu(weight1[0] @ x) * (weight1[1] @ x))


@dataclass
class Weights:
    """router [E, H]; weight1 [E, 2, F, H], weight2 [E, H, F]; shared1 [2, Fs, H], shared2 [H, Fs];
    shared_gate [1, H]."""

    router: Tensor
    weight1: Tensor
    weight2: Tensor
    bias: Tensor | None = None
    shared1: Tensor | None = None
    shared2: Tensor | None = None
    shared_gate: Tensor | None = None


@dataclass
class Result:
    """output [T, H], tokens per expert [E], logits [T, E], chosen experts per token (empty for padding)."""

    output: Tensor
    counts: list[int]
    logits: Tensor
    chosen: list[list[int]]


def moe_layer(tokens: Tensor, weights: Weights, routing: Routing, is_padding: list[bool] | None = None) -> Result:
    """tokens [T, H]. A padded token gets the shared expert only, and is counted nowhere."""
    logits = tokens @ weights.router.T
    counts = [0] * weights.router.shape[0]
    outputs, all_chosen = [], []
    for t, x in enumerate(tokens):
        y = torch.zeros_like(x)
        chosen: list[int] = []
        if not (is_padding and is_padding[t]):
            chosen, probs = route_one(logits[t], weights.bias, routing)
            for e, p in zip(chosen, probs):
                y = y + p * expert(x, weights.weight1[e], weights.weight2[e])
                counts[e] += 1
        if weights.shared1 is not None:
            shared = expert(x, weights.shared1, weights.shared2)
            if weights.shared_gate is not None:
                shared = shared * torch.sigmoid(weights.shared_gate @ x)
            y = y + shared
        outputs.append(y)
        all_chosen.append(chosen)
    return Result(torch.stack(outputs), counts, logits, all_chosen)


def balance_loss(result: Result, topk: int, score_function: str, tokens: list[int] | None = None) -> Tensor:
    """E x sum_i f_i P_i over the given tokens (all valid ones by default)."""
    valid = [t for t in (tokens if tokens is not None else range(len(result.chosen))) if result.chosen[t]]
    num_experts = result.logits.shape[1]
    loss = torch.zeros((), dtype=result.logits.dtype)
    distributions = {}
    for t in valid:
        if score_function == "softmax":
            distributions[t] = torch.softmax(result.logits[t], 0)
        else:
            scores = torch.sigmoid(result.logits[t])
            distributions[t] = scores / scores.sum()
    for i in range(num_experts):
        share = sum(i in result.chosen[t] for t in valid) / (len(valid) * topk)
        mean_score = sum(distributions[t][i] for t in valid) / len(valid)
        loss = loss + num_experts * share * mean_score
    return loss


def z_loss(result: Result) -> Tensor:
    """Mean over valid tokens of the squared log of the sum of exponentials."""
    terms = [torch.log(torch.exp(result.logits[t]).sum()) ** 2 for t, c in enumerate(result.chosen) if c]
    return torch.stack(terms).mean()


def bias_step(bias: list[float], counts: list[int], rate: float) -> list[float]:
    """The bias update in exact integers and one float32 addition per expert."""
    total = sum(counts)
    stepped = []
    for b, count in zip(bias, counts):
        direction = (total > len(counts) * count) - (total < len(counts) * count)
        change = torch.tensor(float(direction)) * torch.tensor(rate, dtype=torch.float32)
        stepped.append((torch.tensor(b, dtype=torch.float32) + change).item())
    return stepped
