"""Auxiliary losses, dropped choices and Sinkhorn's are those of the whole batch, on any ranks and micro-batches.

One router, tokens with padding in unequal numbers, and the reference over the whole global batch as the oracle.
"""

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe import TopKRouter
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.data.batches import context_parallel_slice
from megatron_moe.model.build import build_model
from megatron_moe.moe.load_balance import (
    GlobalBatch,
    balance_share,
    count_tokens,
    document_balance_share,
    updated_expert_bias,
)
from megatron_moe.moe.router import announce_global_batch, counting_ahead, routers
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.training.finalize_model_grads import finalize_model_grads, update_routers
from tests.helpers.errors import relative
from tests.helpers.routers import config
from tests.helpers.rows import rows
from tests.model import mtp_cases
from tests.numbers import reference_moe as reference
from tests.numbers.reference_moe import bias_step

SEQUENCE, SEQUENCES, HIDDEN, EXPERTS, TOPK = 16, 4, 8, 4, 2
LOSS_TOKENS = 37.0  # of the global batch; as a loss mask would say
COEFFS = {"aux_loss": 0.3, "seq_aux_loss": 0.7, "global_aux_loss": 1.1}
Z = 0.05

SP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
CP2 = dict(context_parallel_size=2)
# ranks, layout, sequences in a micro-batch
PLACES: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "one rank": (1, {}, (4, 2, 1)),
    "DP2": (2, {}, (2, 1)),
    "TP2": (2, SP2, (4, 2)),
    "CP2": (2, CP2, (2, 1)),
    "TP2 CP2": (4, {**SP2, **CP2}, (2,)),
    "TP2 EP2": (4, {**SP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, (1,)),
}
LOSSES = dict(moe_router_load_balancing_type=list(COEFFS), moe_aux_loss_coeff=list(COEFFS.values()), moe_z_loss_coeff=Z)
ROUTINGS = {
    "by weight": reference.Routing(TOPK, capacity_factor=0.5),
    "by position": reference.Routing(TOPK, capacity_factor=0.6, drop_policy="position"),
    "sinkhorn": reference.Routing(TOPK, sinkhorn=True, pre_softmax=True, normalise=False),
    "round robin": reference.Routing(TOPK, round_robin=True),
}


