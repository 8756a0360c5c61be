"""Training steps of a model with auxiliary losses, capacity or padding: the same gradients on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import build_model
from megatron_moe.moe.load_balance import GlobalBatch
from megatron_moe.moe.router import announce_global_batch, routers
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.training.finalize_model_grads import finalize_model_grads
from tests.helpers.errors import relative
from tests.helpers.rows import rows
from tests.model import mtp_cases

VOCAB, LENGTH = 64, 16
MODEL = {
    **PRESETS["tiny"],
    **{"seq_length": LENGTH, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 24, "num_layers": 2},
    **{"init_method_std": 0.1, "clip_grad": 0.0, "moe_layer_freq": 1, "lr": 1e-3, "micro_batch_size": 1},
}
LOSSES = {
    "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.5, 0.8),
    "moe_z_loss_coeff": 0.05,
}
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
VPP2 = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PER_TOKEN = {"calculate_per_token_loss": True}
UNEQUAL = (torch.arange(LENGTH) >= torch.tensor([12, 1, 6, 0]).unsqueeze(1)).float()


def stepped(flags: dict[str, Any], loss_mask: torch.Tensor | None = None, steps: int = 1) -> dict[str, Any]:
    return mtp_cases.steps(replace(Run(), **{**MODEL, **flags}), steps, loss_mask)


def assert_same(ranks: list[dict[str, Any]], wanted: dict[str, Any], tolerance: float = 2e-5) -> None:
    layers = set()
    for rank in ranks:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert rank["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=tolerance)
        for name, (_, _, gradient) in rank["tensors"].items():
            if name.endswith("router.weight"):
                assert relative(gradient, wanted["tensors"][name][2]) < tolerance, name
        assert rank["counts"] == wanted["counts"]
        for layer, losses in rank["aux"].items():
            assert losses == pytest.approx(wanted["aux"][layer], rel=1e-4)
            assert rank["dropped"].get(layer) == wanted["dropped"].get(layer)
            layers.add(layer)
    assert layers == set(wanted["aux"])


STEPS: dict[str, tuple[int, dict[str, Any]]] = {
    "micro-batches of 2": (1, {"micro_batch_size": 2}),
    "micro-batches of 4": (1, {"micro_batch_size": 4}),
    "CP2": (2, CP2),
    "TP2, EP2, recomputed": (2, {**SP2, **EP2, "expert_tensor_parallel_size": 1, **FULL}),
    "EP2, micro-batches of 2": (2, {**EP2, "micro_batch_size": 2}),
    "PP2 in two chunks each": (2, {**VPP2, "num_layers": 4, "micro_batch_size": 2}),
}


@pytest.mark.parametrize("layout", rows(STEPS, test=[name for name in STEPS if not name.endswith(("of 4", "of 2"))]))
def test_a_step_with_auxiliary_losses_per_token_and_unequal_masks_is_that_of_one_rank(gloo, once, layout):
    ranks, flags = STEPS[layout]
    flags = {**LOSSES, **PER_TOKEN, **flags}
    alone = {**LOSSES, **PER_TOKEN, "num_layers": flags.get("num_layers", 2)}
    (wanted,) = once(1, stepped, flags=alone, loss_mask=UNEQUAL)
    assert_same(gloo.run(ranks, stepped, flags=flags, loss_mask=UNEQUAL), wanted)


def gates(step: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: grad for name, (_, _, grad) in step["tensors"].items() if name.endswith("router.weight")}


def test_fp16s_loss_scale_is_taken_off_the_auxiliary_losses(gloo):
    """Another scale, the same gradients up to fp16's rounding; at a tenth of their share the losses would show."""
    flags = {**LOSSES, **PER_TOKEN, "fp16": True, "micro_batch_size": 2}
    small, large = (
        gates(gloo.run(1, stepped, flags={**flags, "initial_loss_scale": scale}, loss_mask=UNEQUAL)[0])
        for scale in (64.0, 2.0**12)
    )
    assert len(small) == 2
    for name, gradient in small.items():
        assert relative(large[name], gradient) < 0.02


def test_the_auxiliary_losses_weigh_the_same_however_the_loss_is_divided(once):
    """Per token or per micro-batch, with 45 of 64 tokens in the loss: their own part of each gate's gradient."""
    parts = []
    for flags in ({}, PER_TOKEN):
        wanted, without = (
            gates(once(1, stepped, flags={**losses, **flags, "num_layers": 2}, loss_mask=UNEQUAL)[0])
            for losses in (LOSSES, {})
        )
        parts.append({name: full - without[name] for name, full in wanted.items()})
        for name, full in wanted.items():  # no trifle: the other tests would not miss it
            assert parts[-1][name].norm() > 0.3 * full.norm()
    for name, part in parts[0].items():
        assert relative(parts[1][name], part) < 1e-4


