"""Property: however a global batch is cut up, with padding or without, expert_bias has the integer oracle's bits.

Every number in the logits is a multiple of 2^-15 below 2^3: fp32 adds them exactly in any order, so that no layout can
blame a matrix product. All logits of a token differ, so that no choice is a matter of taste.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe import Float16Module
from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.load_balance import updated_expert_bias
from megatron_moe.parallel import groups
from megatron_moe.training.finalize_model_grads import update_routers
from tests.helpers.rows import rows
from tests.numbers.reference_moe import bias_step
from tests.training.bias_cases import bias_router

pytestmark = pytest.mark.engine

STEPS, HIDDEN, RATE = 200, 8, 1e-3
LAYOUT_STEPS = 80
"""Steps of a layout: every cut of a batch is drawn anew. STEPS are what the balance takes."""
LAST = 40
"""Steps at the end over which the balance is taken: one step's counts are noisy."""

CASES = {
    # number of experts, K, tokens a step, options
    0: (8, 1, 256, {}),
    1: (16, 4, 192, {"moe_router_bias_center": True}),
    2: (12, 3, 320, {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_group_score": "top2"}),
    3: (24, 2, 384, {}),
}
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# Case, in bf16 or not, and the layouts of 2 and of 4 ranks beside one rank alone.
RUNS = [(0, True, {}, SP2), (1, True, SP2, {}), (2, True, {}, SP2), (3, True, SP2, {}), (1, False, {}, SP2)]


def gate_weight(seed: int, num_experts: int) -> torch.Tensor:
    """[E, HIDDEN], all bf16 numbers. Column 0 skews the loads, column 1 makes a token's logits differ."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-31, 32, (num_experts, HIDDEN), generator=generator) / 64
    weight[:, 0] = torch.randint(-24, 25, (num_experts,), generator=generator) / 64
    weight[:, 1] = torch.arange(num_experts) * 2.0**-15
    return weight


def global_batch(seed: int, step: int, num_tokens: int) -> torch.Tensor:
    """[T, HIDDEN], all bf16 numbers: the same for every layout."""
    tokens = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1000 * seed + step))
    tokens = (tokens * 4).round().clamp(-15, 15) / 8
    tokens[:, :2] = 1.0
    return tokens


def cut_up(
    tokens: torch.Tensor, draw: random.Random, ranks: int
) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """Per rank any number of micro-batches of any size, an empty one too; some with padding anywhere in between."""
    cuts = sorted(draw.choices(range(len(tokens) + 1), k=ranks - 1 + draw.randrange(3 * ranks)))
    pieces = [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)])]
    owners = [*range(ranks), *(draw.randrange(ranks) for _ in pieces[ranks:])]
    shares: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = [[] for _ in range(ranks)]
    for owner, piece in zip(owners, pieces):
        if draw.random() < 0.5:
            shares[owner].append((piece, None))
            continue
        size = len(piece) + draw.randrange(1, 20)
        places = torch.tensor(sorted(draw.sample(range(size), len(piece))), dtype=torch.int64)
        padded, is_padding = torch.ones(size, HIDDEN), torch.ones(size, dtype=torch.bool)
        padded[places], is_padding[places] = piece, False
        shares[owner].append((padded, is_padding))
    return shares


def run_layout(seed: int, layout: dict[str, Any], half: bool) -> torch.Tensor:
    """expert_bias [E] after all steps, with batches cut up by a generator that every rank shares."""
    num_experts, topk, num_tokens, options = CASES[seed]
    pg_collection = groups.initialize(replace(Run(), **layout))
    router = bias_router(pg_collection, num_experts, topk, layout, HIDDEN, bf16=half, **options)
    with torch.no_grad():
        router.weight.copy_(gate_weight(seed, num_experts))
    model = Float16Module(router.config, router) if half else router
    assert router.weight.dtype == (torch.bfloat16 if half else torch.float32)
    draw = random.Random(repr((seed, dist.get_world_size(), layout)))
    for step in range(LAYOUT_STEPS):
        shares = cut_up(global_batch(seed, step, num_tokens), draw, dist.get_world_size())
        for tokens, is_padding in shares[dist.get_rank()]:
            router.route(tokens.bfloat16() if half else tokens, is_padding)
        update_routers([model])
    return router.expert_bias.clone()


def oracle(seed: int, update: bool = True, steps: int = STEPS) -> tuple[torch.Tensor, list[int]]:
    """The bias after all steps, and the counts of the last ones: no router, one batch, integers."""
    num_experts, topk, num_tokens, options = CASES[seed]
    weight, bias, late = gate_weight(seed, num_experts), [0.0] * num_experts, [0] * num_experts
    for step in range(steps):
        scores = torch.sigmoid(global_batch(seed, step, num_tokens) @ weight.T) + torch.tensor(bias)
        if "moe_router_num_groups" in options:
            grouped = scores.view(num_tokens, options["moe_router_num_groups"], -1)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(options["moe_router_group_topk"], dim=-1).indices
            kept = torch.zeros(grouped.shape[:2]).scatter_(1, best, 1.0).bool()
            scores = torch.where(kept.unsqueeze(-1), grouped, -torch.inf).view(num_tokens, num_experts)
        counts = torch.bincount(scores.topk(topk, dim=-1).indices.flatten(), minlength=num_experts).tolist()
        assert sum(counts) == num_tokens * topk
        if step >= steps - LAST:
            late = [total + count for total, count in zip(late, counts)]
        if update and options.get("moe_router_bias_center"):
            bias = updated_expert_bias(torch.tensor(bias), torch.tensor(counts), RATE, center=True).tolist()
        elif update:
            bias = bias_step(bias, counts, RATE)
    return torch.tensor(bias), late


def max_violation(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts) - 1


@pytest.mark.parametrize(("seed", "half", "two", "four"), rows(RUNS, test=[RUNS[0], RUNS[-1]]))
def test_any_cut_on_any_ranks_gives_the_bits_of_the_oracle(
    gloo: Any, seed: int, half: bool, two: dict[str, Any], four: dict[str, Any]
) -> None:
    bias, _ = oracle(seed, steps=LAYOUT_STEPS)
    assert bias.abs().max() > 0.02 and bias.unique().numel() > 4
    for world, layout in ((1, {}), (2, two), (4, four)):
        for rank, found in enumerate(gloo.run(world, run_layout, seed=seed, layout=layout, half=half)):
            assert torch.equal(found.view(torch.int32), bias.view(torch.int32)), (world, layout, rank)


@pytest.mark.parametrize("seed", CASES)
def test_the_bias_balances_what_is_unbalanced_without_it(seed: int) -> None:
    """MaxVio over the last 40 steps: below 0.1 with the bias, at least five times as much without."""
    balanced, unbalanced = (max_violation(oracle(seed, update)[1]) for update in (True, False))
    assert balanced < 0.1
    assert unbalanced > max(5 * balanced, 0.4)
