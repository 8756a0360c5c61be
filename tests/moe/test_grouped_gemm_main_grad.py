"""No autograd function of ours narrows a gradient on its way: what is fp32 stays so, what is half is rounded once.

A gradient that is rounded to bf16 in between is 0.2 % off, which no loss shows and no comparison of layouts finds.
Each function is held against fp64 from the same half-precision operands, element by element.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import _Lookup
from megatron_moe.model.cross_entropy import _NUMBERS_OF_TILE, cross_entropy, linear_cross_entropy
from megatron_moe.model.engine_config import transformer_config
from megatron_moe.model.loss import _WithoutPadding
from megatron_moe.model.mla import _JoinPositions
from megatron_moe.model.norm import RMSNorm
from megatron_moe.moe.experts import weighted_swiglu
from megatron_moe.moe.grouped_gemm import gate_product
from megatron_moe.moe.layer import SharedExperts
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.routing import _ExpertWeights, expert_weights
from megatron_moe.moe.rows import copy_rows, sum_copies
from megatron_moe.parallel import groups
from megatron_moe.parallel.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows, shared_by_ranks
from tests.helpers.routers import config
from tests.numbers import reference_moe as reference

HALVES = [torch.bfloat16, torch.float16]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(got: Tensor, exact: Tensor, terms: float) -> None:
    """Half a unit in the last place, and fp32's error over sums of `terms` products of size about one; of a result in
    fp32 nothing but the latter, so that one that passed through half precision is far outside."""
    limit = torch.full_like(exact, terms * (1e-15 if got.dtype == torch.float64 else 5e-7))
    if got.dtype != torch.float32:
        limit += 0.505 * torch.finfo(got.dtype).eps * torch.exp2(exact.abs().log2().floor())
    assert ((got.double() - exact).abs() <= limit).all(), float(((got.double() - exact).abs() / limit).max())


Function = Callable[..., Tensor]


def gradients(function: Function, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """The result and the gradient of every floating-point input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def assert_as_in_fp64(ours: Function, plain: Function, inputs: list[Tensor], upstream: Tensor, terms: float) -> None:
    """Result and gradients of `ours`, in the inputs' dtypes, are those of `plain` in fp64, rounded once."""
    exact = gradients(plain, [x.double() for x in inputs], upstream.double())
    for got, wanted, dtype in zip(gradients(ours, inputs, upstream), exact, [None, *(x.dtype for x in inputs)]):
        assert dtype is None or got.dtype == dtype
        assert_rounded_once(got, wanted, terms)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_activation(dtype: torch.dtype) -> None:
    def plain(gate_up: Tensor, probs: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up * probs.unsqueeze(-1)

    inputs = [randn(256, 64, seed=0, dtype=dtype), torch.rand(256, generator=torch.Generator().manual_seed(1))]
    assert_as_in_fp64(weighted_swiglu, plain, inputs, randn(256, 32, seed=2, dtype=dtype), terms=32)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gate(dtype: torch.dtype) -> None:
    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return gate_product(hidden, weight, torch.float32)

    inputs = [randn(64, 16, seed=0, dtype=dtype), randn(8, 16, seed=1, dtype=dtype)]
    assert_as_in_fp64(ours, F.linear, inputs, randn(64, 8, seed=2), terms=64)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_copies_and_sums_of_rows(dtype: torch.dtype) -> None:
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    source, slots = order // 6, order.argsort().view(8, 6)
    few, many = randn(8, 16, seed=1, dtype=dtype), randn(48, 16, seed=2, dtype=dtype)
    assert_as_in_fp64(lambda x: copy_rows(x, source, slots), lambda x: x[source], [few], many, terms=6)
    assert_as_in_fp64(lambda x: sum_copies(x, source, slots), lambda x: x[slots].sum(1), [many], few, terms=6)


@pytest.mark.parametrize("chunk_tokens", [None, 16])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_fused_loss(dtype: torch.dtype, chunk_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_moe.model.cross_entropy.BLOCK_ROWS", 16)
    labels = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(3))
    assert_as_in_fp64(
        lambda h, w: linear_cross_entropy(h, w, labels, chunk_tokens=chunk_tokens),
        lambda h, w: F.cross_entropy(F.linear(h, w), labels, reduction="none"),
        [randn(64, 16, seed=0, dtype=dtype), randn(50, 16, seed=1, dtype=dtype)],
        randn(64, seed=2),
        terms=64,
    )


@pytest.mark.parametrize("tokens_of_tile", [1, 7, 64])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_the_loss_of_logits(dtype: torch.dtype, tokens_of_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_NUMBERS_OF_TILE, "on a CPU", tokens_of_tile * 50)
    labels = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(3))
    assert_as_in_fp64(
        lambda logits: cross_entropy(logits.clone(), labels),
        lambda logits: F.cross_entropy(logits, labels, reduction="none"),
        [randn(64, 50, seed=0, dtype=dtype)],
        randn(64, seed=2),
        terms=4,
    )


