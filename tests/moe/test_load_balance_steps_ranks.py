"""Training steps of a model with auxiliary losses, capacity or padding: the same gradients on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from tests.helpers.rows import rows

pytestmark = pytest.mark.engine

VOCAB, LENGTH, SEQUENCES = 64, 16, 4
MODEL = {
    **PRESETS["tiny"],
    **{"seq_length": LENGTH, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 24, "num_layers": 2},
    **{"init_method_std": 0.1, "clip_grad": 0.0, "moe_layer_freq": 1, "lr": 1e-3},
}
LOSSES = {
    "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.5, 0.8),
    "moe_z_loss_coeff": 0.05,
}
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}


def batch(unequal: bool) -> dict[str, torch.Tensor]:
    """Four sequences; the loss is masked in as many tokens of each, or in 12, 1, 6 and 0 of them."""
    tokens = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    masked = torch.tensor([12, 1, 6, 0] if unequal else [4, 4, 4, 4])
    mask = (torch.arange(LENGTH) >= masked.unsqueeze(1)).float()
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}


def micro_batches(run: Run, pg: Any, unequal: bool) -> list[dict[str, torch.Tensor]]:
    """Those of this rank, in the order of data/batches.py."""
    from megatron_moe.data.batches import context_parallel_slice

    size, whole = run.training.micro_batch_size, batch(unequal)
    rounds = range(pg.dp.rank() * size, SEQUENCES, size * pg.dp.size())
    found = [{key: tensor[first : first + size] for key, tensor in whole.items()} for first in rounds]
    if pg.cp.size() == 1:
        return found
    return [{k: context_parallel_slice(t, pg.cp.rank(), pg.cp.size()) for k, t in part.items()} for part in found]


def stepped(flags: dict[str, Any], unequal: bool = False, steps: int = 1) -> dict[str, Any]:
    """One step of the given flags: its loss, what the routers did, and each gradient's sum of squares over the job."""
    from megatron_moe.model.build import build_model
    from megatron_moe.moe.state import routers
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything
    from megatron_moe.training.optimizer import build_optimizer, build_scheduler
    from megatron_moe.training.step import connect, train_step

    run = replace(Run(), **{**MODEL, **flags, "train_iters": 10})
    pg = groups.initialize(run)
    seed_everything(run)
    model = build_model(run, pg, VOCAB)
    optimizer = build_optimizer(run, model, pg)
    scheduler = build_scheduler(run, optimizer)
    connect(model, optimizer)
    mine = micro_batches(run, pg, unequal)
    for _ in range(steps):
        result = train_step(
            model,
            optimizer,
            scheduler,
            [iter(mine) for _ in model],
            num_micro_batches=len(mine),
            micro_batch_size=run.training.micro_batch_size,
            seq_length=LENGTH,
            pg_collection=pg,
        )
    update = result.router_update
    gates = {r.layer_number: r.weight.main_grad.clone() for r in routers(model)}
    return dict(
        loss=result.loss,
        grad_norm=result.grad_norm,
        committed=result.committed,
        gates=gates,
        aux={n: {k: float(v) for k, v in a.items()} for n, a in zip(update.layer_numbers, update.aux_losses)},
        counts={n: c.tolist() for n, c in zip(update.layer_numbers, update.tokens_per_expert)},
        dropped={n: d.tolist() for n, d in zip(update.layer_numbers, update.dropped_per_expert) if d is not None},
    )


def assert_same(ranks: list[dict[str, Any]], wanted: dict[str, Any], tolerance: float = 2e-5) -> None:
    layers = set()
    for rank in ranks:
        assert rank["committed"]
        assert rank["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert rank["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=tolerance)
        for layer, gradient in rank["gates"].items():
            full = wanted["gates"][layer]
            assert (gradient - full).norm() < tolerance * full.norm(), layer
            assert rank["aux"][layer] == pytest.approx(wanted["aux"][layer], rel=1e-4)
            assert rank["counts"][layer] == wanted["counts"][layer]
            assert rank["dropped"].get(layer) == wanted["dropped"].get(layer)
            layers.add(layer)
    assert layers == set(wanted["gates"])


PER_TOKEN = {"calculate_per_token_loss": True}
STEPS = [
    (1, {"micro_batch_size": 4}),
    (1, {"micro_batch_size": 2}),
    (2, {"micro_batch_size": 1}),
    (2, {**SP2, "micro_batch_size": 2}),
    (2, {**EP2, "micro_batch_size": 2}),
    (2, {**CP2, "micro_batch_size": 1}),
    (2, {**PP2, "micro_batch_size": 2}),
    (4, {**SP2, **EP2, "micro_batch_size": 1, "recompute_granularity": "full", "recompute_method": "uniform",
         "recompute_num_layers": 1}),
]  # fmt: skip
EITHER = [STEPS[1], *STEPS[-3:]]


@pytest.fixture(scope="module")
def oracle(gloo: Any) -> Any:
    known: dict[str, Any] = {}

    def of(unequal: bool, **flags: Any) -> Any:
        key = repr((unequal, sorted(flags.items())))
        if key not in known:
            (known[key],) = gloo.run(1, stepped, flags={**flags, "micro_batch_size": 1}, unequal=unequal)
        return known[key]

    return of


