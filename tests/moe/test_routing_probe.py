"""What the probe says of a router's choices, against values computed by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_moe.moe.routing import MicroBatch, RoutedTokens, RoutingDecision, choose_experts, scores_from_logits
from megatron_moe.moe.routing_probe import RoutingProbe, choice_margins, evenly, flipped, margin_percentile


def options(**changes: Any) -> Any:
    given: dict[str, Any] = dict(score_function="sigmoid", topk=1, num_experts=3, num_groups=None, group_topk=None)
    return SimpleNamespace(
        **{**given, "chooses_by_score": True, "enable_expert_bias": False, "group_score": "max", **changes}
    )


def router(weight: torch.Tensor, bias: torch.Tensor | None = None, **changes: Any) -> Any:
    found = {"weight": weight, "expert_bias": bias, "options": options(num_experts=len(weight), **changes)}
    logits = lambda hidden: hidden.double() @ weight.double().T  # noqa: E731
    return SimpleNamespace(layer_number=1, logits_in_fp64=logits, **found)


def see(probe: RoutingProbe, gate: Any, hidden: torch.Tensor, is_padding: torch.Tensor | None = None) -> None:
    logits = hidden.float() @ gate.weight.float().T
    scores = scores_from_logits(logits, gate.options)
    ids = choose_experts(scores, gate.expert_bias, gate.options)
    decision = RoutingDecision(ids, ids.float())
    probe.see(gate, RoutedTokens(hidden, logits, scores, decision, MicroBatch(is_padding, 1, True), counted=True))


def test_margins_are_those_of_the_biased_choice() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.4], [0.5, 0.5, 0.1]])
    assert choice_margins(scores, None, options()).tolist() == pytest.approx([0.4, 0.0])
    # With the bias, 0.9 0.5 0.8 and 0.5 0.5 0.5.
    bias = torch.tensor([0.0, 0.0, 0.4])
    assert choice_margins(scores, bias, options()).tolist() == pytest.approx([0.1, 0.0], abs=1e-7)


def test_margins_respect_groups_and_leave_out_tokens_without_an_alternative() -> None:
    scores = torch.tensor([[0.9, 0.2, 0.8, 0.7]])
    groups = {"num_experts": 4, "num_groups": 2, "group_topk": 1}
    assert choice_margins(scores, None, options(**groups)).tolist() == pytest.approx([0.7])  # not 0.9 - 0.8
    assert choice_margins(scores, None, options(**groups, topk=2)).tolist() == []
    assert choice_margins(scores[:, :3], None, options(topk=3)).tolist() == []


def test_a_planted_rounding_error_is_a_flip() -> None:
    # The second expert is better by 2^-30: fp64 sees it, while fp32 rounds the sum 1 + 2^-30 to 1 and takes the first.
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0**-30], [-1.0, 0.0]])
    hidden = torch.tensor([[1.0, 1.0], [1.0, -1.0], [0.5, 0.0]])
    decided = torch.zeros(3, 1, dtype=torch.int64)
    assert flipped(router(weight), hidden, decided).tolist() == [1.0, 0.0, 0.0]
    # The order of the chosen does not matter, the set does.
    both = torch.tensor([[1, 0], [1, 0], [0, 2]])
    assert flipped(router(weight, topk=2), hidden, both).tolist() == [0.0, 0.0, 1.0]


def test_the_shadow_chooses_with_the_bias() -> None:
    gate = router(torch.eye(3), torch.tensor([0.0, 0.0, 5.0]))
    hidden = torch.tensor([[1.0, 0.0, 0.0]])
    assert flipped(gate, hidden, torch.tensor([[2]])).tolist() == [0.0]
    assert flipped(gate, hidden, torch.tensor([[0]])).tolist() == [1.0]


def test_one_step_is_added_up_over_its_micro_batches_and_padding_is_left_out() -> None:
    gate, probe = router(torch.eye(3)), RoutingProbe(3, num_micro_batches=2)
    see(probe, gate, torch.tensor([[2.0, 1.0, 0.0], [9.0, 0.0, 0.0]]), torch.tensor([False, True]))
    see(probe, gate, torch.tensor([[0.0, -4.0, 0.0], [1.0, 3.0, 0.0]]))
    assert probe.sums is not None and probe.margin_histogram is not None and probe.max_logit is not None
    sampled, flips, margin_sum = probe.sums.tolist()
    sigmoid = torch.sigmoid(torch.tensor([1.0, 2.0, 3.0])).tolist()
    with pytest.raises(RuntimeError, match="a micro-batch whose sources are not known"):
        see(RoutingProbe(3, num_micro_batches=2, num_sources=2), gate, torch.zeros(1, 3))
    # One token of the first micro-batch, both of the second; [0, -4, 0] is a tie.
    assert (sampled, flips, probe.margin_histogram.sum()) == (3, 0, 3)
    assert margin_sum == pytest.approx((sigmoid[1] - sigmoid[0]) + 0.0 + (sigmoid[2] - sigmoid[0]), abs=1e-6)
    assert probe.max_logit == 4.0
    assert margin_percentile(probe.margin_histogram.tolist(), 0.05) == 0.0


def test_a_logit_that_is_no_number_makes_the_largest_infinite() -> None:
    gate, probe = router(torch.eye(3)), RoutingProbe(4, num_micro_batches=1)
    see(probe, gate, torch.tensor([[1.0, math.nan, 0.0]]))
    assert probe.max_logit is not None and probe.max_logit.isinf()


@pytest.mark.parametrize(
    ("number", "wanted", "taken"), [(8, 4, [0, 2, 4, 6]), (3, 5, [0, 1, 2]), (5, 0, []), (0, 3, [])]
)
def test_samples_are_evenly_spread_and_always_the_same(number: int, wanted: int, taken: list[int]) -> None:
    assert evenly(number, wanted, torch.device("cpu")).tolist() == taken


def test_as_many_tokens_are_sampled_as_were_asked_for() -> None:
    gate, probe = router(torch.eye(3)), RoutingProbe(10, num_micro_batches=4)
    for _ in range(4):
        see(probe, gate, torch.rand(8, 3))
    assert probe.sums is not None and probe.sums[0] == 10


def test_percentiles_are_good_to_nine_percent() -> None:
    gate, probe = router(torch.eye(3)), RoutingProbe(1000, num_micro_batches=1)
    hidden = torch.randn(1000, 3, generator=torch.Generator().manual_seed(3))
    see(probe, gate, hidden)
    margins = choice_margins(torch.sigmoid(hidden), None, gate.options)
    assert probe.margin_histogram is not None
    for share in (0.05, 0.5, 0.9):
        exact = margins.sort().values[math.ceil(share * 1000) - 1].item()
        found = margin_percentile(probe.margin_histogram.tolist(), share)
        assert found is not None and exact / 2**0.125 <= found <= exact
    assert margin_percentile([0, 0], 0.5) is None
