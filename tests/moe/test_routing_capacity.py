"""Capacity, Sinkhorn, jitter and round robin of one router, beside the engine's own functions where they are right."""

import copy
import math
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from megatron_moe import TopKRouter
from megatron_moe.moe.dispatch import PaddedDispatcher, build_layer_dispatcher, micro_batches_among
from megatron_moe.moe.load_balance import GlobalBatch, TokenCountError
from megatron_moe.moe.options import moe_groups
from megatron_moe.moe.router import Jitter, announce_global_batch
from megatron_moe.moe.routing import capacity, kept_choices, sinkhorn_scores
from megatron_moe.moe.routing_probe import RoutingProbe
from megatron_moe.training.finalize_model_grads import update_routers
from tests.helpers.routers import config, tokens
from tests.numbers import reference_moe as reference

pytestmark = pytest.mark.engine

SOFTMAX = dict(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)


def router(**changes: Any) -> TopKRouter:
    torch.manual_seed(0)
    return TopKRouter(config(**{**SOFTMAX, **changes}))


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.3, 0.9, 1.6])
def test_on_one_rank_the_kept_choices_are_megatrons(policy: str, factor: float) -> None:
    r = router(moe_expert_capacity_factor=factor, moe_token_drop_policy=policy).eval()
    hidden = tokens(60)
    free_probs, free_map = router().eval()(hidden)
    wanted_probs, wanted_map = moe_utils.apply_router_token_dropping(
        free_probs, free_map, router_topk=2, capacity_factor=factor, drop_policy=policy, pad_to_capacity=False
    )
    if policy == "position":  # the engine leaves to topk which of equal flags are taken; ours are the first
        size = moe_utils.get_capacity(60 * 2, 8, factor)
        wanted_map = free_map & (free_map.long().cumsum(0) <= size)
        wanted_probs = free_probs * wanted_map
    ours, our_map = r(hidden)
    assert torch.equal(our_map, wanted_map) and torch.equal(ours, wanted_probs)
    assert our_map.sum() < 120 or factor > 1.5


def test_the_capacity_is_the_even_share_times_the_factor_rounded_up() -> None:
    assert capacity(60, 2, 8, 1.0) == 15 == moe_utils.get_capacity(120, 8, 1.0)
    assert capacity(60, 2, 8, 1.1) == 17 == moe_utils.get_capacity(120, 8, 1.1)
    assert capacity(4, 2, 2, 8.0) == 4  # no expert is chosen twice by a token


def test_equal_weights_are_kept_by_position() -> None:
    ids = torch.tensor([[0, 1], [0, 1], [1, 0], [2, 0]])
    weights = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.4, 0.6]])
    position = torch.tensor([3, 0, 2, 1])
    kept = kept_choices(ids, weights, position, size=2, num_experts=3)
    # expert 0: token 3 weighs most, then token 1 stands first; expert 1: positions 0 and 2.
    assert kept.tolist() == [[False, False], [True, True], [True, False], [True, True]]


