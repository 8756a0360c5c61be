"""A slow, readable mixture of experts: one token at a time, one expert at a time, torch only.

Nothing is shared with the package. `Routing` holds the options by their meaning, not by the package's classes.
"""

import math
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
    sinkhorn: bool = False
    round_robin: bool = False
    replayed: bool = False
    capacity_factor: float | None = None
    drop_policy: str = "probs"


def allowed_experts(choice: Tensor, routing: Routing) -> list[int]:
    """Experts of the best groups, for what one token's experts are compared by [E]."""
    experts = list(range(len(choice)))
    if routing.num_groups is None:
        return experts
    size = len(choice) // routing.num_groups
    groups = [experts[g * size : (g + 1) * size] for g in range(routing.num_groups)]
    # megatron-core: as many of a group as the token's K experts are per group that it may use
    count = {"max": 1, "top2": 2, "megatron": math.floor(routing.topk / (routing.group_topk or 1))}[routing.group_score]
    worth = [sum(sorted((choice[e].item() for e in group), reverse=True)[:count]) for group in groups]
    best = sorted(range(len(groups)), key=lambda g: -worth[g])[: routing.group_topk]
    return [e for g in best for e in groups[g]]


def route_one(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[list[int], Tensor]:
    """The chosen experts of one token and the weight of each, from its logits [E]."""
    scores = torch.softmax(logits, 0) if routing.score_function == "softmax" else torch.sigmoid(logits)
    choice = scores.detach() if bias is None else scores.detach() + bias
    if bias is None and routing.group_score == "megatron" and routing.score_function == "softmax":
        # megatron-core takes this softmax last, over the chosen ones
        choice = choice if routing.pre_softmax else logits.detach()
    allowed = allowed_experts(choice, routing)
    chosen = sorted(allowed, key=lambda e: -choice[e].item())[: routing.topk]
    return chosen, weigh(logits, chosen, routing)


def weigh(logits: Tensor, chosen: list[int], routing: Routing) -> Tensor:
    """The weight of each chosen expert of one token."""
    scores = torch.softmax(logits, 0) if routing.score_function == "softmax" else torch.sigmoid(logits)
    if routing.score_function == "softmax" and not routing.pre_softmax and routing.normalise:
        weights = torch.softmax(logits[chosen], 0)
    else:
        weights = scores[chosen]
        if routing.normalise:
            weights = weights / weights.sum()
    if routing.scaling_factor:
        weights = weights * routing.scaling_factor
    return weights


def sinkhorn(logits: list[list[float]], tolerance: float = 1e-4) -> list[list[float]]:
    """exp(logits) with rows (tokens) and columns (experts) normalised in turn, in Python's floats."""
    tokens, experts = range(len(logits)), range(len(logits[0]))
    cost = [[math.exp(value) for value in row] for row in logits]
    row_factor, column_factor = [1.0 for _ in tokens], [1.0 for _ in experts]
    while True:
        for t in tokens:
            row_factor[t] = 1 / len(tokens) / sum(column_factor[e] * cost[t][e] for e in experts)
        before = list(column_factor)
        for e in experts:
            column_factor[e] = 1 / len(experts) / sum(row_factor[t] * cost[t][e] for t in tokens)
        if sum(abs(a - b) for a, b in zip(before, column_factor)) / len(experts) <= tolerance:
            return [[column_factor[e] * cost[t][e] * row_factor[t] for e in experts] for t in tokens]


def route_all(
    logits: Tensor, bias: Tensor | None, routing: Routing, valid: list[int]
) -> dict[int, tuple[list[int], Tensor]]:
    """Experts and weights of each valid token of a micro-batch, logits [T, E] in the order of the tokens."""
    routes = {t: route_one(logits[t], bias, routing) for t in valid}
    if routing.sinkhorn:
        balanced = sinkhorn([logits[t].tolist() for t in valid])
        for row, t in zip(balanced, valid):
            chosen = sorted(range(len(row)), key=lambda e: -row[e])[: routing.topk]
            scores = torch.sigmoid(logits[t]) if len(chosen) == 1 else torch.softmax(logits[t], 0)
            routes[t] = (chosen, scores[chosen])
    if routing.round_robin:
        for t in valid:
            chosen = [(t * routing.topk + k) % logits.shape[1] for k in range(routing.topk)]
            routes[t] = (chosen, weigh(logits[t], chosen, routing))
    if routing.replayed:
        for t in valid:
            chosen = recorded(t, routing.topk, logits.shape[1])
            routes[t] = (chosen, weigh(logits[t], chosen, routing))
    return routes


def recorded(t: int, topk: int, num_experts: int) -> list[int]:
    """The experts that token t went to when its route was recorded: others than its scores choose."""
    return [(5 * t + t // 3 + 3 * k) % num_experts for k in range(topk)]


def beyond_capacity(
    routes: dict[int, tuple[list[int], Tensor]], num_tokens: int, num_experts: int, routing: Routing
) -> set[tuple[int, int]]:
    """(token, expert) pairs that are dropped: each expert keeps its best, or its first, choices."""
    if routing.capacity_factor is None:
        return set()
    capacity = min(num_tokens, math.ceil(num_tokens * routing.topk / num_experts * routing.capacity_factor))
    dropped = set()
    for e in range(num_experts):
        asking = [t for t, (chosen, _) in routes.items() if e in chosen]
        if routing.drop_policy == "probs":
            asking.sort(key=lambda t: (-routes[t][1][routes[t][0].index(e)].item(), t))
        else:
            asking.sort()
        dropped |= {(t, e) for t in asking[capacity:]}
    return dropped


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
    """output [T, H], tokens per expert [E], logits [T, E], chosen experts per token (empty for padding), of them those
    that were dropped as (token, expert)."""

    output: Tensor
    counts: list[int]
    logits: Tensor
    chosen: list[list[int]]
    dropped: set[tuple[int, int]]


def moe_layer(tokens: Tensor, weights: Weights, routing: Routing, is_padding: list[bool] | None = None) -> Result:
    """tokens [T, H]. A padded token gets the shared expert only, and is counted nowhere; a dropped choice gives nothing
    to its token, and the token's other weights stay."""
    logits = tokens @ weights.router.T
    counts = [0] * weights.router.shape[0]
    outputs, all_chosen = [], []
    valid = [t for t in range(len(tokens)) if not (is_padding and is_padding[t])]
    routes = route_all(logits, weights.bias, routing, valid)
    dropped = beyond_capacity(routes, len(tokens), len(counts), routing)
    for t, x in enumerate(tokens):
        y = torch.zeros_like(x)
        chosen: list[int] = []
        if t in routes:
            chosen, probs = routes[t]
            for e, p in zip(chosen, probs):
                if (t, e) in dropped:
                    continue
                y = y + p * expert(x, weights.weight1[e], weights.weight2[e])
                counts[e] += 1
        if weights.shared1 is not None:
            shared = expert(x, weights.shared1, weights.shared2)
            if weights.shared_gate is not None:
                shared = shared * torch.sigmoid(weights.shared_gate @ x)
            y = y + shared
        outputs.append(y)
        all_chosen.append(chosen)
    return Result(torch.stack(outputs), counts, logits, all_chosen, dropped)


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


def global_balance_loss(results: list[Result], topk: int, score_function: str) -> Tensor:
    """The same over all tokens of several micro-batches together."""
    outputs, logits = torch.cat([r.output for r in results]), torch.cat([r.logits for r in results])
    chosen = [of_token for r in results for of_token in r.chosen]
    return balance_loss(Result(outputs, [], logits, chosen, set()), topk, score_function)


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
