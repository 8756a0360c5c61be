"""Products in emulated FP8, in layers on several ranks and in a run: what they change, and what they leave."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.dispatch import build_layer_dispatcher
from megatron_moe.moe.experts import GroupedExperts, GroupedExpertsFp8
from megatron_moe.moe.grouped_gemm_fp8 import fp8_products
from megatron_moe.parallel import groups
from megatron_moe.platform import env_vars
from tests.helpers.moe_cases import build_layer, engine_config, random_case, tokens_and_padding
from tests.helpers.rows import rows
from tests.numbers.reference_moe import Routing

pytestmark = pytest.mark.engine

SEQUENCE, SEQUENCES = 8, 4
CASE: dict[str, Any] = {
    **random_case(3), "num_experts": 4, "routing": Routing(2, "sigmoid"), "bias": False, "shared": False, "aux": None,
    "padding": False, "pad": False, "dispatcher": "alltoall", "backend": "grouped_mm", "per_token": False, "z": None,
}  # fmt: skip
EP2 = {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# Blocks of 128 x 128 are those of one process where ETP cuts an expert at a multiple of 128, and others elsewhere.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "EP2": (EP2, {}),
    "EP2, all-gather": (EP2, {"dispatcher": "allgather"}),
    "ETP2": (TP2, {"width": 256}),
    "ETP2, narrow": (TP2, {"width": 64}),
}
# What each rank has of a result is its part along this dimension: of the sequences, of the tokens under SP.
SPLIT = {"output": 1, "gradient": 1, "weight1": 0, "weight2": 0, "counts": 0}
SPLIT_BY_TP = {**SPLIT, "output": 0, "gradient": 0, "weight1": 2, "weight2": 2}


def layer_passes(layout: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """One forward and backward over the same tokens on any layout: what this rank has of the results, by format."""
    pg, found = None, {}
    for name, (its, options) in LAYOUTS.items():
        for fp8_format in (None, "e4m3", "hybrid") if layout in ({}, its) else ():
            layer, pg = build_layer({**CASE, **options, "fp8_format": fp8_format}, layout, pg)
            hidden, _ = tokens_and_padding(CASE, SEQUENCE, SEQUENCES)
            mine = hidden.chunk(pg.dp.size(), dim=1)[pg.dp.rank()]
            found[name, fp8_format] = results_of(layer, mine.chunk(pg.tp.size(), dim=0)[pg.tp.rank()])
    return found


def results_of(layer: Any, hidden: torch.Tensor) -> dict[str, Any]:
    mine = hidden.clone().requires_grad_()
    output, _ = layer(mine)
    (output * torch.linspace(0.5, 1.5, output.shape[-1])).sum().backward()
    weights = {name: weight.grad for name, weight in layer.experts.named_parameters()}
    counts = layer.router.local_tokens_per_expert[None].clone()
    return {"output": output.detach(), "gradient": mine.grad, "counts": counts, **weights}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_on_several_ranks_round_the_same_tiles(once, layout):
    """An expert has fewer than 128 rows here, one tile, whose maximum does not depend on their order.

    A number that another order of addition moves over the middle between two FP8 numbers may be rounded the other way.
    """
    (one_process,), flags = once(1, layer_passes, layout={}), LAYOUTS[layout][0]
    split, plain = SPLIT_BY_TP if flags is TP2 else SPLIT, one_process[layout, None]
    for fp8_format in ("e4m3", "hybrid"):
        alone, ranks = one_process[layout, fp8_format], once(2, layer_passes, layout=flags)
        found = {name: torch.cat([one[layout, fp8_format][name] for one in ranks], split[name]) for name in alone}
        assert torch.equal(found["counts"].sum(0), plain["counts"].sum(0))
        for name in ("output", "gradient", "weight1", "weight2"):
            size = plain[name].norm()
            assert 1e-2 * size < (alone[name] - plain[name]).norm() < 0.15 * size, name  # which FP8 does to them
            apart = (found[name] - alone[name]).norm()
            assert 5e-3 * size < apart < 0.15 * size if layout == "ETP2, narrow" else apart < 5e-3 * size, name


def passes_by_triton(layout: dict[str, Any], changes: dict[str, Any]) -> list[dict[str, Any]]:
    """A layer's results by our kernels, and by their parts, which write the rows in bf16 that others cut."""
    case, found, fused = {**CASE, **changes, "fp8_format": "hybrid"}, list[dict[str, Any]](), "fused" in changes
    case["routing"] = dataclasses.replace(case["routing"], capacity_factor=changes.get("capacity"))
    products = fp8_products("hybrid", "triton", fused)
    triton = mock.patch.dict(env_vars.chosen, {env_vars.KERNELS: "triton"})
    with triton, mock.patch("megatron_moe.moe.layer.fp8_products", lambda *_, **__: products):
        layer, pg = build_layer(case, layout)
        layer.to(torch.bfloat16)
        hidden = tokens_and_padding(case, 2, SEQUENCES)[0].bfloat16().chunk(pg.dp.size(), dim=1)[pg.dp.rank()]
        if fused:  # all tokens choose the experts of the first rank
            hidden, _ = hidden.abs(), layer.router.weight.data.copy_(torch.tensor([[2], [1], [-1], [-2]]))
        experts: Any = layer.experts
        for kind in (GroupedExpertsFp8, GroupedExperts):
            experts.__class__ = kind
            layer.dispatcher = build_layer_dispatcher(experts.options, experts.groups, kind.copies_rows)
            copied = kind.copies_rows and not case["pad"]
            assert ("WithoutCopies" in type(layer.dispatcher).__name__) == copied
            layer.zero_grad(set_to_none=True)
            for weight in experts.parameters():
                weight.main_grad = torch.ones(weight.shape)
            found.append(results_of(layer, hidden) | {"router": layer.router.weight.grad, "counts": torch.empty(0)})
            if fused:  # and nothing is handed on
                assert all(weight.grad.is_sparse or not weight.grad.any() for weight in experts.parameters())
                found[-1] |= {name: weight.main_grad for name, weight in experts.named_parameters()}
    return found


