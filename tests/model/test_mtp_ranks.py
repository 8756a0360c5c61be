"""Multi-token prediction under every layout: losses of each depth, all gradients, gradient norm, counts and the weights
after two steps are those of one process."""

from __future__ import annotations

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from tests.helpers.rows import rows
from tests.model import mtp_cases as cases
from tests.model.test_build_ranks import EP2, MODELS, PP2, SP2, TP2, VPP2, cut

pytestmark = pytest.mark.engine

# An Adam whose step is smooth in the gradient: two layouts' rounding errors must not decide about a sign.
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7, "lr": 1e-2, "adam_eps": 1e-2, "micro_batch_size": 1}
CP2 = {"context_parallel_size": 2}
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
PER_TOKEN = {"calculate_per_token_loss": True}
FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_chunk_tokens": 8}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
TIED = "dense mla, no query latent, tied"
LAYOUTS = {
    "experts, micro-batches of 2": ("experts", 1, {"micro_batch_size": 2}),
    "experts, one micro-batch, per token": ("experts", 1, {"micro_batch_size": 4, **PER_TOKEN}),
    "experts, full recomputation by blocks": ("experts", 1, FULL),
    "experts, TP2 with sequence parallelism, fused loss": ("experts", 2, {**SP2, **FUSED}),
    "experts, EP2 (DP2), per token": ("experts", 2, {**EP2, **PER_TOKEN}),
    "experts, PP2 in two chunks each": ("experts", 2, VPP2),
    "experts, CP2": ("experts", 2, CP2),
    "experts, CP2, per token": ("experts", 2, {**CP2, **PER_TOKEN}),
    "experts, DP2, distributed optimizer, overlaps": ("experts", 2, OVERLAPPED),
    "tied, TP2": (TIED, 2, TP2),
    "tied, PP2, fused loss": (TIED, 2, {**PP2, **FUSED}),
    "tied, PP2 in two chunks each": (TIED, 2, VPP2),
    "tied, PP2, overlapped reduction": (TIED, 2, {**PP2, "overlap_grad_reduce": True}),
    "grouped, TP2 x PP2, one layer on the first stage": (
        "grouped, biased",
        4,
        {**SP2, **PP2, "decoder_first_pipeline_num_layers": 1},
    ),
}
EITHER = [
    "experts, TP2 with sequence parallelism, fused loss",
    "experts, EP2 (DP2), per token",
    "experts, CP2, per token",
    "experts, DP2, distributed optimizer, overlaps",
    "tied, PP2 in two chunks each",
    "grouped, TP2 x PP2, one layer on the first stage",
]


@pytest.fixture(scope="module")
def one_process(gloo):
    known = {}

    def of(model, count=2, **flags):
        key = (model, count, *flags.items())
        if key not in known:
            run = replace(Run(), **{**MODELS[model], **MTP, **flags})
            known[key] = gloo.run(1, cases.steps, run=run, count=count)[0]
        return known[key]

    return of


def assert_same(result, wanted, rank, tolerance=1.0, gradients=True):
    assert result["losses"] == pytest.approx(wanted["losses"], rel=2e-6 * tolerance)
    assert result["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=2e-5 * tolerance)
    for got, expected in zip(result["mtp_losses"], wanted["mtp_losses"], strict=True):
        assert len(got) == 2
        assert got == pytest.approx(expected, rel=2e-6 * tolerance)
    for name, (recipe, weight, grad) in result["tensors"].items():
        _, full_weight, full_grad = wanted["tensors"][name]
        for what, part, full in (("weight", weight, full_weight), ("gradient", grad, full_grad)):
            if what == "weight" or gradients:
                error = (part.float() - cut(full, recipe).float()).norm() / full.float().norm().clamp_min(1e-12)
                assert error < 5e-5 * tolerance, f"rank {rank}: {what} of {name} is {error:.1e} off"


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=EITHER))
def test_a_layout_trains_the_same_predictions(gloo, one_process, layout):
    model, ranks, flags = LAYOUTS[layout]
    wanted = one_process(model)
    results = gloo.run(ranks, cases.steps, run=replace(Run(), **{**MODELS[model], **MTP, **flags}))
    for rank, result in enumerate(results):
        # a distributed optimizer leaves a rank the whole sum of its own shard only
        assert_same(result, wanted, rank, gradients=not flags.get("use_distributed_optimizer"))
        assert result["counts"] == wanted["counts"]
    assert {name for result in results for name in result["tensors"]} == set(wanted["tensors"])


@pytest.mark.parametrize(("ranks", "flags"), [(2, PP2), (2, OVERLAPPED)], ids=["PP2", "DP2, overlaps"])
def test_a_layout_trains_the_same_predictions_in_bf16(gloo, one_process, ranks, flags):
    # One step: in the next, weights that were rounded otherwise let some tokens choose other experts.
    wanted = one_process("experts", count=1, bf16=True)
    run = replace(Run(), **{**MODELS["experts"], **MTP, "bf16": True, **flags})
    for rank, result in enumerate(gloo.run(ranks, cases.steps, run=run, count=1)):
        assert_same(result, wanted, rank, tolerance=100, gradients=not flags.get("use_distributed_optimizer"))


def test_both_ends_of_a_pipeline_have_a_table_that_loses_no_token(gloo):
    run = replace(Run(), **{**MODELS["experts"], **MTP, **PP2})
    assert [result["tables"] for result in gloo.run(2, cases.steps, run=run, count=1)] == [["ExactEmbedding"]] * 2


def test_fp16s_loss_scale_reaches_the_predictions_and_leaves_them(gloo, one_process):
    norms = [
        one_process("experts", count=1, fp16=True, initial_loss_scale=scale)["grad_norms"][0]
        for scale in (2.0**8, 2.0**12)
    ]
    assert norms == pytest.approx([one_process("experts")["grad_norms"][0]] * 2, rel=5e-3)


def test_layers_of_predictions_are_numbered_behind_the_models(one_process):
    wanted = one_process("experts")
    # 4 sequences of 16 tokens, 2 experts each; the model's own layers are 1 to 4
    assert set(wanted["counts"]) == {2, 3, 4, 5, 6}
    assert all(sum(counts) == 4 * 16 * 2 for counts in wanted["counts"].values())


def test_a_shift_sees_the_whole_sequence_of_all_ranks(gloo):
    length, steps = 8, [0, 1, 3, -1, -3, 8, -9]
    whole = torch.stack([torch.arange(1, length + 1), torch.arange(101, length + 101)])
    for cp_size in (1, 2):
        for result in gloo.run(cp_size, cases.moved, length=length, steps=steps, cp_size=cp_size):
            for by in steps:
                ahead, back = looked_up(whole, by), looked_up(whole, -by)
                assert torch.equal(result[by]["ids"], ahead)
                assert torch.equal(result[by]["out"], ahead.double())
                assert torch.equal(result[by]["grad"], back.double())


def looked_up(whole, by):
    found = torch.zeros_like(whole)
    for s in range(whole.shape[1]):
        if 0 <= s + by < whole.shape[1]:
            found[:, s] = whole[:, s + by]
    return found
