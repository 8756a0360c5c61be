"""How clearly a router's choices are decided, and how exact its arithmetic is, as the doctor sees them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_moe.moe.routing import MicroBatch, RoutedTokens, RoutingDecision
from megatron_moe_tools.doctor.measure import RouterRecord

OPTIONS = {
    "topk": 1, "num_experts": 3, "num_groups": None, "group_topk": None, "group_score": "max",
    "score_function": "softmax", "pre_softmax": True, "norm_topk_prob": False, "scaling_factor": None,
    "sinkhorn": False, "enable_expert_bias": False, "drop_policy": "probs",
}  # fmt: skip


def seen(scores: list[list[float]], rounded: bool = False, kept: list[bool] | None = None, **options) -> RouterRecord:
    """The record of a router whose weight is the identity, so that the hidden states are its logits."""
    hidden = torch.tensor(scores).log()
    router = SimpleNamespace(
        options=SimpleNamespace(**{**OPTIONS, **options}), weight=torch.eye(hidden.shape[1]), expert_bias=None
    )
    logits = hidden.bfloat16().float() if rounded else hidden
    probs, ids = torch.tensor(scores).max(dim=-1, keepdim=True)
    mask = None if kept is None else torch.tensor(kept).unsqueeze(1)
    probs = probs if mask is None else probs.masked_fill(~mask, 0.0)
    record = RouterRecord()
    decision, micro_batch = RoutingDecision(ids, probs, mask), MicroBatch(None, 1, True)
    record.see(router, RoutedTokens(hidden, logits, torch.tensor(scores), decision, micro_batch, counted=True))
    return record


def test_the_margin_is_between_the_last_chosen_and_the_first_not_chosen():
    record = seen([[0.5, 0.3, 0.2], [0.4, 0.25, 0.35]])
    assert record.margins[0].tolist() == pytest.approx([0.2, 0.05])
    assert record.smallest == pytest.approx(0.05)


def test_a_group_may_be_nearer_to_another_one_than_the_experts_in_it_are():
    groups = {"num_experts": 4, "num_groups": 2, "group_topk": 1}
    record = seen([[0.4, 0.1, 0.38, 0.12]], **groups)
    assert record.margins[0].tolist() == pytest.approx([0.02], abs=1e-6)


def test_what_a_capacity_turns_away_has_a_margin_of_its_own():
    scores = [[0.6, 0.2, 0.2], [0.58, 0.22, 0.2], [0.1, 0.7, 0.2]]
    assert seen(scores).smallest == pytest.approx(0.36)
    assert seen(scores, kept=[True, False, True]).smallest == pytest.approx(0.02, abs=1e-6)
    assert seen(scores, kept=[True, False, True], drop_policy="position").smallest == pytest.approx(0.36)


def test_logits_that_were_rounded_to_bf16_are_an_error_and_a_dropped_choice_is_none():
    scores = [[0.6, 0.2, 0.2], [0.58, 0.22, 0.2]]
    assert seen(scores, kept=[True, False]).error < 1e-6
    assert seen(scores, rounded=True).error > 1e-3
