"""The MoE layer on 1, 2 and 4 ranks agrees with the readable reference: outputs, all gradients, counts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_moe.moe.routes import tagged
from tests.helpers.errors import relative
from tests.helpers.moe_cases import build_layer, full_weights, random_case, tokens_and_padding
from tests.helpers.rows import rows
from tests.numbers import reference_moe as reference

pytestmark = pytest.mark.engine

SEQUENCE, BATCH = 4, 2

SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
EP2 = dict(expert_model_parallel_size=2)
ETP1 = dict(expert_tensor_parallel_size=1)
LAYOUTS = {
    1: [dict()],
    2: [EP2, SP, {**SP, **ETP1}, {**SP, **EP2, **ETP1}],
    4: [
        dict(expert_model_parallel_size=4),
        {**SP, **EP2},
        {**EP2, "expert_tensor_parallel_size": 2},
        {**SP, **ETP1, "expert_model_parallel_size": 4},
        EP2,
    ],
}
PLACES = [(world, number) for world, layouts in LAYOUTS.items() for number in range(len(layouts))]
# Of four ranks those in which EP and ETP cut the experts together.
TEST = [place for place in PLACES if place[0] < 4] + [(4, 1), (4, 2)]


def cases_of(world: int, number: int) -> list[dict[str, Any]]:
    """Random cases, no two layouts the same, and on one and two ranks a bias that chooses by softmax scores."""
    cases = [random_case(100 * world + 10 * number + seed) for seed in range(10 if world == 1 else 6)]
    return cases + [biased(*how) for how in BIASED if world < 4 and number < 2]


BIASED = [(pre_softmax, group_score) for pre_softmax in (True, False) for group_score in (None, "megatron")]


def biased(pre_softmax: bool, group_score: str | None) -> dict[str, Any]:
    """The bias is added to the softmax over all experts, also where the weights are a softmax over the chosen."""
    groups = dict(num_groups=4, group_topk=2, group_score=group_score) if group_score else {}
    routing = reference.Routing(4, pre_softmax=pre_softmax, normalise=not pre_softmax, **groups)
    return {**random_case(3), "num_experts": 8, "routing": routing, "bias": True, "aux": "seq_aux_loss", "pad": False}


def run_layers(cases: list[dict[str, Any]], layout: dict[str, Any]) -> list[dict[str, Any]]:
    pg, found = None, []
    for case in cases:
        result, pg = run_layer(case, layout, pg)
        found.append(result)
    return found


def run_layer(case: dict[str, Any], layout: dict[str, Any], pg: Any) -> tuple[dict[str, Any], Any]:
    """One forward and backward on this rank, and its process groups."""
    layer, pg = build_layer(case, layout, pg)
    hidden, padding = tokens_and_padding(case, SEQUENCE, BATCH * dist.get_world_size())
    tp, dp = pg.tp, pg.dp
    # Data parallel ranks take different sequences; TP ranks take different parts of the same ones.
    columns = hidden.chunk(dp.size(), dim=1)[dp.rank()]
    part = columns.chunk(tp.size(), dim=0)[tp.rank()].clone().requires_grad_()
    mask = None
    if padding is not None:
        mask = padding.chunk(dp.size(), dim=0)[dp.rank()].chunk(tp.size(), dim=1)[tp.rank()]
    if case["routing"].replayed:
        mask = replaying(layer.router, columns.shape[1], tp, mask)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    output, bias = layer(part, padding_mask=mask)
    assert bias is None and output.dtype == part.dtype
    (output * torch.linspace(0.5, 1.5, output.shape[-1])).sum().backward()
    experts, shared, router = layer.experts, layer.shared_experts, layer.router
    found = dict(
        where=(dp.rank(), tp.rank(), experts.first_expert, experts.groups.etp_rank, experts.num_local_experts),
        output=output.detach(),
        grad_input=part.grad,
        router=router.weight.grad,
        weight1=experts.weight1.grad,
        weight2=experts.weight2.grad,
        counts=router.local_tokens_per_expert.clone(),
        dropped=0 if (dropped := router.local_dropped_per_expert) is None else dropped.clone(),
        aux={} if router.aux_losses is None else dict(router.aux_losses.totals),
    )
    if shared is not None:
        found["shared1"] = shared.linear_fc1.weight.grad.unflatten(0, (2, -1))
        found["shared2"] = shared.linear_fc2.weight.grad
        found["shared_gate"] = None if shared.gate_weight is None else shared.gate_weight.grad
    return found, pg


def replaying(router: Any, batch: int, tp: Any, padding: torch.Tensor | None) -> torch.Tensor:
    """Let a router replay the reference's routes; return this rank's tags [B, S / TP]."""
    options = router.options
    table = [reference.recorded(t, options.topk, options.num_experts) for t in range(SEQUENCE * batch)]

    class Recorded:
        balances_live = False

        def expert_ids(self, layer: int, rows: torch.Tensor, num_tokens: int, live: Any) -> torch.Tensor:
            return torch.tensor(table)[rows]

        def see(self, layer: int, rows: torch.Tensor, expert_ids: torch.Tensor, is_padding: Any) -> None:
            assert (expert_ids == torch.tensor(table)[rows]).all(1)[~is_padding].all()

    router.take_routes(Recorded())
    rows = torch.arange(SEQUENCE * batch).view(SEQUENCE, batch).chunk(tp.size())[tp.rank()].t()
    return tagged(rows, torch.zeros_like(rows) if padding is None else -padding.long())


def expected(case: dict[str, Any], world: int, dp_size: int) -> dict[str, Any]:
    """The reference over the tokens of all ranks; auxiliary losses per data-parallel rank's micro-batch, summed."""
    weights = full_weights(case, torch.float64)
    for tensor in vars(weights).values():
        if tensor is not None and tensor is not weights.bias:
            tensor.requires_grad_()
    weights.bias = None if weights.bias is None else weights.bias.to(torch.float32)
    hidden, padding = tokens_and_padding(case, SEQUENCE, BATCH * world)
    hidden = hidden.double().requires_grad_()
    routing = case["routing"]
    outputs, counts, total, aux = [], torch.zeros(case["num_experts"]), 0.0, {}
    dropped = torch.zeros_like(counts)
    for rank, columns in enumerate(hidden.chunk(dp_size, dim=1)):
        batch = columns.shape[1]
        pads = None if padding is None else padding.chunk(dp_size, 0)[rank].T.flatten().tolist()
        result = reference.moe_layer(columns.flatten(0, 1), weights, routing, pads)
        outputs.append(result.output.view(columns.shape))
        counts += torch.tensor(result.counts)
        for _, expert in result.dropped:
            dropped[expert] += 1
        total = total + (result.output * torch.linspace(0.5, 1.5, hidden.shape[-1])).sum()
        valid = sum(bool(c) for c in result.chosen)
        scale = valid if case["per_token"] else 1
        losses = {}
        if case["aux"] == "aux_loss":
            losses["aux_loss"] = reference.balance_loss(result, routing.topk, routing.score_function)
        elif case["aux"]:
            sets = [list(range(b, len(result.chosen), batch)) for b in range(batch)]
            sizes = [sum(bool(result.chosen[t]) for t in s) for s in sets]
            parts = [reference.balance_loss(result, routing.topk, routing.score_function, s) for s in sets]
            losses["seq_aux_loss"] = sum(n * p for n, p in zip(sizes, parts)) / valid
        if case["z"]:
            losses["z_loss"] = reference.z_loss(result)
        for name, loss in losses.items():
            total = total + scale * loss * (case["z"] if name == "z_loss" else 0.1)
            aux[name] = aux.get(name, 0.0) + valid * loss.item()
    total.backward()
    output = torch.cat(outputs, 1).detach()
    return dict(output=output, grad_input=hidden.grad, weights=weights, counts=counts, dropped=dropped, aux=aux)


