"""Groups of experts as megatron-core chooses them, held against its own function: experts, weights and gradients."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from megatron_moe import TopKRouter
from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.options import MoEOptions, moe_groups
from megatron_moe.moe.routing import MicroBatch, chosen_experts, route, scores_from_logits
from megatron_moe.moe.routing_probe import RoutingProbe
from megatron_moe_tools.doctor.measure import RouterRecord
from tests.helpers.routers import config, tokens

pytestmark = pytest.mark.engine

TOKENS = 48
SOFTMAX = dict(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)
GROUPS = dict(moe_router_num_groups=4, moe_router_group_topk=1)


def drawn(generator: torch.Generator, group_score: str) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
    """Options of a router, logits [TOKENS, E] and a bias or None. Every third draw has whole logits, that is ties."""

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    groups, size = pick(1, 2, 4, 8), pick(1, 2, 3, 4, 8, 16)
    group_topk = pick(*range(1, groups + 1))
    function = pick("softmax", "sigmoid")
    pre_softmax = function == "softmax" and pick(True, False)
    topk = pick(*range(group_topk, min(size * group_topk, 12) + 1))
    options = SimpleNamespace(
        num_experts=groups * size,
        enable_expert_bias=False,
        topk=topk,
        score_function=function,
        pre_softmax=pre_softmax,
        norm_topk_prob=topk > 1 if function == "sigmoid" else not pre_softmax,
        num_groups=groups,
        group_topk=group_topk,
        group_score=group_score,
        scaling_factor=pick(None, 2.5),
        force_load_balancing=False,
        sinkhorn=False,
    )
    logits = torch.randn(TOKENS, groups * size, generator=generator) * pick(0.5, 2.0, 8.0)
    bias = torch.randn(groups * size, generator=generator) / 4 if function == "sigmoid" and pick(True, False) else None
    options.enable_expert_bias = bias is not None
    return options, logits.round() if pick(True, False, False) else logits, bias


def by_engine(logits: torch.Tensor, bias: torch.Tensor | None, options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, E] and the map of chosen experts [T, E] by megatron-core's own function."""
    return moe_utils.topk_routing_with_score_function(
        logits,
        options.topk,
        use_pre_softmax=options.pre_softmax,
        num_groups=options.num_groups,
        group_topk=options.group_topk,
        scaling_factor=options.scaling_factor,
        score_function=options.score_function,
        expert_bias=bias,
    )


def other_choices(group_score: str, draws: int) -> set[str]:
    """The kinds of router in which a rule ever chose other experts than megatron-core; where it chose the same ones,
    weights and gradients are compared."""
    generator, differing = torch.Generator().manual_seed(0), set()
    for _ in range(draws):
        options, logits, bias = drawn(generator, group_score)
        if group_score == "top2" and options.num_experts == options.num_groups:
            continue  # needs two experts in a group
        ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
        scores = scores_from_logits(ours, options)
        decision = route(
            ours, scores, bias, options, MicroBatch(None, 1, True), partial(chosen_experts, options, moe_groups())
        )
        probs, routing_map = by_engine(theirs, bias, options)
        if not torch.equal(torch.zeros_like(routing_map).scatter(1, decision.expert_ids, True), routing_map):
            differing.add("pre_softmax" if options.pre_softmax else options.score_function)
            continue
        dense = torch.zeros_like(probs).scatter(1, decision.expert_ids, decision.probs)
        torch.testing.assert_close(dense, probs, rtol=1e-6, atol=1e-7)
        weight = torch.randn(probs.shape, generator=generator)
        (dense * weight).sum().backward()
        (probs * weight).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    return differing


def test_megatrons_rule_gives_the_engines_experts_weights_and_gradients() -> None:
    assert other_choices("megatron", draws=150) == set()


@pytest.mark.parametrize("rule", ["max", "top2"])
def test_the_other_rules_choose_other_experts_than_the_engine(rule: str) -> None:
    """So the comparison can fail, for each kind of score."""
    assert other_choices(rule, draws=30) == {"softmax", "pre_softmax", "sigmoid"}


def test_a_run_and_a_configuration_that_names_a_rule_mean_that_rule() -> None:
    run = replace(Run(), num_experts=16, moe_router_topk=4, **GROUPS)
    assert MoEOptions.from_run(run).group_score == "top2"
    assert MoEOptions.from_run(replace(run, moe_router_group_score="max")).group_score == "max"
    stock = config(num_moe_experts=16, moe_router_topk=4, **GROUPS)
    assert MoEOptions.from_engine_config(stock).group_score == "megatron"
    stock.moe_router_group_score = "max"
    assert MoEOptions.from_engine_config(stock).group_score == "max"


def test_a_group_of_which_nothing_would_be_added_up_is_refused() -> None:
    stock = config(moe_router_num_groups=4, moe_router_group_topk=3)
    with pytest.raises(ValueError, match="moe_router_topk 2, moe_router_group_topk 3.*2 or less"):
        TopKRouter(stock)
    stock.moe_router_group_score = "top2"
    TopKRouter(stock)


def test_a_score_function_that_is_not_ours_is_refused() -> None:
    stock = config()
    stock.moe_router_score_function = "sqrtsoftplus"  # 0.19.2 knows it, and 0.16.1 does not
    with pytest.raises(ValueError, match="moe_router_score_function sqrtsoftplus: .*sigmoid"):
        TopKRouter(stock)


def test_what_watches_a_router_goes_by_the_values_that_it_ranks() -> None:
    r = TopKRouter(config(num_moe_experts=16, moe_router_topk=2, **GROUPS, **SOFTMAX))
    hidden = 8 * tokens(64)
    logits = r.gate(hidden).detach().double()
    sums = logits.view(64, 4, 4).topk(2).values.sum(-1)
    inside = logits.view(64, 4, 4)[torch.arange(64), sums.argmax(-1)].sort(descending=True).values
    margins = inside[:, 1] - inside[:, 2]

    probe, record = RoutingProbe(num_tokens=64, num_micro_batches=1), RouterRecord()  # the doctor's
    with r.observed_by(probe.see), r.observed_by(record.see):
        r.route(hidden)
    assert probe.sums is not None
    assert probe.sums.tolist() == pytest.approx([64, 0, margins.sum().item()])

    best, second = sums.topk(2).values.unbind(-1)
    assert record.smallest == pytest.approx(min(margins.min().item(), (best - second).min().item()))