def test_sinkhorn_has_megatrons_scores_and_the_references() -> None:
    logits = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    balanced = sinkhorn_scores(logits, None, moe_groups().tp_cp)
    engine = moe_utils.sinkhorn(logits)
    slow = torch.tensor(reference.sinkhorn(logits.tolist()), dtype=torch.float64)
    for scores in (engine.double(), slow):  # equal up to a factor per token
        torch.testing.assert_close(
            balanced / balanced.sum(1, keepdim=True), scores / scores.sum(1, keepdim=True), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_chooses_in_training_only_and_weighs_by_unbalanced_scores(topk: int) -> None:
    r = router(moe_router_load_balancing_type="sinkhorn", moe_router_topk=topk)
    with torch.no_grad():
        r.weight[0] += 1.0  # a favourite
    hidden = tokens(64).abs()
    logits = r.gate(hidden)
    scores = torch.sigmoid(logits) if topk == 1 else torch.softmax(logits, dim=-1)
    trained = r.route(hidden)
    assert torch.equal(trained.probs, scores.gather(1, trained.expert_ids))
    counts = torch.bincount(trained.expert_ids.flatten(), minlength=8)
    evaluated = r.eval().route(hidden)
    assert torch.equal(evaluated.expert_ids, logits.topk(topk).indices)
    assert counts.max() < torch.bincount(evaluated.expert_ids.flatten(), minlength=8).max()


def test_jitter_moves_the_gate_in_training_and_nothing_else() -> None:
    r = router(moe_input_jitter_eps=0.2)
    hidden = tokens().requires_grad_()
    first, second = r.route(hidden).probs, r.route(hidden).probs
    assert not torch.equal(first, second)
    assert torch.equal(r.eval().route(hidden).probs, router().eval().route(hidden).probs)
    noisy = Jitter(0.2, torch.float32)(torch.ones(1000, 4, dtype=torch.bfloat16), training=True)
    assert noisy.dtype == torch.float32 and noisy.min() >= 0.8 and noisy.max() <= 1.2
    assert abs(noisy.mean() - 1) < 0.01 and noisy.unique().numel() > 3000


def test_recomputation_draws_the_same_jitter() -> None:
    from megatron.core.tensor_parallel import checkpoint

    seen: list[torch.Tensor] = []
    r = router(moe_input_jitter_eps=0.2)

    def route(x: torch.Tensor) -> torch.Tensor:
        decision = r.route(x)
        seen.append(decision.probs.detach())
        return decision.probs

    checkpoint(route, False, tokens().requires_grad_()).sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)


@pytest.mark.parametrize(
    "changes", [dict(moe_router_force_load_balancing=True), {"moe_router_load_balancing_type": "sinkhorn"}]
)
def test_no_flips_are_looked_for_where_the_choice_is_not_by_score(changes: dict[str, Any]) -> None:
    r = router(**changes)
    probe = RoutingProbe(8, 1)
    with r.observed_by(probe.see):
        r.route(tokens())
    assert probe.sums.tolist() == [0.0, 0.0, 0.0] and probe.max_logit > 0


def test_a_count_that_is_not_its_tokens_stops_the_step() -> None:
    r = router()
    r.route(tokens())
    r.local_tokens_per_expert[3] += 1
    with pytest.raises(TokenCountError, match="10 tokens of the global batch x 2 experts are 20 choices, but 21 were"):
        update_routers([r])
    r.reset_counts()
    announce_global_batch([r], GlobalBatch(30, 1.0))
    r.route(tokens())
    with pytest.raises(TokenCountError, match="30 tokens of the global batch x 2 experts are 60 choices, but 20 were"):
        update_routers([r])


def test_padded_experts_get_a_fixed_number_of_rows_and_a_copy_shares_the_groups() -> None:
    r = router(moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=True)
    dispatcher = build_layer_dispatcher(r.options, moe_groups())
    assert isinstance(dispatcher, PaddedDispatcher)
    for seed in range(3):
        hidden = torch.randn(40, 16, generator=torch.Generator().manual_seed(seed))
        experts, _ = dispatcher.dispatch(hidden, r.route(hidden))
        assert experts.rows.shape == (8 * 5, 16) and experts.offsets.tolist() == [5 * n for n in range(1, 9)]
    assert copy.deepcopy(r).local_dropped_per_expert.tolist() == r.local_dropped_per_expert.tolist()


def test_the_padded_number_holds_all_micro_batches_of_an_expert_group() -> None:
    for expert, sharing, wanted in ((8, 2, 4), (2, 8, 1), (4, 4, 1), (6, 4, 3)):
        assert micro_batches_among(expert, sharing) == wanted
        # The worst place of the group: how many blocks of `sharing` ranks it touches.
        touched = {math.ceil((start + expert) / sharing) - start // sharing for start in range(0, 24, expert)}
        assert max(touched) <= wanted
