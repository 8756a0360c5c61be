"""Tensors put together from ranks, copies held against each other, and what the comparison says."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch

from megatron_moe.moe.routing import MicroBatch, RoutedTokens, RoutingDecision
from megatron_moe_tools.doctor import compare as compared
from megatron_moe_tools.doctor.compare import (
    DoctorReport,
    FindingOfLayout,
    LayoutFinding,
    Tolerances,
    compare,
    details,
    matching_patterns,
)
from megatron_moe_tools.doctor.layouts import Layout
from megatron_moe_tools.doctor.measure import Cut, RouterRecord, assemble, full_shape, matching_views

EXPERTS, DENSE = "decoder.layers.0.mlp.experts.weight1", "decoder.layers.0.mlp.linear_fc1.weight"
WHOLE, ROUTER = "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.mlp.router.weight"


def tensors(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = {EXPERTS: (2, 2, 4, 3), DENSE: (8, 3), WHOLE: (3,), ROUTER: (2, 3)}
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def record(rank=0, tp=(0, 1), dp_rank=0, begin=0.0, end=1.0):
    """A rank's record: `tp` is (rank, size); gradients are known of the share [begin, end) of every tensor."""
    cuts = {EXPERTS: ((0, *tp, 1), (2, 0, 1, 1)), DENSE: ((0, *tp, 2),), WHOLE: (), ROUTER: ()}
    place = dict.fromkeys(("pp_rank", "cp_rank", "ep_rank", "etp_rank"), 0)
    place |= {"rank": rank, "tp_rank": tp[0], "dp_rank": dp_rank}

    def mine(scale, known=False):
        held = {}
        for name, full in tensors(scale).items():
            local = full
            for axis, index, count, stride in cuts[name]:
                local = torch.cat([block.chunk(count, axis)[index] for block in local.chunk(stride, axis)], axis)
            span = (int(begin * local.numel()), int(end * local.numel())) if known else (0, local.numel())
            held[name] = (cuts[name], local.clone(), (None, *span))
        return held

    layer = {
        "counts": torch.tensor([3, 5]), "dropped": torch.tensor([0, 0]), "margin": 0.01, "router_error": 1e-7,
        "expert_bias": torch.tensor([0.001, -0.001]), "aux_losses": {"aux_loss": 1.25},
    }  # fmt: skip
    step = {
        "loss": 5.0, "tokens": 4, "grad_norm": 2.0, "committed": True, "loss_scale": None, "mtp_losses": [],
        "layers": {"decoder.layers.0": layer},
    }  # fmt: skip
    held = {"initial weight": mine(1.0), "gradient, step 1": mine(0.5, known=True), "weight after step 1": mine(1.1)}
    return copy.deepcopy({"place": place, "steps": [step], "tensors": held})


@pytest.fixture
def oracle():
    return assemble([record()])


def two_ranks():
    return [record(0, (0, 2)), record(1, (1, 2))]


def named(comparison):
    return [(one.quantity, one.name) for one in comparison.differences]


def test_views_of_a_cut_hold_the_same_elements():
    full, cuts = torch.arange(24.0).view(4, 6), (Cut(0, 1, 2, 2), Cut(1, 2, 3, 1))
    local = torch.zeros(2, 2)
    assert full_shape(local, cuts) == [4, 6]
    for target, own in matching_views(full, local, cuts):
        own.copy_(target)
    assert local.tolist() == [[10.0, 11.0], [22.0, 23.0]]


def test_parts_of_ranks_make_the_whole(oracle):
    got = assemble(two_ranks())
    assert all(torch.equal(got.tensors["initial weight"][name], full) for name, full in tensors().items())
    assert got.differences == []
    assert got.cut_over_tp == {DENSE}
    assert compare(got, oracle).agrees


