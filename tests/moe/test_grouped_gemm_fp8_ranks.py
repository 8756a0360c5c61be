"""Products in emulated FP8, in layers on several ranks and in a run: what they change, and what they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel import groups
from tests.helpers.moe_cases import build_layer, engine_config, tokens_and_padding
from tests.numbers.reference_moe import Routing

pytestmark = pytest.mark.engine

SEQUENCE, SEQUENCES = 8, 4
CASE: dict[str, Any] = {
    "seed": 3,
    "num_experts": 4,
    "routing": Routing(2, "sigmoid"),
    "bias": False,
    "shared": False,
    "padding": False,
    "dispatcher": "alltoall",
    "backend": "grouped_mm",
    "per_token": False,
    "aux": None,
    "z": None,
}
LAYOUTS = {
    "one process": (1, {}, {}),
    "EP2": (2, {"expert_model_parallel_size": 2}, {}),
    "EP2, all-gather": (2, {"expert_model_parallel_size": 2}, {"dispatcher": "allgather"}),
    "EP4": (4, {"expert_model_parallel_size": 4}, {}),
    # Blocks of 128 x 128 are those of one process where ETP cuts an expert at a multiple of 128, and others elsewhere.
    "ETP2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"width": 256}),
    "ETP2, narrow": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"width": 64}),
}
# What each rank has of a result is its part along this dimension: of the sequences, of the tokens under SP.
SPLIT = {"output": 1, "gradient": 1, "weight1": 0, "weight2": 0, "counts": 0}
SPLIT_BY_TP = {**SPLIT, "output": 0, "gradient": 0, "weight1": 2, "weight2": 2}


def layer_pass(case: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """One forward and backward over the same tokens on any layout: what this rank has of the results."""
    layer, pg = build_layer(case, layout)
    hidden, _ = tokens_and_padding(case, SEQUENCE, SEQUENCES)
    mine = hidden.chunk(pg.dp.size(), dim=1)[pg.dp.rank()]
    mine = mine.chunk(pg.tp.size(), dim=0)[pg.tp.rank()].clone().requires_grad_()
    output, _ = layer(mine)
    (output * torch.linspace(0.5, 1.5, output.shape[-1])).sum().backward()
    return {
        "output": output.detach(),
        "gradient": mine.grad,
        "weight1": layer.experts.weight1.grad,
        "weight2": layer.experts.weight2.grad,
        "counts": layer.router.local_tokens_per_expert[None].clone(),
    }


@pytest.fixture(scope="module")
def passed(gloo: Any) -> Any:
    """The results of all ranks together, by layout and options, computed once each."""
    known: dict[Any, dict[str, torch.Tensor]] = {}

    def of(layout: str, fp8_format: str | None, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        key = (layout, fp8_format, *options.items())
        if key not in known:
            ranks, flags, _ = LAYOUTS[layout]
            found = gloo.run(ranks, layer_pass, case={**CASE, **options, "fp8_format": fp8_format}, layout=flags)
            split = SPLIT_BY_TP if "sequence_parallel" in flags else SPLIT
            known[key] = {name: torch.cat([rank[name] for rank in found], split[name]) for name in found[0]}
        return known[key]

    return of


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one process"])
def test_experts_on_several_ranks_round_the_same_tiles(passed: Any, layout: str, fp8_format: str) -> None:
    """An expert has fewer than 128 rows here, one tile, whose maximum does not depend on their order.

    A number that another order of addition moves over the middle between two FP8 numbers may be rounded the other way.
    """
    options = LAYOUTS[layout][2]
    found, alone = passed(layout, fp8_format, options), passed("one process", fp8_format, options)
    plain = passed("one process", None, options)
    assert torch.equal(found["counts"].sum(0), plain["counts"].sum(0))
    for name in ("output", "gradient", "weight1", "weight2"):
        size = plain[name].norm()
        assert 1e-2 * size < (alone[name] - plain[name]).norm() < 0.15 * size, name  # which FP8 does to them
        apart = (found[name] - alone[name]).norm()
        assert 5e-3 * size < apart < 0.15 * size if layout == "ETP2, narrow" else apart < 5e-3 * size, name


WIDTH, INNER = 256, 256


def mlp_pass(layout: dict[str, Any], in_fp8: bool = True) -> dict[str, Any]:
    """One forward and backward of a gated MLP of the engine's linear layers: what this rank has of the results."""
    from megatron_moe.model.linear_fp8 import Fp8ColumnParallelLinear, Fp8RowParallelLinear
    from megatron_moe.moe.grouped_gemm_fp8 import fp8_products

    run = replace(Run(), **layout)
    pg = groups.initialize(run)
    options = {"config": engine_config(CASE, run), "init_method": None, "bias": False, "tp_group": pg.tp}
    up = ColumnParallelLinear(WIDTH, 2 * INNER, gather_output=False, **options)
    down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True, skip_bias_add=False, **options)
    if in_fp8:
        up.__class__, down.__class__ = Fp8ColumnParallelLinear, Fp8RowParallelLinear
        up.fp8_product, down.fp8_product = fp8_products("hybrid")
    generator = torch.Generator().manual_seed(5)
    ranks, rank, sharded = pg.tp.size(), pg.tp.rank(), run.parallel.sequence_parallel
    weight1, weight2 = (torch.randn(size, WIDTH, generator=generator) for size in (2 * INNER, INNER))
    hidden, grad = (torch.randn(64, 2, WIDTH, generator=generator) for _ in range(2))
    with torch.no_grad():
        up.weight.copy_(weight1.view(2, INNER, WIDTH).chunk(ranks, 1)[rank].flatten(0, 1))
        down.weight.copy_(weight2.t().chunk(ranks, 1)[rank])
    mine, its = ((one.chunk(ranks)[rank] if sharded else one).clone() for one in (hidden, grad))
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
def test_linear_layers_split_over_tp_round_the_same_tiles(gloo: Any, sequence_parallel: bool) -> None:
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    ranks, (alone,) = gloo.run(2, mlp_pass, layout=layout), gloo.run(1, mlp_pass, layout={})
    (plain,) = gloo.run(1, mlp_pass, layout={}, in_fp8=False)
    for name, dimension in {"output": 0, "gradient": 0, "weight1": 1, "weight2": 1}.items():
        if name.startswith("weight") or sequence_parallel:
            found = torch.cat([rank[name] for rank in ranks], dimension)
        else:
            found = ranks[0][name]
            assert torch.equal(found, ranks[1][name])
        size = plain[name].norm()
        assert (found - alone[name]).norm() < 5e-3 * size, name
        assert 1e-2 * size < (alone[name] - plain[name]).norm() < 0.15 * size, name


