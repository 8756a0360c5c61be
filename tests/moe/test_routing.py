"""Routing at the ends of its range, the places of split tokens, and what a router reports of one step after another."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_moe import TopKRouter
from megatron_moe.moe.options import MoEOptions, moe_groups
from megatron_moe.moe.routing import MicroBatch, RoutingDecision, chosen_experts, positions, route, scores_from_logits
from megatron_moe.parallel.sequence import context_parallel_slice
from megatron_moe.training.finalize_model_grads import update_routers
from tests.helpers.routers import config
from tests.numbers import reference_moe as reference

GROUPED = dict(moe_router_num_groups=4, moe_router_group_topk=2)


def decide(logits: torch.Tensor, bias: torch.Tensor | None = None, **changes: Any) -> RoutingDecision:
    return routed_by(logits, bias, MoEOptions.from_engine_config(config(**changes)))


def routed_by(logits: torch.Tensor, bias: torch.Tensor | None, options: MoEOptions) -> RoutingDecision:
    scores = scores_from_logits(logits, options)
    return route(
        logits, scores, bias, options, MicroBatch(None, 1, True), partial(chosen_experts, options, moe_groups())
    )


@pytest.mark.parametrize("shift", [0.0, -3.0])
def test_an_expert_outside_the_best_groups_is_never_chosen_however_low_the_others_are(shift: float) -> None:
    """Groups that are left out have to lie below any score plus bias, and a bias may be negative."""
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(8, generator=torch.Generator().manual_seed(1)) / 4 + shift
    decision = decide(logits, bias, **GROUPED)
    routing = reference.Routing(2, "sigmoid", num_groups=4, group_topk=2, group_score="megatron")
    for token, ids, probs in zip(logits, decision.expert_ids, decision.probs):
        chosen, weights = reference.route_one(token, bias, routing)
        assert ids.tolist() == chosen
        torch.testing.assert_close(probs, weights)


def test_scores_that_all_underflow_give_weights_of_zero() -> None:
    decision = decide(torch.full((3, 8), -200.0))
    assert torch.equal(decision.probs, torch.zeros(3, 2))


def test_weights_by_softmax_are_exact_where_the_chosen_scores_underflow() -> None:
    stock = config(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)
    options = replace(MoEOptions.from_engine_config(stock), enable_expert_bias=True)
    logits, bias = torch.tensor([[200.0] + [0.0] * 7]), torch.tensor([-9.0] * 6 + [0.5, 0.0])
    decision = routed_by(logits, bias, options)
    assert decision.expert_ids.tolist() == [[6, 7]] and decision.probs.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_logit_that_is_not_finite_spoils_its_tokens_weights_and_no_others(value: float) -> None:
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    logits[2, 5] = value
    spoiled = decide(logits).probs.isnan()
    assert spoiled[2].all() and not spoiled[[0, 1, 3]].any()


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_the_places_of_a_ranks_tokens_are_those_of_the_whole_micro_batch(tp: int, cp: int) -> None:
    length, sequences = 16, 3
    whole = torch.arange(length * sequences).view(length, sequences)
    for cp_rank in range(cp):
        mine = context_parallel_slice(whole.t(), cp_rank, cp).t() if cp > 1 else whole
        for tp_rank, part in enumerate(mine.chunk(tp)):
            both = Group(cp_rank * tp + tp_rank, cp * tp)
            groups = replace(moe_groups(), tp=Group(tp_rank, tp), tp_cp=both)
            assert positions(part.numel(), sequences, groups, part.device).tolist() == part.flatten().tolist()


def test_what_is_reported_of_a_step_is_of_that_step_alone() -> None:
    torch.manual_seed(0)
    router = TopKRouter(
        config(
            moe_router_load_balancing_type=["seq_aux_loss", "global_aux_loss"],
            moe_aux_loss_coeff=[0.1, 0.2],
            moe_z_loss_coeff=0.1,
            moe_expert_capacity_factor=0.75,
        )
    )
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    weights = reference.Weights(router.weight.detach(), torch.zeros(8, 2, 1, 16), torch.zeros(8, 16, 1))
    routing = reference.Routing(2, "sigmoid", capacity_factor=0.75)
    for step in range(3):
        hidden = torch.randn(20, 16, generator=torch.Generator().manual_seed(step))
        weights.bias = router.expert_bias.clone()
        router.route(hidden)
        told, wanted = update_routers([router]), reference.moe_layer(hidden, weights, routing)
        balance = reference.balance_loss(wanted, 2, "sigmoid").item()
        losses = {"seq_aux_loss": balance, "global_aux_loss": balance, "z_loss": reference.z_loss(wanted).item()}
        assert {name: float(value) for name, value in told.aux_losses[0].items()} == pytest.approx(losses, rel=1e-5)
        dropped = [sum(expert == e for _, expert in wanted.dropped) for e in range(8)]
        assert told.tokens_per_expert[0].tolist() == wanted.counts
        assert told.dropped_per_expert[0].tolist() == dropped and sum(dropped) > 0
        demand = [kept + lost for kept, lost in zip(wanted.counts, dropped)]
        assert told.expert_bias[0].tolist() == reference.bias_step(weights.bias.tolist(), demand, 1e-3)
