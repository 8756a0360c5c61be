"""Multi-token prediction under every layout: losses of each depth, all gradients, gradient norm, counts and the weights
after a step are those of one process."""

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel import groups
from megatron_moe.parallel.sequence import all_gather_sequence, context_parallel_slice, shifted
from tests.helpers.rows import rows
from tests.model import mtp_cases as cases
from tests.model.test_build_ranks import CP2, EP2, MODELS, OVERLAPPED, PP2, SP2, TIED, TP2, VPP2, cut

# An Adam whose step is smooth in the gradient: two layouts' rounding errors must not decide about a sign.
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7, "lr": 1e-2, "adam_eps": 1e-2, "micro_batch_size": 2}
PER_TOKEN = {"calculate_per_token_loss": True}
FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_chunk_tokens": 8}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
# What the layout matrix has not: several predictions, and a tied table.
LAYOUTS = {
    "experts, TP2 with sequence parallelism, fused loss": ("experts", 2, {**SP2, **FUSED}),
    "experts, CP2, per token": ("experts", 2, {**CP2, **PER_TOKEN}),
    "tied, PP2 in two chunks each": (TIED, 2, VPP2),
    "experts, micro-batches of 1": ("experts", 1, {"micro_batch_size": 1}),
    "experts, full recomputation by blocks": ("experts", 1, FULL),
    "experts, EP2 (DP2), per token": ("experts", 2, {**EP2, **PER_TOKEN}),
    "experts, DP2, distributed optimizer, overlaps": ("experts", 2, OVERLAPPED),
    "tied, TP2": (TIED, 2, TP2),
    "tied, PP2, fused loss, overlapped reduction": (TIED, 2, {**PP2, **FUSED, "overlap_grad_reduce": True}),
    "grouped, TP2 x PP2": ("grouped, biased", 4, {**SP2, **PP2, "decoder_first_pipeline_num_layers": 1}),
}


def alone(once, model, **flags):
    """What one process computes."""
    return once(1, cases.steps, run=replace(Run(), **{**MODELS[model], **MTP, **flags}))[0]


def assert_same(result, wanted, rank, tolerance=1.0, gradients=True):
    assert result["losses"] == pytest.approx(wanted["losses"], rel=2e-6 * tolerance)
    assert result["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=2e-5 * tolerance)
    for got, expected in zip(result["mtp_losses"], wanted["mtp_losses"], strict=True):
        assert len(got) == 2
        assert got == pytest.approx(expected, rel=2e-6 * tolerance)
    for name, (recipe, *parts) in result["tensors"].items():
        _, *wholes = wanted["tensors"][name]
        for part, full in list(zip(parts, wholes))[: 2 if gradients else 1]:  # the weight, and its gradient
            error = (part.float() - cut(full, recipe).float()).norm() / full.float().norm().clamp_min(1e-12)
            assert error < 5e-5 * tolerance, f"rank {rank}: {name} is {error:.1e} off"


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=list(LAYOUTS)[:3]))
def test_a_layout_trains_the_same_predictions(gloo, once, layout):
    model, ranks, flags = LAYOUTS[layout]
    wanted = alone(once, model)
    results = gloo.run(ranks, cases.steps, run=replace(Run(), **{**MODELS[model], **MTP, **flags}))
    for rank, result in enumerate(results):
        # a distributed optimizer leaves a rank the whole sum of its own shard only
        assert_same(result, wanted, rank, gradients=not flags.get("use_distributed_optimizer"))
        assert result["counts"] == wanted["counts"]
    assert {name for result in results for name in result["tensors"]} == set(wanted["tensors"])


@pytest.mark.parametrize("flags", rows([PP2, OVERLAPPED], test=[PP2]), ids=["PP2", "DP2, overlaps"])
def test_a_layout_trains_the_same_predictions_in_bf16(gloo, once, flags):
    wanted = alone(once, "experts", bf16=True)
    run = replace(Run(), **{**MODELS["experts"], **MTP, "bf16": True, **flags})
    for rank, result in enumerate(gloo.run(2, cases.steps, run=run)):
        assert_same(result, wanted, rank, tolerance=100, gradients=not flags.get("use_distributed_optimizer"))
        assert result["tables"] == ["ExactEmbedding"]  # at both ends of a pipeline


def test_fp16s_loss_scale_reaches_the_predictions_and_leaves_them(once):
    scaled = alone(once, "experts", fp16=True, initial_loss_scale=2.0**12)
    assert scaled["grad_norms"] == pytest.approx(alone(once, "experts")["grad_norms"], rel=5e-3)


def moved(whole: torch.Tensor, steps: list[int], cp_size: int) -> dict[int, dict[str, torch.Tensor]]:
    """A sequence of counted tokens shifted by each of `steps`, and the gradient of (shifted x 1, 2, 3, ...) by it."""
    group = groups.initialize(replace(Run(), context_parallel_size=cp_size)).cp
    part = context_parallel_slice(whole, group.rank(), group.size())

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return all_gather_sequence(x.detach().t(), group).t()

    found = {}
    for by in steps:
        x = part.double().requires_grad_()
        out = shifted(x, by, group)
        (out * part).sum().backward()
        assert x.grad is not None
        found[by] = {"out": gathered(out), "grad": gathered(x.grad), "ids": gathered(shifted(part, by, group))}
    return found


def test_a_shift_sees_the_whole_sequence_of_all_ranks(gloo):
    length, steps = 8, [0, 1, 3, -1, -3, 8, -9]
    whole = torch.stack([torch.arange(1, length + 1), torch.arange(101, length + 101)])
    for cp_size in (1, 2):
        for result in gloo.run(cp_size, moved, whole=whole, steps=steps, cp_size=cp_size):
            for by in steps:
                ahead, back = looked_up(whole, by), looked_up(whole, -by)
                assert torch.equal(result[by]["ids"], ahead)
                assert torch.equal(result[by]["out"], ahead.double())
                assert torch.equal(result[by]["grad"], back.double())


def looked_up(whole, by):
    length = whole.shape[1]
    return torch.stack([whole[:, s + by] if 0 <= s + by < length else 0 * whole[:, s] for s in range(length)], dim=1)