def global_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [S, B, H] and is_padding [B, S]: one sequence is nearly all padding, one has none."""
    hidden = torch.randn(SEQUENCE, SEQUENCES, HIDDEN, generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([16, 3, 9, 14])
    return hidden, torch.arange(SEQUENCE) >= lengths.unsqueeze(1)


def gate() -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(4))


def router_config(layout: dict[str, Any], options: dict[str, Any]) -> TransformerConfig:
    sizes = dict(hidden_size=HIDDEN, num_moe_experts=EXPERTS, moe_router_topk=TOPK)
    softmax = dict(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)
    return config(**sizes, **softmax, **{name: layout[name] for name in SP2 if name in layout}, **options)


def my_part(tensor: torch.Tensor, axis: int, pg: Any) -> torch.Tensor:
    """This rank's tokens of what all context- and tensor-parallel ranks share, along the sequence's axis."""
    moved = tensor.movedim(axis, -1)
    if pg.cp.size() > 1:
        moved = context_parallel_slice(moved, pg.cp.rank(), pg.cp.size())
    return moved.chunk(pg.tp.size(), dim=-1)[pg.tp.rank()].movedim(-1, axis).contiguous()


def of_place(layout: dict[str, Any], sizes: tuple[int, ...]) -> dict[Any, Any]:
    """Steps with auxiliary losses, per token or not, and with each routing, by name and size of micro-batches."""
    pg = groups.initialize(replace(Run(), **layout))
    found: dict[Any, Any] = {}
    for size in sizes:
        for per_token in (False, True):
            found[per_token, size] = routed(pg, layout, size, LOSSES, per_token)
        for name, routing in ROUTINGS.items():
            options = dict(
                moe_router_load_balancing_type="sinkhorn" if routing.sinkhorn else "none",
                moe_router_force_load_balancing=routing.round_robin,
                moe_expert_capacity_factor=routing.capacity_factor,
                moe_token_drop_policy=routing.drop_policy,
            )
            found[name, size] = routed(pg, layout, size, options, per_token=False)
        if not layout:
            for told in (True, False):
                found["told" if told else "alone", size] = running(pg, size, told)
    return found


def routed(
    pg: Any, layout: dict[str, Any], micro_batch_size: int, options: dict[str, Any], per_token: bool
) -> dict[str, Any]:
    """A step of one router as the engine's schedule makes it, fp16's loss scale of 1024 included."""
    router = TopKRouter(router_config(layout, {**options, "calculate_per_token_loss": per_token}), pg)
    with torch.no_grad():
        router.weight.copy_(gate())
    hidden, padding = global_batch()
    mine = [columns[pg.dp.rank()] for columns in _micro_batches(hidden, 1, micro_batch_size, pg.dp.size())]
    masks = [rows[pg.dp.rank()] for rows in _micro_batches(padding, 0, micro_batch_size, pg.dp.size())]
    parts = [my_part(columns, 0, pg).requires_grad_() for columns in mine]
    masks = [my_part(rows, 1, pg).T.flatten() for rows in masks]

    scale = 1024.0 if per_token else 1024.0 * pg.cp.size() / len(parts)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([scale]))
    num_tokens, counted = int((~padding).sum()), None
    if len(parts) > 1:
        with counting_ahead([router]) as counted:
            for part, mask in zip(parts, masks):
                router.route(part.flatten(0, 1), mask, micro_batch_size)
    weight = (torch.tensor(LOSS_TOKENS).double() if per_token else len(parts) * pg.dp.size()) / num_tokens
    announce_global_batch([router], GlobalBatch(num_tokens, weight), counted)
    chosen, kept = [], []
    for part, mask in zip(parts, masks):
        decision = router.route(part.flatten(0, 1), mask, micro_batch_size)
        (decision.probs * 0).sum().backward()
        chosen.append(decision.expert_ids)
        kept.append(decision.kept)
    divisor = 1024.0 * (LOSS_TOKENS if per_token else pg.dp_cp.size())
    update = update_routers([router])
    dropped = update.dropped_per_expert[0]
    return dict(
        gradient=torch.zeros_like(router.weight) if router.weight.grad is None else router.weight.grad / divisor,
        losses={name: float(value) for name, value in update.aux_losses[0].items()},
        counts=update.tokens_per_expert[0].tolist(),
        dropped=None if dropped is None else dropped.tolist(),
        chosen=chosen,
        kept=kept,
        where=(pg.dp.rank(), pg.cp.rank(), pg.tp.rank()),
    )


def _micro_batches(tensor: torch.Tensor, axis: int, size: int, dp_size: int) -> list[tuple[torch.Tensor, ...]]:
    """Consecutive sequences: of each round the r-th micro-batch is data-parallel rank r's."""
    pieces = tensor.split(size, dim=axis)
    return [pieces[first : first + dp_size] for first in range(0, len(pieces), dp_size)]


@cache
def oracle(micro_batch_size: int, name: str) -> dict[str, Any]:
    """The reference, micro-batch by micro-batch; for "losses" also these and their gradient, per token of the batch."""
    routing = ROUTINGS.get(name, reference.Routing(TOPK))
    weight = gate().double().requires_grad_()
    hidden, padding = global_batch()
    experts = torch.zeros(EXPERTS, 2, 1, HIDDEN).double(), torch.zeros(EXPERTS, HIDDEN, 1).double()
    weights, results = reference.Weights(weight, *experts), []
    for columns, pads in zip(hidden.double().split(micro_batch_size, 1), padding.split(micro_batch_size)):
        results.append(reference.moe_layer(columns.flatten(0, 1), weights, routing, pads.T.flatten().tolist()))
    counts = [sum(column) for column in zip(*(r.counts for r in results))]
    dropped = [sum(e == d for r in results for _, d in r.dropped) for e in range(EXPERTS)]
    seen = dict(counts=counts, dropped=dropped, results=results)
    if name != "losses":
        return seen
    sizes = [sum(map(bool, r.chosen)) for r in results]
    total = sum(sizes)
    losses = dict.fromkeys((*COEFFS, "z_loss"), 0.0)
    for result, size in zip(results, sizes):
        losses["aux_loss"] += reference.balance_loss(result, TOPK, "softmax") * size / total
        losses["z_loss"] += reference.z_loss(result) * size / total
        for b in range(micro_batch_size):
            tokens = range(b, len(result.chosen), micro_batch_size)
            share = sum(bool(result.chosen[t]) for t in tokens) / total
            losses["seq_aux_loss"] += reference.balance_loss(result, TOPK, "softmax", tokens) * share
    losses["global_aux_loss"] = reference.global_balance_loss(results, TOPK, "softmax")
    sum(losses[name] * {**COEFFS, "z_loss": Z}[name] for name in losses).backward()
    return {**seen, "gradient": weight.grad, "losses": {name: value.item() for name, value in losses.items()}}