def steps(flags: dict[str, Any], count: int = 2) -> dict[str, Any]:
    """Some steps of a tiny model: initial weights, dtypes, losses, and after the first step every router's state."""
    from megatron_moe.moe.state import routers
    from tests.helpers.stepped_trainer import Trainer, digest

    trainer = Trainer({"bf16": True, **flags})
    weights = {name: digest(value) for chunk in trainer.model for name, value in chunk.state_dict().items()}
    results, states = [], []
    for _ in range(count):
        results.append(trainer.step())
        states.append([(one.expert_bias.tolist(), one.expert_bias.dtype.itemsize) for one in routers(trainer.model)])
    return {
        "weights": weights,
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "committed": all(result.committed for result in results),
        "bias": states[0],
        "state": trainer.state(),
    }


@pytest.fixture(scope="module")
def in_fp8(gloo: Any) -> dict[str, Any]:
    return gloo.run(1, steps, flags={"fp8_format": "e4m3"})[0]


def test_a_run_with_fp8_starts_from_the_same_weights_and_state_and_routes_the_same_tokens(
    gloo: Any, in_fp8: dict[str, Any]
) -> None:
    """The first layer of experts gets the same input in the first step, and so its bias the same counts."""
    (plain,), (experts,) = (
        gloo.run(1, steps, flags=flags) for flags in ({}, {"fp8_format": "e4m3", "fp8_modules": ("experts",)})
    )
    assert experts["bias"][0] == plain["bias"][0] and plain["bias"][0][1] == 4 and any(plain["bias"][0][0])
    assert len({str(one["losses"]) for one in (plain, experts, in_fp8)}) == 3
    for one in (experts, in_fp8):
        assert one["weights"] == plain["weights"]  # and so a checkpoint of one is one of the other
        assert one["committed"]
        assert one["losses"] == pytest.approx(plain["losses"], rel=1e-2)
        assert one["norms"] == pytest.approx(plain["norms"], rel=5e-2)


@pytest.mark.parametrize(
    "modules", [("moe", "mlp", "core_attn"), ("moe_act", "layernorm", "mla_up_proj", "shared_experts")]
)
def test_recomputation_gives_the_same_bits(gloo: Any, in_fp8: dict[str, Any], modules: tuple[str, ...]) -> None:
    flags = {"fp8_format": "e4m3", "recompute_granularity": "selective", "recompute_modules": modules}
    (again,) = gloo.run(1, steps, flags=flags)
    assert again == in_fp8


def test_weights_spread_over_ranks_and_padded_experts_train_in_fp8_too(gloo: Any, in_fp8: dict[str, Any]) -> None:
    """ZeRO-3 with experts on two ranks; capacity and padding; other tiles along tokens than one process has."""
    flags = {"fp8_format": "e4m3", "expert_model_parallel_size": 2, "moe_expert_capacity_factor": 4.0}
    flags |= {"moe_pad_expert_input_to_capacity": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    for rank in gloo.run(2, steps, flags=flags):
        assert rank["committed"]
        assert rank["losses"] == pytest.approx(in_fp8["losses"], rel=2e-3)
        assert rank["norms"] == pytest.approx(in_fp8["norms"], rel=3e-2)