def test_the_padding_of_the_vocabulary() -> None:
    grad = randn(4, 12, seed=1)
    logits = randn(4, 12, seed=0).requires_grad_()
    (found,) = torch.autograd.grad(_WithoutPadding.apply(logits.clone(), 10), logits, grad.clone())
    assert torch.equal(found[:, :10], grad[:, :10]) and not found[:, 10:].any()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_the_embedding(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 10, (500,), generator=torch.Generator().manual_seed(0))
    upstream = randn(500, 8, seed=2, dtype=dtype)
    table = [randn(10, 8, seed=1, dtype=dtype)]
    assert_as_in_fp64(lambda t: _Lookup.apply(ids, t), lambda t: t[ids], table, upstream, terms=50)


@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(64, 32), (5, 2, 3, 16)], ids=["hidden states", "heads"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_the_norm(dtype: torch.dtype, shape: tuple[int, ...], size: float) -> None:
    class Config:
        params_dtype, sequence_parallel, fp32_residual_connection = dtype, False, False

    layer = RMSNorm(Config, shape[-1], eps=1e-5)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    inputs = [(size * randn(*shape, seed=0)).to(dtype), randn(shape[-1], seed=1, dtype=dtype)]
    upstream = randn(*shape, seed=2, dtype=dtype)
    terms = 64 / min(size, 1.0)  # a gradient is larger where the rows are smaller
    assert_as_in_fp64(lambda x, w: layer._kernel(x, w, layer.eps, x.dtype), plain, inputs, upstream, terms=terms)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("heads", [1, 6])
def test_heads_with_positions(heads: int, dtype: torch.dtype) -> None:
    """Positions of their own, and those that six heads share, whose gradients are added up before they are rounded."""
    angles = torch.rand(8, 1, 1, 4, generator=torch.Generator().manual_seed(3)) * 6
    cos, sin = angles.cos(), angles.sin()

    def plain(rest: Tensor, positional: Tensor) -> Tensor:
        turned = torch.view_as_complex(positional.unflatten(-1, (-1, 2))) * torch.complex(cos.double(), sin.double())
        return torch.cat((rest, torch.view_as_real(turned).flatten(-2).expand(-1, -1, heads, -1)), dim=-1)

    inputs = [randn(8, 2, heads, 5, seed=0, dtype=dtype), randn(8, 2, 1, 8, seed=1, dtype=dtype)]
    upstream = randn(8, 2, heads, 13, seed=2, dtype=dtype)
    assert_as_in_fp64(lambda a, b: _JoinPositions.apply(a, b, cos, sin), plain, inputs, upstream, terms=2 * heads)


WEIGHING = {"normalised": (False, True, 2.5), "as they are": (False, False, 1.0), "softmax": (True, True, 1.0)}


@pytest.mark.parametrize("how", WEIGHING)
def test_the_weights_of_the_chosen_experts(how: str) -> None:
    ids = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(t))[:3] for t in range(40)])
    padding = torch.arange(40) % 7 == 0
    softmax, normalize, scaling = WEIGHING[how]

    def plain(scores: Tensor) -> Tensor:
        chosen = scores.gather(-1, ids)
        weights = chosen.softmax(-1) if softmax else chosen / chosen.sum(-1, keepdim=True) if normalize else chosen
        return weights.masked_fill(padding.unsqueeze(-1), 0) * scaling

    def ours(scores: Tensor) -> Tensor:
        work = partial(expert_weights, scores, scores, ids, padding, *WEIGHING[how])
        return _ExpertWeights.apply(lambda: (ids, work()), scores, padding, WEIGHING[how])[1]

    scores = torch.rand(40, 9, generator=torch.Generator().manual_seed(0)) + 0.1
    assert_as_in_fp64(ours, plain, [scores], randn(40, 3, seed=2), terms=6)


# ---- what a router and a shared expert do around them


