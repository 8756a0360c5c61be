"""The engine's capacity, sinkhorn, jitter and global loss: each known defect shows there, and not in ours."""

from __future__ import annotations

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
from tests.platform.stock import both_routers, engine_logged, one_hot_logits, present

pytestmark = pytest.mark.engine

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def limited(pg: Any, **changes: Any) -> tuple[Any, Any]:
    """Both routers, 4 experts, each with room for its even share."""
    return both_routers(pg, 4, moe_expert_capacity_factor=1.0, moe_token_dispatcher_type="alltoall", **changes)


# ---- E3, E13: the global loss


def counted_micro_batches() -> dict[str, Any]:
    """The 257th micro-batch of a step in bf16: what the engine counts, and the loss of ours, all tokens alike."""
    pg = groups.initialize(Run())
    stock, ours = both_routers(pg, 4, **GLOBAL, **BF16)
    wrapped = EngineFloat16Module(stock.config, stock), Float16Module(ours.config, ours)
    stock.ga_steps.fill_(256)
    wrapped[0](torch.zeros(4, 1, 4))
    for _ in range(257):
        ours(torch.zeros(1, 1, 4, dtype=torch.bfloat16))
    return {"steps": stock.ga_steps.item(), "ours": float(update_routers([ours]).aux_losses[0]["global_aux_loss"])}


def test_counters_of_the_global_loss_stop_at_256_micro_batches(gloo: Any) -> None:
    (found,) = gloo.run(1, counted_micro_batches)
    assert present("E3") == (found["steps"] == 256)
    assert found["ours"] == pytest.approx(1.0, rel=1e-6)


def unequal_micro_batches() -> dict[str, float]:
    """Six tokens and then two, with uniform scores: E x sum of f P is 1, whatever f is."""
    pg = groups.initialize(Run())
    stock, ours = both_routers(pg, 4, **GLOBAL)
    for router in (stock, ours):
        router(torch.zeros(6, 1, 4))
        router(torch.zeros(2, 1, 4))
    return {
        "stock": engine_logged("global_load_balancing_loss", pg) / 2,
        "ours": float(update_routers([ours]).aux_losses[0]["global_aux_loss"]),
    }


def test_the_global_loss_divides_by_the_last_micro_batchs_tokens(gloo: Any) -> None:
    (mean,) = gloo.run(1, unequal_micro_batches)
    assert mean["ours"] == pytest.approx(1.0)
    assert mean["stock"] == pytest.approx(1.5 if present("E13") else 1.0)


# ---- N4, N5, N6: capacity


def padded_bias() -> dict[str, list[float]]:
    """Six tokens for expert 0, one for each of the next two, and capacities of two, filled up."""
    pg = groups.initialize(Run())
    stock, ours = limited(pg, moe_router_enable_expert_bias=True, moe_pad_expert_input_to_capacity=True)
    for router in (stock, ours):
        router(one_hot_logits([0] * 6 + [1, 2], 4))
    _update_router_expert_bias([stock], stock.config)
    update_routers([ours])
    return {name: torch.sign(r.expert_bias).tolist() for name, r in (("stock", stock), ("ours", ours))}


def test_with_padded_experts_the_bias_stands_still(gloo: Any) -> None:
    (sign,) = gloo.run(1, padded_bias)
    assert sign["ours"] == [-1, 1, 1, 1]
    assert present("N4") == (sign["stock"] == [0, 0, 0, 0])


def first_tokens() -> dict[str, list[int]]:
    """The tokens that expert 0 keeps of 64 that all want it."""
    stock, ours = limited(groups.initialize(Run()), moe_token_drop_policy="position")
    hidden = one_hot_logits([0] * 64, 4)
    return {name: r(hidden)[1][:, 0].nonzero().flatten().tolist() for name, r in (("stock", stock), ("ours", ours))}


def test_dropping_by_position_keeps_other_tokens_than_the_first(gloo: Any) -> None:
    (kept,) = gloo.run(1, first_tokens)
    assert kept["ours"] == list(range(16)) and len(kept["stock"]) == 16
    assert present("N5") == (kept["stock"] != kept["ours"])


def dropped_on_two_ranks() -> dict[str, int]:
    """Rank r has 4 tokens, all for expert r: of 8 tokens, half of the capacity that 2 experts have together."""
    pg = groups.initialize(replace(Run(), **SP2))
    routers = both_routers(pg, 2, moe_expert_capacity_factor=1.0, moe_token_dispatcher_type="alltoall", **SP2)
    hidden = one_hot_logits([dist.get_rank()] * 4, 2)
    return {name: 4 - int(router(hidden)[1].sum()) for name, router in zip(("stock", "ours"), routers)}


def test_each_rank_drops_tokens_by_a_capacity_of_its_own(gloo: Any) -> None:
    for dropped in gloo.run(2, dropped_on_two_ranks):
        assert dropped["ours"] == 0
        assert present("N6") == (dropped["stock"] == 2)


# ---- N7, N8: sinkhorn and jitter


def shifted_choices() -> dict[str, list[bool]]:
    """Whether 16 tokens choose the same experts with all logits higher by 50 and by 100."""
    pg = groups.initialize(Run())
    sinkhorn = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_score_function": "softmax"}
    routers = both_routers(pg, 4, moe_router_topk=2, **sinkhorn)
    hidden = torch.randn(16, 1, 4, generator=torch.Generator().manual_seed(3))
    return {
        name: [torch.equal(router(hidden)[1], router(hidden + shift)[1]) for shift in (50.0, 100.0)]
        for name, router in zip(("stock", "ours"), routers)
    }


def test_sinkhorn_overflows(gloo: Any) -> None:
    (same,) = gloo.run(1, shifted_choices)
    assert same["ours"] == [True, True]
    assert same["stock"][0] and present("N7") == (not same["stock"][1])


def jittered() -> dict[str, Any]:
    pg = groups.initialize(Run())
    stock, ours = both_routers(pg, 4, moe_input_jitter_eps=0.01, **BF16)
    ones = torch.ones(1000, 1, 4, dtype=torch.bfloat16)
    found: dict[str, Any] = {
        "values": (stock.apply_input_jitter(ones).unique().numel(), ours.perturb(ones, True).unique().numel())
    }
    for name, router in (("stock", stock.eval()), ("ours", ours.eval())):
        with torch.no_grad():
            found[name] = torch.equal(router(ones)[0], router(ones)[0])
    return found


def test_jitter_is_coarse_in_bf16_and_drawn_in_evaluation(gloo: Any) -> None:
    (found,) = gloo.run(1, jittered)
    few, many = found["values"]
    assert many > 1000 and present("N8") == (few < 10)
    assert found["ours"] and present("N8") == (not found["stock"])