BY_TRITON: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "EP1": ({}, {}),
    "EP1, capacity": ({}, {"capacity": 0.75}),
    "EP1, padded": ({}, {"capacity": 0.75, "pad": True}),
    "EP2": (EP2, {}),
    "EP2, a rank without rows, sums": (EP2, {"fused": True}),
}


@pytest.mark.parametrize("name", rows(BY_TRITON, test=["EP1, capacity", "EP2, a rank without rows, sums"]))
def test_rows_that_are_cut_where_they_are_copied_have_the_same_bits(gloo, name):
    layout, changes = BY_TRITON[name]
    for found, wanted in gloo.run(2 if layout else 1, passes_by_triton, layout=layout, changes=changes):
        for part in ("gradient", "router"):  # the gradients of rows' weights are added up in another order
            assert torch.allclose(found.pop(part), wanted[part], rtol=2e-2, atol=1e-2 * float(wanted[part].abs().max()))
        assert len(found) == 4 and all(torch.equal(one, wanted[part]) for part, one in found.items())


WIDTH, INNER = 256, 256


def mlp_passes(ranks: int) -> list[dict[str, Any]]:
    """A gated MLP's results on this rank: without and with sequence parallelism, and on one rank without FP8."""
    pg = groups.initialize(replace(Run(), tensor_model_parallel_size=ranks))
    if ranks == 1:
        return [mlp_pass(pg, False, in_fp8) for in_fp8 in (True, False)]
    return [mlp_pass(pg, sequence_parallel, in_fp8=True) for sequence_parallel in (False, True)]