def assembled(ranks: list[dict[str, Any]], key: str) -> torch.Tensor:
    """Full activations [S, B, H] from the ranks' parts."""
    columns: dict[int, list[torch.Tensor]] = {}
    for r in sorted(ranks, key=lambda r: r["where"][:2]):
        columns.setdefault(r["where"][0], []).append(r[key])
    return torch.cat([torch.cat(parts, dim=0) for parts in columns.values()], dim=1)


def expert_gradient(ranks: list[dict[str, Any]], key: str, like: torch.Tensor) -> torch.Tensor:
    """Full expert gradients: ranks that hold the same part add up (that is what expert data parallelism reduces)."""
    full = torch.zeros(like.shape, dtype=torch.float64)
    for r in ranks:
        _, _, first, etp_rank, local = r["where"]
        width = r[key].shape[2]
        full[first : first + local, :, etp_rank * width : (etp_rank + 1) * width] += r[key]
    return full


@pytest.mark.parametrize(("world", "number"), rows(PLACES, test=TEST))
def test_the_layer_agrees_with_the_reference(gloo: Any, world: int, number: int) -> None:
    layout, cases = LAYOUTS[world][number], cases_of(world, number)
    results = gloo.run(world, run_layers, cases=cases, layout=layout)
    for case, ranks in zip(cases, zip(*results, strict=True), strict=True):
        agrees_with_the_reference(case, list(ranks), world, f"{layout} {case}")


def agrees_with_the_reference(case: dict[str, Any], ranks: list[dict[str, Any]], world: int, label: str) -> None:
    """Compare everything that comes out of the layer."""
    wanted = expected(case, world, dp_size=1 + max(r["where"][0] for r in ranks))
    weights = wanted["weights"]
    assert torch.equal(sum(r["counts"] for r in ranks), wanted["counts"].float()), label
    if case["routing"].capacity_factor is not None:
        assert torch.equal(sum(r["dropped"] for r in ranks), wanted["dropped"].float()), label
    pairs = [(assembled(ranks, key), wanted[key]) for key in ("output", "grad_input")]
    pairs.append((sum(r["router"] for r in ranks), weights.router.grad))
    for key in ("weight1", "weight2"):
        full = getattr(weights, key)
        pairs.append((expert_gradient(ranks, key, full), full.grad))
    if case["shared"]:
        tp_size = 1 + max(r["where"][1] for r in ranks)
        for key in ("shared1", "shared2"):
            parts = [sum(r[key] for r in ranks if r["where"][1] == t) for t in range(tp_size)]
            pairs.append((torch.cat(parts, 1), getattr(weights, key).grad))
        if case["shared_gate"]:
            pairs.append((sum(r["shared_gate"] for r in ranks), weights.shared_gate.grad))
    errors = [relative(*pair) for pair in pairs]
    assert all(error < 1e-5 for error in errors), f"{errors} {label}"
    for name, total in wanted["aux"].items():
        assert abs(sum(r["aux"][name].item() for r in ranks) - total) < 1e-5 * abs(total), label