@pytest.fixture
def results(once: Any) -> Any:
    def of(place: str) -> Any:
        ranks, layout, sizes = PLACES[place]
        return once(ranks, of_place, layout=layout, sizes=sizes)

    return of


IN_TEST = list(PLACES)[:4]


@pytest.mark.parametrize("place", rows(PLACES, test=IN_TEST))
def test_each_loss_is_per_token_of_the_global_batch(results: Any, place: str) -> None:
    for size in PLACES[place][2]:
        wanted = oracle(size, "losses")
        for per_token in (False, True):
            seen = [rank[per_token, size] for rank in results(place)]
            gradient = sum(rank["gradient"].double() for rank in seen)
            assert relative(gradient, wanted["gradient"]) < 2e-6
            for rank in seen:
                assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
                assert rank["counts"] == wanted["counts"]


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("place", rows(PLACES, test=IN_TEST))
def test_every_layout_makes_the_same_choices(results: Any, place: str, name: str) -> None:
    for size in PLACES[place][2]:
        seen, wanted = [rank[name, size] for rank in results(place)], oracle(size, name)
        assert seen[0]["counts"] == wanted["counts"]
        if ROUTINGS[name].capacity_factor is not None:
            assert sum(wanted["dropped"]) > 0
            assert seen[0]["dropped"] == wanted["dropped"]
            valid = int((~global_batch()[1]).sum())
            assert sum(seen[0]["counts"]) + sum(seen[0]["dropped"]) == valid * TOPK
        for rank in seen:
            assert_chosen(rank, wanted["results"], place, size)


def assert_chosen(rank: dict[str, Any], results: list[Any], place: str, size: int) -> None:
    """A rank's tokens went to the experts that the reference chose for them, and kept the same ones."""
    ranks, layout, _ = PLACES[place]
    cp, tp = (layout.get(f"{name}_parallel_size", 1) for name in ("context", "tensor_model"))
    dp = ranks // (cp * tp)
    dp_rank, cp_rank, tp_rank = rank["where"]
    positions = torch.arange(SEQUENCE)
    positions = context_parallel_slice(positions, cp_rank, cp) if cp > 1 else positions
    positions = positions.chunk(tp)[tp_rank]
    tokens = (positions.unsqueeze(1) * size + torch.arange(size)).flatten().tolist()
    for number, (ids, kept) in enumerate(zip(rank["chosen"], rank["kept"], strict=True)):
        result = results[number * dp + dp_rank]
        for row, t in enumerate(tokens):
            if not result.chosen[t]:
                continue  # padding
            assert set(ids[row].tolist()) == set(result.chosen[t])
            if kept is not None:
                stays = {int(e) for e, is_kept in zip(ids[row], kept[row]) if is_kept}
                assert stays == {e for e in result.chosen[t] if (t, e) not in result.dropped}


def running(pg: Any, micro_batch_size: int, told: bool) -> tuple[float, torch.Tensor]:
    """global_aux_loss by the counts so far, of a router told of nothing, or of the batch without its counts."""
    options = dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1.0)
    router = TopKRouter(router_config({}, options), pg)
    with torch.no_grad():
        router.weight.copy_(gate())
    hidden, _ = global_batch()
    if told:
        announce_global_batch([router], GlobalBatch(SEQUENCE * SEQUENCES, 1.0 / (SEQUENCE * micro_batch_size)))
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    for round_ in _micro_batches(hidden, 1, micro_batch_size, dist.get_world_size()):
        (router.route(round_[pg.dp.rank()].flatten(0, 1), None, micro_batch_size).probs * 0).sum().backward()
    loss = update_routers([router]).aux_losses[0]["global_aux_loss"].item()
    total = router.weight.grad.clone()
    dist.all_reduce(total)
    return loss, total


