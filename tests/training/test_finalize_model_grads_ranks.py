"""expert_bias does not depend on the layout: the same routing, split over any ranks and micro-batches, same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel import groups
from megatron_moe.training.finalize_model_grads import update_routers
from tests.numbers.reference_moe import bias_step
from tests.training.bias_cases import bias_router

pytestmark = pytest.mark.engine

STEPS, TOKENS = 20, 96


def train_bias(seed: int, num_experts: int, topk: int, layout: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """Steps of routing with tokens that are the same for every layout; counts of each step and the last bias."""
    pg = groups.initialize(replace(Run(), **layout))
    router = bias_router(pg, num_experts, topk, layout)
    with torch.no_grad():
        router.weight.copy_(torch.randn(num_experts, 8, generator=torch.Generator().manual_seed(seed)) / 8)
    router.bfloat16()
    counts = []
    for step in range(STEPS):
        tokens = torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(1000 * seed + step)).bfloat16()
        for part in tokens.chunk(dist.get_world_size())[dist.get_rank()].chunk(micro_batches):
            router.route(part)
        counts.append(update_routers([router]).tokens_per_expert[0].tolist())
    return dict(counts=counts, bias=router.expert_bias.clone())


@pytest.mark.parametrize("seed", range(4))
def test_any_layout_gives_the_bits_of_the_integer_oracle(gloo: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_experts = [4, 8, 12, 16][seed]
    topk = int(torch.randint(1, 4, (1,), generator=generator))
    case = dict(seed=seed, num_experts=num_experts, topk=topk)
    alone = gloo.run(1, train_bias, **case, layout={}, micro_batches=1)[0]
    wanted = [0.0] * num_experts
    for counts in alone["counts"]:
        assert sum(counts) == TOKENS * topk
        wanted = bias_step(wanted, counts, 1e-3)
    assert torch.equal(alone["bias"].view(torch.int32), torch.tensor(wanted).view(torch.int32))
    sequence_parallel = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    for world, layout, micro_batches in ((1, {}, 4), (2, {}, 3), (2, sequence_parallel, 1), (4, sequence_parallel, 2)):
        for rank in gloo.run(world, train_bias, **case, layout=layout, micro_batches=micro_batches):
            assert rank["counts"] == alone["counts"], (world, layout, micro_batches)
            assert torch.equal(rank["bias"].view(torch.int32), alone["bias"].view(torch.int32))
