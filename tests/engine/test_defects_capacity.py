"""The engine's capacity, sinkhorn, jitter and global loss: each known defect shows there, and not in ours."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.transformer.module import Float16Module as EngineFloat16Module

from megatron_moe import Float16Module
from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel import groups
from megatron_moe.training.finalize_model_grads import update_routers
from tests.engine.stock import BF16, SP2, both_routers, engine_logged, one_hot_logits, our_loss, present

pytestmark = pytest.mark.engine

GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}


def limited(pg: Any, num_experts: int = 4, **changes: Any) -> tuple[Any, Any]:
    """Both routers, whose experts have room for their even share."""
    capacity = {"moe_expert_capacity_factor": 1.0, "moe_token_dispatcher_type": "alltoall"}
    return both_routers(pg, num_experts, **capacity, **changes)


def test_counters_of_the_global_loss_stop_at_256_micro_batches(pg: Any) -> None:
    """E3: the 257th micro-batch of a step in bf16, with all tokens alike."""
    stock, ours = both_routers(pg, 4, **GLOBAL, **BF16)
    wrapped = EngineFloat16Module(stock.config, stock), Float16Module(ours.config, ours)
    stock.ga_steps.fill_(256)
    wrapped[0](torch.zeros(4, 1, 4))
    for _ in range(257):
        ours(torch.zeros(1, 1, 4, dtype=torch.bfloat16))
    assert present("E3") == (stock.ga_steps.item() == 256)
    assert our_loss(ours, "global_aux_loss") == pytest.approx(1.0, rel=1e-6)


def test_the_global_loss_divides_by_the_last_micro_batchs_tokens(pg: Any) -> None:
    """E13: six tokens and then two, with uniform scores: E x sum of f P is 1 for any f."""
    stock, ours = both_routers(pg, 4, **GLOBAL)
    for router in (stock, ours):
        router(torch.zeros(6, 1, 4))
        router(torch.zeros(2, 1, 4))
    assert our_loss(ours, "global_aux_loss") == pytest.approx(1.0)
    mean = engine_logged("global_load_balancing_loss", pg) / 2
    assert mean == pytest.approx(1.5 if present("E13") else 1.0)


def test_with_padded_experts_the_bias_stands_still(pg: Any) -> None:
    """N4: six tokens for expert 0, one for each of the next two, and capacities of two, filled up."""
    stock, ours = limited(pg, moe_router_enable_expert_bias=True, moe_pad_expert_input_to_capacity=True)
    for router in (stock, ours):
        router(one_hot_logits([0] * 6 + [1, 2], 4))
    _update_router_expert_bias([stock], stock.config)
    update_routers([ours])
    assert ours.expert_bias.sign().tolist() == [-1, 1, 1, 1]
    assert present("N4") == (not stock.expert_bias.any())


def test_dropping_by_position_keeps_other_tokens_than_the_first(pg: Any) -> None:
    """N5: the tokens that expert 0 keeps of 64 that all want it."""
    hidden = one_hot_logits([0] * 64, 4)
    stock, ours = (
        router(hidden)[1][:, 0].nonzero().flatten().tolist() for router in limited(pg, moe_token_drop_policy="position")
    )
    assert ours == list(range(16)) and len(stock) == 16
    assert present("N5") == (stock != ours)


def dropped_on_two_ranks() -> list[int]:
    """Rank r has 4 tokens, all for expert r: of 8 tokens, half of the capacity that 2 experts have together."""
    routers = limited(groups.initialize(replace(Run(), **SP2)), 2, **SP2)
    hidden = one_hot_logits([dist.get_rank()] * 4, 2)
    return [4 - int(router(hidden)[1].sum()) for router in routers]


def test_each_rank_drops_tokens_by_a_capacity_of_its_own(gloo: Any) -> None:
    assert gloo.run(2, dropped_on_two_ranks) == [[2 if present("N6") else 0, 0]] * 2


def test_sinkhorn_overflows(pg: Any) -> None:
    """N7: whether 16 tokens choose the same experts with all logits higher by 50 and by 100."""
    sinkhorn = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_score_function": "softmax"}
    hidden = torch.randn(16, 1, 4, generator=torch.Generator().manual_seed(3))
    stock, ours = (
        [torch.equal(router(hidden)[1], router(hidden + shift)[1]) for shift in (50.0, 100.0)]
        for router in both_routers(pg, 4, moe_router_topk=2, **sinkhorn)
    )
    assert ours == [True, True]
    assert stock == [True, not present("N7")]


def test_jitter_is_coarse_in_bf16_and_drawn_in_evaluation(pg: Any) -> None:
    stock, ours = both_routers(pg, 4, moe_input_jitter_eps=0.01, **BF16)
    ones = torch.ones(1000, 1, 4, dtype=torch.bfloat16)
    few, many = stock.apply_input_jitter(ones).unique().numel(), ours.perturb(ones, True).unique().numel()
    assert many > 1000 and present("N8") == (few < 10)
    with torch.no_grad():
        same = [torch.equal(router(ones)[0], router(ones)[0]) for router in (stock.eval(), ours.eval())]
    assert same == [not present("N8"), True]