def test_the_running_loss_is_the_whole_batchs_where_there_is_one_micro_batch_per_rank(results: Any) -> None:
    (alone,) = results("one rank")
    whole, gradient = alone["told", SEQUENCES]
    for rank in results("DP2"):
        for told in ("told", "alone"):
            loss, total = rank[told, 2]
            assert loss == pytest.approx(whole, rel=1e-6)
            torch.testing.assert_close(total / 2, gradient, rtol=1e-5, atol=1e-7)
    assert abs(alone["told", 1][0] - whole) > 1e-3  # by the counts so far: another number


# ---- counts are exact and the bias step decides in integers


def test_counts_per_sequence_follow_the_engines_order_of_tokens() -> None:
    ids = torch.tensor([[0], [3], [0], [2]])  # tokens 0 and 2 are sequence 0, and there are as many as experts
    assert count_tokens(ids, 4, None, num_sequences=2).tolist() == [[2, 0, 0, 0], [0, 0, 1, 1]]
    assert count_tokens(ids, 4, torch.tensor([False, True, False, False])).tolist() == [[2, 0, 1, 0]]


def test_the_loss_per_document_is_that_of_each_document_alone() -> None:
    documents = torch.tensor([[0, 0], [0, 1], [2, 1], [2, 1], [2, -1]])  # [S, B]
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(5, 2, 4, generator=generator).topk(2).indices
    scores = torch.rand(5, 2, 4, generator=generator) * (documents >= 0).unsqueeze(-1)
    alone = 0.0
    for row, first in ((0, 0), (0, 2), (1, 0), (1, 1)):
        of_it = documents[:, row] == first
        alone += balance_share(scores[of_it, row], count_tokens(ids[of_it, row], 4))
    group: Any = SimpleNamespace(size=lambda: 1)
    found = document_balance_share(scores.flatten(0, 1), ids.flatten(0, 1), documents.flatten(), 2, group)
    torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("seed", range(6))
def test_the_bias_step_has_the_bits_of_integer_arithmetic(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(2, 65, (1,), generator=generator))
    # Close to balance, with counts beyond 2^24 in sum: where rounding would turn signs round.
    counts = 40840 * 1000 + torch.randint(-3, 4, (experts,), generator=generator)
    bias = torch.randn(experts, generator=generator)
    stepped = updated_expert_bias(bias, counts, 1e-3)
    wanted = torch.tensor(bias_step(bias.tolist(), counts.tolist(), 1e-3))
    assert torch.equal(stepped.view(torch.int32), wanted.view(torch.int32))


def test_an_expert_at_the_mean_is_left_alone() -> None:
    bias = torch.tensor([0.5, 0.25, -0.5])
    assert updated_expert_bias(bias, torch.tensor([7, 6, 8]), 0.001).tolist()[0] == 0.5


@pytest.mark.parametrize("seed", range(2))
def test_a_centred_bias_has_mean_zero_and_the_same_differences(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bias, counts = torch.randn(64, generator=generator) + 0.3, torch.randint(0, 99, (64,), generator=generator)
    plain = updated_expert_bias(bias, counts, 1e-3)
    centred = updated_expert_bias(bias, counts, 1e-3, center=True)
    wanted = torch.tensor([b - math.fsum(plain.tolist()) / 64 for b in plain.tolist()])
    assert centred.dtype == torch.float32
    torch.testing.assert_close(centred, wanted, rtol=2**-23, atol=1e-9)  # one unit in the last place
    assert abs(centred.double().mean()) < 1e-7 < abs(plain.double().mean())


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.int64), (torch.float32, torch.float32)])
def test_other_dtypes_are_refused(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    with pytest.raises(TypeError, match="float32 bias and int64 counts"):
        updated_expert_bias(torch.zeros(2, dtype=dtypes[0]), torch.zeros(2, dtype=dtypes[1]), 0.001)


# ---- training steps of a model with auxiliary losses, capacity or padding: the same gradients on every layout


VOCAB, LENGTH = 64, 16
MODEL = {
    **PRESETS["tiny"],
    **{"seq_length": LENGTH, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 24, "num_layers": 2},
    **{"init_method_std": 0.1, "clip_grad": 0.0, "moe_layer_freq": 1, "lr": 1e-3, "micro_batch_size": 1},
}
EACH_LOSS = {
    "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.5, 0.8),
    "moe_z_loss_coeff": 0.05,
}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
TP1_CP2 = {"context_parallel_size": 2}
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
    "TP1_CP2": (2, TP1_CP2),
    "TP2, EP2, recomputed": (2, {**TP2_SP, **EP2, "expert_tensor_parallel_size": 1, **FULL}),
    "EP2, micro-batches of 2": (2, {**EP2, "micro_batch_size": 2}),
    "PP2 in two chunks each": (2, {**VPP2, "num_layers": 4, "micro_batch_size": 2}),
}


