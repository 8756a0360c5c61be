"""However a global batch is cut up, with padding or without, expert_bias has the integer oracle's bits.

Every number in the logits is a multiple of 2^-15 below 2^3: fp32 adds them exactly in any order, so that no layout can
blame a matrix product. All logits of a token differ, so that no choice is a matter of taste.
"""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe import Float16Module, TopKRouter
from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.load_balance import updated_expert_bias
from megatron_moe.parallel import groups
from megatron_moe.training.finalize_model_grads import update_routers
from tests.helpers.routers import config
from tests.numbers.reference_moe import bias_step

STEPS, HIDDEN, RATE = 40, 8, 1e-3

CASES = {
    # number of experts, K, tokens a step, options
    0: (8, 1, 256, {}),
    1: (16, 4, 192, {"moe_router_bias_center": True}),
    2: (12, 3, 320, {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_group_score": "top2"}),
    # What does not fit is dropped, and counts for the bias all the same.
    3: (24, 2, 384, {"moe_expert_capacity_factor": 1.0}),
}
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# Case, in bf16 or not, ranks and layout.
RUNS = [(0, True, 2, {}), (1, True, 4, SP2), (2, True, 2, SP2), (3, False, 2, {}), (1, False, 1, {})]


def bias_router(pg: Any, num_experts: int, topk: int, **options: Any) -> TopKRouter:
    """A router with sigmoid scores and a bias; `options` are the engine configuration's, or attributes we add to it."""
    added = ("moe_router_bias_center", "moe_router_group_score")
    ours = {name: options.pop(name) for name in added if name in options}
    made = config(hidden_size=HIDDEN, num_moe_experts=num_experts, moe_router_topk=topk, **options)
    vars(made).update(ours)
    return TopKRouter(made, pg)


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


MicroBatches = list[tuple[torch.Tensor, torch.Tensor | None]]


def cut_up(tokens: torch.Tensor, draw: random.Random, ranks: int) -> list[MicroBatches]:
    """Per rank any number of micro-batches of any size, an empty one too; some with padding anywhere in between."""
    cuts = sorted(draw.choices(range(len(tokens) + 1), k=ranks - 1 + draw.randrange(3 * ranks)))
    pieces = [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)])]
    owners = [*range(ranks), *(draw.randrange(ranks) for _ in pieces[ranks:])]
    shares: list[MicroBatches] = [[] for _ in range(ranks)]
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


def run_layout(seed: int, layout: dict[str, Any], half: bool) -> tuple[torch.Tensor, list[int]]:
    """expert_bias [E] after all steps, with batches cut up by a generator that every rank shares; the last counts."""
    num_experts, topk, num_tokens, options = CASES[seed]
    router = bias_router(groups.initialize(replace(Run(), **layout)), num_experts, topk, bf16=half, **layout, **options)
    with torch.no_grad():
        router.weight.copy_(gate_weight(seed, num_experts))
    model = Float16Module(router.config, router) if half else router
    assert router.weight.dtype == (torch.bfloat16 if half else torch.float32)
    draw = random.Random(repr((seed, dist.get_world_size(), layout)))
    for step in range(STEPS):
        shares = cut_up(global_batch(seed, step, num_tokens), draw, dist.get_world_size())
        for tokens, is_padding in shares[dist.get_rank()]:
            router.route(tokens.bfloat16() if half else tokens, is_padding)
        update = update_routers([model])
    dropped = update.dropped_per_expert[0]
    assert (dropped is None) == ("moe_expert_capacity_factor" not in options)
    counts = update.tokens_per_expert[0] if dropped is None else update.tokens_per_expert[0] + dropped
    return router.expert_bias.clone(), counts.tolist()


def oracle(seed: int) -> tuple[torch.Tensor, list[int]]:
    """The bias after all steps, and the counts of the last one: no router, one batch, integers."""
    num_experts, topk, num_tokens, options = CASES[seed]
    weight, bias = gate_weight(seed, num_experts), [0.0] * num_experts
    for step in range(STEPS):
        scores = torch.sigmoid(global_batch(seed, step, num_tokens) @ weight.T) + torch.tensor(bias)
        if "moe_router_num_groups" in options:
            grouped = scores.view(num_tokens, options["moe_router_num_groups"], -1)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(options["moe_router_group_topk"], dim=-1).indices
            kept = torch.zeros(grouped.shape[:2]).scatter_(1, best, 1.0).bool()
            scores = torch.where(kept.unsqueeze(-1), grouped, -torch.inf).view(num_tokens, num_experts)
        counts = torch.bincount(scores.topk(topk, dim=-1).indices.flatten(), minlength=num_experts).tolist()
        assert sum(counts) == num_tokens * topk
        if options.get("moe_router_bias_center"):
            bias = updated_expert_bias(torch.tensor(bias), torch.tensor(counts), RATE, center=True).tolist()
        else:
            bias = bias_step(bias, counts, RATE)
    return torch.tensor(bias), counts


@pytest.mark.parametrize(("seed", "half", "ranks", "layout"), RUNS)
def test_any_cut_on_any_ranks_gives_the_bits_of_the_oracle(gloo, seed, half, ranks, layout):
    bias, counts = oracle(seed)
    assert bias.abs().max() > 0.02 and bias.unique().numel() > 4
    for found, found_counts in gloo.run(ranks, run_layout, seed=seed, layout=layout, half=half):
        assert torch.equal(found.view(torch.int32), bias.view(torch.int32))
        assert found_counts == counts