@pytest.mark.parametrize("per_token", [False, True], ids=["per micro-batch", "per token"])
@pytest.mark.parametrize(("ranks", "layout"), rows(STEPS, test=EITHER))
def test_a_step_with_auxiliary_losses_is_the_same_on_every_layout(gloo, oracle, ranks, layout, per_token):
    """Micro-batches of any size and number. With a loss per token, also where loss masks are unequal."""
    flags = {**LOSSES, "calculate_per_token_loss": per_token}
    wanted = oracle(per_token, **flags)
    assert_same(gloo.run(ranks, stepped, flags={**flags, **layout}, unequal=per_token), wanted)


def test_interleaved_stages_count_ahead_too(gloo, oracle):
    flags = {**LOSSES, **PER_TOKEN, "num_layers": 4}
    ranks = gloo.run(2, stepped, flags={**flags, **VPP2, "micro_batch_size": 2}, unequal=True)
    assert_same(ranks, oracle(True, **flags))


def test_fp16s_loss_scale_is_taken_off_the_auxiliary_losses(gloo):
    """Another scale, the same gradients up to fp16's rounding; at a tenth of their share the losses would show."""
    flags = {**LOSSES, **PER_TOKEN, **EP2, "fp16": True, "micro_batch_size": 2}
    small, large = (
        gloo.run(2, stepped, flags={**flags, "initial_loss_scale": scale}, unequal=True) for scale in (64.0, 2.0**12)
    )
    for one, other in zip(small, large):
        for layer, gradient in one["gates"].items():
            assert (gradient - other["gates"][layer]).norm() < 0.02 * gradient.norm()


def test_the_auxiliary_losses_weigh_the_same_however_the_loss_is_divided(oracle):
    """Per token or per micro-batch, with 45 of 64 tokens in the loss: their own part of each gate's gradient."""
    parts = []
    for flags in ({}, PER_TOKEN):
        wanted, without = oracle(True, **LOSSES, **flags), oracle(True, **flags)
        parts.append({layer: full - without["gates"][layer] for layer, full in wanted["gates"].items()})
        for layer, full in wanted["gates"].items():  # no trifle: the other tests would not miss it
            assert parts[-1][layer].norm() > 0.3 * full.norm()
    for layer, part in parts[0].items():
        assert (part - parts[1][layer]).norm() < 1e-4 * part.norm()


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, SP2), (2, CP2), (2, EP2), (4, {**SP2, **EP2})], ids=["SP2", "CP2", "EP2", "SP2 EP2"]
)
def test_a_step_with_a_capacity_is_the_same_on_every_layout(gloo, oracle, ranks, layout, policy):
    flags = {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": policy}
    wanted = oracle(False, **flags)
    for counts, dropped in zip(wanted["counts"].values(), wanted["dropped"].values()):
        assert sum(counts) + sum(dropped) == SEQUENCES * LENGTH * 2 and sum(dropped) > 0
    padded = {"moe_pad_expert_input_to_capacity": ranks == 4}
    assert_same(gloo.run(ranks, stepped, flags={**flags, **layout, **padded, "micro_batch_size": 1}), wanted)


def drawn(counts: str) -> dict[str, Any]:
    """Two steps with dropout and jitter, and global_aux_loss without weight enough to be seen in the loss."""
    return stepped(
        {
            "hidden_dropout": 0.2,
            "moe_input_jitter_eps": 0.1,
            "moe_router_load_balancing_type": ("global_aux_loss",),
            "moe_aux_loss_coeff": (1e-30,),
            "moe_global_aux_loss_counts": counts,
            "recompute_granularity": "selective",
            "recompute_modules": ("moe",),
            "micro_batch_size": 2,
        },
        steps=2,
    )


def test_counting_ahead_leaves_no_trace(gloo):
    """Dropout and jitter draw the same, nothing is counted twice: the losses' bits are those of a step without it."""
    (ahead,), (without,) = (gloo.run(1, drawn, counts=counts) for counts in ("batch", "running"))
    assert ahead["loss"].hex() == without["loss"].hex()
    assert ahead["counts"] == without["counts"]
    assert ahead["aux"] != without["aux"]


def padded_gradients(flags: dict[str, Any], length: int) -> dict[str, Any]:
    """Forward and backward of a model with padding of unequal lengths; counts and gate gradients of the whole job."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_moe.model.build import build_model
    from megatron_moe.moe.load_balance import GlobalBatch
    from megatron_moe.moe.state import announce_global_batch, routers
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything
    from megatron_moe.training.finalize_model_grads import finalize_model_grads

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


@pytest.mark.parametrize("length", [8, 4], ids=["other numbers of tokens and experts", "as many tokens as experts"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, SP2), (2, EP2), (4, {**SP2, **EP2})], ids=["SP2", "EP2", "SP2 EP2"])
def test_padding_is_routed_nowhere_on_any_layout(gloo, ranks, layout, length):
    """Eight experts: two sequences of 4 tokens are as many tokens, whose mask an [E] axis would take as well."""
    flags = {"moe_router_load_balancing_type": ("seq_aux_loss",), "moe_aux_loss_coeff": (0.5,)}
    (wanted,) = gloo.run(1, padded_gradients, flags=flags, length=length)
    assert all(sum(counts) == wanted["valid"] * 2 for counts in wanted["counts"])
    for rank in gloo.run(ranks, padded_gradients, flags={**flags, **layout}, length=length):
        assert rank["counts"] == wanted["counts"]
        for gradient, full, losses, all_losses in zip(rank["gates"], wanted["gates"], rank["aux"], wanted["aux"]):
            assert (gradient - full).norm() < 2e-5 * full.norm()
            assert losses == pytest.approx(all_losses, rel=1e-5)