def test_shards_of_a_distributed_optimizer_make_the_whole_and_a_lost_one_is_missed(oracle):
    halves = [record(0, begin=0.0, end=0.5), record(1, dp_rank=1, begin=0.5, end=1.0)]
    assert compare(assemble(halves), oracle).agrees
    lost = compare(assemble([halves[0], record(1, dp_rank=1, begin=0.6, end=1.0)]), oracle)
    assert {one.detail for one in lost.differences if one.quantity == "gradient, step 1"} >= {"no rank has all of it"}


def test_copies_with_other_bits_are_named_with_the_axis_between_them(oracle):
    ranks = two_ranks()
    ranks[1]["tensors"]["weight after step 1"][WHOLE][1][2] += 1e-6
    (one,) = compare(assemble(ranks), oracle).differences
    assert (one.quantity, one.name) == ("copies of weight after step 1", WHOLE)
    assert "ranks 0 and 1, which differ along TP" in one.detail


def test_each_quantity_is_compared(oracle):
    got = assemble(two_ranks())
    layer = got.steps[0]["layers"]["decoder.layers.0"]
    got.steps[0]["loss"] *= 1 + 3e-5
    layer["counts"] += torch.tensor([1, -1])
    layer["expert_bias"] += 1e-9
    layer["aux_losses"]["aux_loss"] *= 1.5
    layer["router_error"] = 2e-3
    got.tensors["gradient, step 1"][DENSE] *= 1.001
    got.tensors["weight after step 1"][WHOLE] *= 1.05
    got.steps[0]["loss_scale"], oracle.steps[0]["loss_scale"] = 2.0, 4.0
    comparison = compare(got, oracle)
    assert set(named(comparison)) == {
        ("loss", ""), ("loss scale", ""), ("router", "decoder.layers.0"), ("token counts", "decoder.layers.0"),
        ("expert_bias", "decoder.layers.0"), ("aux loss", "decoder.layers.0"), ("gradient, step 1", DENSE),
        ("weight after step 1", WHOLE),
    }  # fmt: skip
    got.steps[0]["loss_scale"] = None  # of a run that needs none
    within = compare(got, oracle, Tolerances(scalar=1.0, gradient=1.0, update=1.0, router=1.0, flips=1))
    assert within.agrees


def test_a_step_that_overflows_in_the_layout_alone_is_a_difference_and_in_both_is_none(oracle):
    def overflowed(whole):
        del whole.tensors["gradient, step 1"]
        whole.steps[0] |= {"committed": False, "grad_norm": float("nan")}

    got = assemble(two_ranks())
    overflowed(got)
    assert set(named(compare(got, oracle))) == {("step applied", ""), ("gradient norm", "")}
    overflowed(oracle)
    assert compare(got, oracle).agrees


def test_initial_weights_come_before_all_that_follows_from_them(oracle):
    got = assemble(two_ranks())
    got.tensors["initial weight"][EXPERTS][1] = got.tensors["initial weight"][EXPERTS][0]
    got.tensors["gradient, step 1"][DENSE] *= 2
    comparison = compare(got, oracle)
    assert named(comparison)[0] == ("initial weight", EXPERTS)
    assert "(routed experts only) differ before the first step" in matching_patterns(got, oracle, comparison)[0]


@pytest.mark.parametrize(
    ("scaled", "by", "said"),
    [
        ((EXPERTS,), 2.0, "the gradients of all routed experts are off and 2 times the oracle's, no other"),
        ((EXPERTS, DENSE, WHOLE, ROUTER), 0.5, "every gradient is 0.5 times the oracle's"),
        ((ROUTER,), 0.5, "only router weights are off"),
        ((WHOLE,), 0.5, "only weights that every TP rank holds whole are off"),
        ((DENSE,), 0.5, None),
    ],
)
def test_a_pattern_of_gradients_is_said(oracle, scaled, by, said):
    got = assemble(two_ranks())
    for name in scaled:
        got.tensors["gradient, step 1"][name] *= by
    found = matching_patterns(got, oracle, compare(got, oracle))
    assert found == [] if said is None else any(said in one for one in found)