POLICIES = [("position", {**EP2, "moe_pad_expert_input_to_capacity": True}), ("probs", SP2), ("position", CP2)]


@pytest.mark.parametrize(("policy", "layout"), rows(POLICIES, test=POLICIES[:1]), ids=["EP2, padded", "TP2", "CP2"])
def test_a_step_with_a_capacity_is_that_of_one_rank(gloo, once, policy, layout):
    flags = {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": policy}
    (wanted,) = once(1, stepped, flags=flags)
    for counts, dropped in zip(wanted["counts"].values(), wanted["dropped"].values(), strict=True):
        assert sum(counts) + sum(dropped) == mtp_cases.SEQUENCES * LENGTH * 2 and sum(dropped) > 0
    assert_same(gloo.run(2, stepped, flags={**flags, **layout}), wanted)


def drawn(counts: str) -> dict[str, Any]:
    """Two steps with dropout and jitter, and global_aux_loss without weight enough to be seen in the loss."""
    noise = {"attention_dropout": 0.2, "hidden_dropout": 0.2, "moe_input_jitter_eps": 0.1, "micro_batch_size": 2}
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
    losses = {"moe_router_load_balancing_type": ("global_aux_loss",), "moe_aux_loss_coeff": (1e-30,)}
    return stepped({**noise, **recomputed, **losses, "moe_global_aux_loss_counts": counts}, steps=2)


def test_counting_ahead_leaves_no_trace(gloo):
    """Dropout and jitter draw the same, nothing is counted twice: the losses' bits are those of a step without it."""
    (ahead,), (without,) = (gloo.run(1, drawn, counts=counts) for counts in ("batch", "running"))
    assert ahead["losses"] == without["losses"]
    assert ahead["counts"] == without["counts"]
    assert ahead["aux"] != without["aux"]


def padded_gradients(flags: dict[str, Any], length: int) -> dict[str, Any]:
    """Forward and backward of a model with padding of unequal lengths; counts and gate gradients of the whole job."""
    run = replace(Run(), **{**MODEL, **flags, "seq_length": length})
    pg = groups.initialize(run)
    seed_everything(run)
    (chunk,) = build_model(run, pg, VOCAB)
    chunk.zero_grad_buffer()
    tokens = torch.randint(0, VOCAB, (2, length + 1), generator=torch.Generator().manual_seed(5))
    is_padding = torch.arange(length) >= torch.tensor([[length // 2], [length - 1]])
    share = slice(None) if pg.dp.size() == 1 else slice(pg.dp.rank(), pg.dp.rank() + 1)
    valid = int((~is_padding).sum())
    # The mean over data-parallel ranks is taken back below, for both losses.
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    announce_global_batch([chunk], GlobalBatch(valid, 1 / valid))
    positions = torch.arange(length).expand(2, length)
    losses = chunk(tokens[share, :-1], positions[share], None, labels=tokens[share, 1:], padding_mask=is_padding[share])
    (losses * ~is_padding[share]).sum().backward()
    update = finalize_model_grads([chunk], None)
    return dict(
        counts=[c.tolist() for c in update.tokens_per_expert],
        gates=[r.weight.main_grad * pg.dp.size() for r in routers([chunk])],
        aux=[{k: float(v) for k, v in a.items()} for a in update.aux_losses],
        valid=valid,
    )


@pytest.mark.parametrize(("length", "layout"), rows([(4, SP2), (8, EP2)], test=[(4, SP2)]))
def test_padding_is_routed_nowhere_on_any_layout(gloo, length, layout):
    """Eight experts: two sequences of 4 tokens are as many tokens, whose mask an [E] axis would take as well."""
    flags = {"moe_router_load_balancing_type": ("seq_aux_loss",), "moe_aux_loss_coeff": (0.5,)}
    (wanted,) = gloo.run(1, padded_gradients, flags=flags, length=length)
    assert all(sum(counts) == wanted["valid"] * 2 for counts in wanted["counts"])
    for rank in gloo.run(2, padded_gradients, flags={**flags, **layout}, length=length):
        assert rank["counts"] == wanted["counts"]
        for gradient, full, losses, all_losses in zip(rank["gates"], wanted["gates"], rank["aux"], wanted["aux"]):
            assert relative(gradient, full) < 2e-5
            assert losses == pytest.approx(all_losses, rel=1e-5)