@pytest.mark.parametrize("layout", rows(STEPS, test=[name for name in STEPS if not name.endswith(("of 4", "of 2"))]))
def test_a_step_with_auxiliary_losses_per_token_and_unequal_masks_is_that_of_one_rank(gloo, once, layout):
    ranks, flags = STEPS[layout]
    flags = {**EACH_LOSS, **PER_TOKEN, **flags}
    alone = {**EACH_LOSS, **PER_TOKEN, "num_layers": flags.get("num_layers", 2)}
    (wanted,) = once(1, stepped, flags=alone, loss_mask=UNEQUAL)
    assert_same(gloo.run(ranks, stepped, flags=flags, loss_mask=UNEQUAL), wanted)


def stepped_packed(flags: dict[str, Any], packed: list[list[int]]) -> dict[str, Any]:
    return mtp_cases.steps(replace(Run(), **{**MODEL, **EACH_LOSS, **mtp_cases.APART, **flags}), packed=packed)


PREDICTED = {"mtp_num_layers": 1}
GROUPED = {"multi_latent_attention": False, "group_query_attention": True, "num_query_groups": 2}
PACKINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "CP2, recomputed": (2, {**TP1_CP2, **FULL}),
    "TP2, EP2, predictions": (2, {**TP2_SP, **EP2, "expert_tensor_parallel_size": 1, **PREDICTED}),
    "TP2, PP2, predictions": (4, {**TP2_SP, "pipeline_model_parallel_size": 2, **PREDICTED}),
    "grouped queries, CP2, predictions": (2, {**TP1_CP2, **GROUPED, **PREDICTED}),
    "PP2, CP2": (4, {"pipeline_model_parallel_size": 2, **TP1_CP2, "micro_batch_size": 2}),
}


@pytest.mark.engine
@pytest.mark.parametrize("layout", rows(PACKINGS, test=list(PACKINGS)[:4]))
def test_a_step_is_the_same_however_its_documents_are_packed_on_any_layout(gloo, once, layout):
    """Padding is in no count, and losses per document do not ask what else is in the sequence."""
    ranks, flags = PACKINGS[layout]
    alone = {key: flags[key] for key in (*PREDICTED, *GROUPED) if key in flags}
    (wanted,) = once(1, stepped_packed, flags=alone, packed=mtp_cases.PACKED)
    tokens = sum(map(sum, mtp_cases.PACKED))
    assert all(sum(counts) == tokens * 2 for counts in wanted["counts"].values())
    assert_same(gloo.run(ranks, stepped_packed, flags=flags, packed=mtp_cases.PACKED_OTHERWISE), wanted)


def gates(step: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: grad for name, (_, _, grad) in step["tensors"].items() if name.endswith("router.weight")}


def test_the_auxiliary_losses_weigh_the_same_however_the_loss_is_divided(once):
    """Per token or per micro-batch, with 45 of 64 tokens in the loss: their own part of each gate's gradient."""
    parts = []
    for flags in ({}, PER_TOKEN):
        wanted, without = (
            gates(once(1, stepped, flags={**losses, **flags, "num_layers": 2}, loss_mask=UNEQUAL)[0])
            for losses in (EACH_LOSS, {})
        )
        parts.append({name: full - without[name] for name, full in wanted.items()})
        for name, full in wanted.items():  # no trifle: the other tests would not miss it
            assert parts[-1][name].norm() > 0.3 * full.norm()
    for name, part in parts[0].items():
        assert relative(parts[1][name], part) < 1e-4


POLICIES = [("position", {**EP2, "moe_pad_expert_input_to_capacity": True}), ("probs", TP2_SP), ("position", TP1_CP2)]


@pytest.mark.parametrize(("policy", "layout"), rows(POLICIES, test=POLICIES[:1]), ids=["EP2, padded", "TP2", "TP1_CP2"])
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


@pytest.mark.parametrize(("length", "layout"), rows([(4, TP2_SP), (8, EP2)], test=[(4, TP2_SP)]))
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