def test_the_router_in_bf16_with_its_losses() -> None:
    """Everything between the gate's operands and the weights of the experts, auxiliary losses too, is fp32."""
    flags = dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)
    router = TopKRouter(config(**flags)).bfloat16()
    with torch.no_grad():
        router.weight.copy_(randn(8, 16, seed=0))
    upstream = randn(200, 2, seed=2)
    hidden = randn(200, 16, seed=1, dtype=torch.bfloat16).requires_grad_()
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    decision = router.route(hidden)
    decision.probs.backward(upstream)

    wide, gate = hidden.detach().double().requires_grad_(), router.weight.detach().double().requires_grad_()
    routing = reference.Routing(2, "sigmoid")
    logits = wide @ gate.T
    routes = [reference.route_one(token, None, routing) for token in logits]
    seen = reference.Result(wide, [], logits, [chosen for chosen, _ in routes], set())
    total = sum((probs * grad).sum() for (_, probs), grad in zip(routes, upstream.double()))
    (total + 0.5 * reference.balance_loss(seen, 2, "sigmoid") + 0.25 * reference.z_loss(seen)).backward()
    assert decision.expert_ids.tolist() == seen.chosen and decision.probs.dtype == torch.float32
    assert_rounded_once(decision.probs.detach(), torch.stack([probs for _, probs in routes]).detach(), terms=1)
    assert_rounded_once(hidden.grad, wide.grad, terms=10)
    assert_rounded_once(router.weight.grad, gate.grad, terms=40)


@pytest.mark.usefixtures("one_process")
def test_the_shared_experts_gate() -> None:
    """From the rows that the expert gives, in the model's dtype, to the gate's weight: fp32, rounded once."""
    sizes = {"num_experts": 4, "hidden_size": 16, "num_attention_heads": 2, "moe_ffn_hidden_size": 8}
    run = replace(Run(), bf16=True, **sizes, moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True)
    pg = groups.initialize(run)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = SharedExperts(transformer_config(run), MoEOptions.from_run(run), linears, pg.tp)
    for number, parameter in enumerate(shared.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=number) / 2)
    rows: list[Tensor] = []
    shared.linear_fc2.register_forward_hook(lambda _module, _inputs, output: rows.append(output[0].detach()))
    hidden, upstream = randn(100, 1, 16, seed=7, dtype=torch.bfloat16), randn(100, 1, 16, seed=8, dtype=torch.bfloat16)
    output = shared(hidden)
    output.backward(upstream)
    gate_weight = shared.gate_weight.detach().double().requires_grad_()
    wanted = rows[0].double() * torch.sigmoid(F.linear(hidden.double(), gate_weight))
    wanted.backward(upstream.double())
    assert_rounded_once(output.detach(), wanted.detach(), terms=16)
    assert_rounded_once(shared.gate_weight.grad, gate_weight.grad, terms=200)


# ---- over ranks


def travelled(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By name: what this rank put in, what came back as its gradient, and the gradient that came in."""
    pg = groups.initialize(Run())
    rank, size = pg.dp.rank(), pg.dp.size()
    rows = randn(4 * size, 3, seed=rank, dtype=dtype)

    def found(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        leaf = rows.detach().clone().requires_grad_()
        out = function(leaf)
        upstream = randn(*out.shape[::-1], seed=100 + rank, dtype=dtype).t()  # not contiguous
        return out.detach(), *torch.autograd.grad(out, leaf, upstream), upstream

    splits = [4] * size
    return {
        "all to all": found(lambda x: all_to_all_rows(x, splits, splits, pg.dp)),
        "all gather": found(lambda x: all_gather_rows(x, pg.dp)),
        "reduce scatter": found(lambda x: reduce_scatter_rows(x, pg.dp)),
        "shared": found(lambda x: shared_by_ranks(x, pg.dp)),
        "rows": (rows, rows, rows),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_that_travel(gloo: Any, dtype: torch.dtype) -> None:
    size = 4 if dtype == torch.bfloat16 else 2
    ranks = gloo.run(size, travelled, dtype=dtype)
    rows = torch.stack([rank["rows"][0].double() for rank in ranks])  # [rank, 4 x size, 3]
    into = {name: torch.stack([rank[name][2].double() for rank in ranks]) for name in ranks[0]}
    for r, rank in enumerate(ranks):
        mine = slice(4 * r, 4 * r + 4)
        assert torch.equal(rank["all to all"][0].double(), rows[:, mine].flatten(0, 1))
        assert torch.equal(rank["all to all"][1].double(), into["all to all"][:, mine].flatten(0, 1))
        assert torch.equal(rank["all gather"][0].double(), rows.flatten(0, 1))
        every = slice(4 * size * r, 4 * size * (r + 1))
        assert_rounded_once(rank["all gather"][1], into["all gather"][:, every].sum(0), terms=size)
        assert_rounded_once(rank["reduce scatter"][0], rows[:, mine].sum(0), terms=size)
        assert torch.equal(rank["reduce scatter"][1].double(), into["reduce scatter"].flatten(0, 1))
        # The sum of two ranks is rounded once; that of more in the collective, as the engine's own is.
        if size == 2:
            assert_rounded_once(rank["shared"][1], into["shared"].sum(0), terms=size)