@pytest.mark.parametrize(("by", "said"), [(2048.0, "2048 times"), (3.0, "3 times"), (1000.0, "1e+03 times")])
@pytest.mark.parametrize("noisy", [EXPERTS, DENSE, WHOLE, ROUTER])
def test_a_scale_is_named_whichever_tensor_was_rounded(oracle, noisy, by, said):
    got = assemble(two_ranks())
    for name in (EXPERTS, DENSE, WHOLE, ROUTER):
        got.tensors["gradient, step 1"][name] *= by * (1.0005 if name == noisy else 1.0)
    comparison = compare(got, oracle)
    assert f"every gradient is {said} the oracle's" in matching_patterns(got, oracle, comparison)[0]
    details = {one.name: one.detail for one in comparison.differences if one.quantity == "gradient, step 1"}
    assert details == dict.fromkeys((EXPERTS, DENSE, WHOLE, ROUTER), f"{said} the oracle's")


def test_a_norm_alone_is_traced_to_the_experts_and_counts_over_a_wrong_group_told_from_a_choice_that_flipped(oracle):
    for counts, said in (([6, 10], "sum to 2 times"), ([4, 4], "margin, 1.0e-02")):
        got = assemble(two_ranks())
        got.steps[0]["layers"]["decoder.layers.0"]["counts"] = torch.tensor(counts)
        assert said in matching_patterns(got, oracle, compare(got, oracle))[0]
    gradients = tensors(0.5)
    squares = {name: float(tensor.double().square().sum()) for name, tensor in gradients.items()}
    oracle.steps[0]["grad_norm"] = sum(squares.values()) ** 0.5
    got = assemble(two_ranks())
    got.steps[0]["grad_norm"] = (sum(squares.values()) - 0.5 * squares[EXPERTS]) ** 0.5
    found = matching_patterns(got, oracle, compare(got, oracle))
    assert "the routed experts' squares are counted 0.5 times" in found[1]
    got.steps[0]["grad_norm"] = (sum(squares.values()) * 1.001) ** 0.5
    assert not any("squares" in text for text in matching_patterns(got, oracle, compare(got, oracle)))


def test_the_report_is_json_and_ends_in_the_verdict(oracle):
    got = assemble(two_ranks())
    got.tensors["gradient, step 1"][DENSE] *= torch.nan
    comparison = compare(got, oracle)
    ep, dp = (Layout(name, 2, {}, frozenset({name.upper()})) for name in ("ep", "dp"))
    good = LayoutFinding(dp, 1.0, compare(assemble(two_ranks()), oracle))
    findings = [good, LayoutFinding(ep, 2.0, comparison), FindingOfLayout(ep, 3.0, error="rank 1 ended")]
    report = DoctorReport({"steps": 1}, findings)
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["failed"] and told["common_to_what_failed"] == ["EP"]
    assert told["layouts"][1]["differences"][0]["error"] == "nan"
    text = "\n".join(details(report))
    assert f"gradient, step 1 of {DENSE} is off by nan" in text
    assert "rank 1 ended" in text
    assert text.endswith("2 of 3 layouts do not train the same model: ep, ep")
    assert re.match(r"\[3/3\] ep .* FAILED", compared.log_line(3, 3, report.findings[2]))


# ---- how clearly a router's choices are decided, and how exact its arithmetic is

OPTIONS = {
    "topk": 1, "num_experts": 3, "num_groups": None, "group_topk": None, "group_score": "max",
    "score_function": "softmax", "pre_softmax": True, "norm_topk_prob": False, "scaling_factor": None,
    "sinkhorn": False, "enable_expert_bias": False, "drop_policy": "probs",
}  # fmt: skip


def seen(scores: list[list[float]], rounded: bool = False, kept: list[bool] | None = None, **options) -> RouterRecord:
    """The record of a router whose weight is the identity, so that the hidden states are its logits."""
    hidden = torch.tensor(scores).log()
    router = SimpleNamespace(
        options=SimpleNamespace(**{**OPTIONS, **options}), logits_in_fp64=torch.Tensor.double, expert_bias=None
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