def mlp_pass(pg: Any, sequence_parallel: bool, in_fp8: bool) -> dict[str, Any]:
    """One forward and backward of a gated MLP of the engine's linear layers: what this rank has of the results."""
    from megatron_moe.model.build import Fp8ColumnParallelLinear, Fp8RowParallelLinear
    from megatron_moe.moe.grouped_gemm_fp8 import fp8_products

    run = replace(Run(), tensor_model_parallel_size=pg.tp.size(), sequence_parallel=sequence_parallel)
    options = {"config": engine_config(CASE, run), "init_method": None, "bias": False, "tp_group": pg.tp}
    up = ColumnParallelLinear(WIDTH, 2 * INNER, gather_output=False, **options)
    down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True, skip_bias_add=False, **options)
    if in_fp8:
        up.__class__, down.__class__ = Fp8ColumnParallelLinear, Fp8RowParallelLinear
        up.fp8_product, down.fp8_product = fp8_products("hybrid")
    generator = torch.Generator().manual_seed(5)
    ranks, rank = pg.tp.size(), pg.tp.rank()
    weight1, weight2 = (torch.randn(size, WIDTH, generator=generator) for size in (2 * INNER, INNER))
    hidden, grad = (torch.randn(64, 2, WIDTH, generator=generator) for _ in range(2))
    with torch.no_grad():
        up.weight.copy_(weight1.view(2, INNER, WIDTH).chunk(ranks, 1)[rank].flatten(0, 1))
        down.weight.copy_(weight2.t().chunk(ranks, 1)[rank])
    mine, its = ((one.chunk(ranks)[rank] if sequence_parallel else one).clone() for one in (hidden, grad))
    gate, value = up(mine.requires_grad_())[0].chunk(2, -1)
    output = down(torch.nn.functional.silu(gate) * value)[0]
    output.backward(its)
    return {
        "output": output.detach(),
        "gradient": mine.grad,
        "weight1": up.weight.grad.view(2, -1, WIDTH),
        "weight2": down.weight.grad,
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_linear_layers_split_over_tp_round_the_same_tiles(once, sequence_parallel):
    ranks = [rank[sequence_parallel] for rank in once(2, mlp_passes, ranks=2)]
    ((alone, plain),) = once(1, mlp_passes, ranks=1)
    for name, dimension in {"output": 0, "gradient": 0, "weight1": 1, "weight2": 1}.items():
        if name.startswith("weight") or sequence_parallel:
            found = torch.cat([rank[name] for rank in ranks], dimension)
        else:
            found = ranks[0][name]
            assert torch.equal(found, ranks[1][name])
        size = plain[name].norm()
        assert (found - alone[name]).norm() < 5e-3 * size, name
        assert 1e-2 * size < (alone[name] - plain[name]).norm() < 0.15 * size, name


def step(flags: dict[str, Any]) -> dict[str, Any]:
    """A step of a tiny model: initial weights, loss, and what it leaves behind."""
    from megatron_moe.moe.router import routers
    from tests.helpers.stepped_trainer import Trainer, digest

    trainer = Trainer({"bf16": True, **flags})
    weights = {name: digest(value) for chunk in trainer.model for name, value in chunk.state_dict().items()}
    result = trainer.step()
    return {
        "weights": weights,
        "loss": result.loss,
        "norm": result.grad_norm,
        "committed": result.committed,
        "bias": [(one.expert_bias.tolist(), one.expert_bias.dtype.itemsize) for one in routers(trainer.model)],
        "state": trainer.state(),
    }


@pytest.fixture(scope="module")
def in_fp8(gloo: Any) -> dict[str, Any]:
    return gloo.run(1, step, flags={"fp8_format": "e4m3"})[0]


def test_a_run_with_fp8_starts_from_the_same_weights_and_state_and_routes_the_same_tokens(gloo, in_fp8):
    """The first layer of experts gets the same input in the first step, and so its bias the same counts."""
    (plain,), (experts,) = (
        gloo.run(1, step, flags=flags) for flags in ({}, {"fp8_format": "e4m3", "fp8_modules": ("experts",)})
    )
    assert experts["bias"][0] == plain["bias"][0] and plain["bias"][0][1] == 4 and any(plain["bias"][0][0])
    assert len({one["loss"] for one in (plain, experts, in_fp8)}) == 3
    for one in (experts, in_fp8):
        assert one["weights"] == plain["weights"]  # and so a checkpoint of one is one of the other
        assert one["committed"]
        assert one["loss"] == pytest.approx(plain["loss"], rel=1e-2)
        assert one["norm"] == pytest.approx(plain["norm"], rel=5e-2)


RECOMPUTED = ["moe mlp core_attn", "moe_act layernorm mla_up_proj shared_experts"]


@pytest.mark.parametrize("modules", rows(RECOMPUTED, test=RECOMPUTED[1:]))
def test_recomputation_gives_the_same_bits(gloo, in_fp8, modules):
    flags = {"fp8_format": "e4m3", "recompute_granularity": "selective", "recompute_modules": tuple(modules.split())}
    (again,) = gloo.run(1, step, flags=flags)
    assert again == in_fp8


def test_weights_spread_over_ranks_and_padded_experts_train_in_fp8_too(gloo, in_fp8):
    """ZeRO-3 with experts on two ranks; capacity and padding; other tiles along tokens than one process has."""
    flags = {"fp8_format": "e4m3", "expert_model_parallel_size": 2, "moe_expert_capacity_factor": 4.0}
    flags |= {"moe_pad_expert_input_to_capacity": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    for rank in gloo.run(2, step, flags=flags):
        assert rank["committed"]
        assert rank["loss"] == pytest.approx(in_fp8["loss"], rel=2e-3)
        assert rank["norm"] == pytest.approx(in_fp8["norm"], rel=3e-2)
