"""Rows and weights travel in one all-to-all with the bits of two; results are added up in fp32, wherever they are."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_moe.moe import dispatch
from megatron_moe.moe import rows as moves
from megatron_moe.moe.dispatch_by_node import ByNodeDispatcher
from megatron_moe.moe.options import MoEGroups
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe.parallel.groups import pretend_machines
from tests.helpers.moe_cases import build_layer, random_case, tokens_and_padding
from tests.helpers.rows import rows

TOKENS, EXPERTS, TOPK = 11, 12, 3
# hidden size, dtype, router's dtype, ETP, whether choices are dropped, whether the last rank gets no row
CASES = {
    "bf16": (24, torch.bfloat16, torch.float32, 1, False, False),
    "fp16, ETP2": (7, torch.float16, torch.float32, 2, False, False),
    "bf16, fp64 router, drops": (5, torch.bfloat16, torch.float64, 1, True, True),
    "fp32, drops": (6, torch.float32, torch.float32, 1, True, False),
    "fp64": (3, torch.float64, torch.float32, 1, False, True),
}


class TwoExchanges(dispatch.AllToAllDispatcher):
    """The all-to-all with an exchange of the rows and another of the weights, each step a node of the graph."""

    def dispatch(self, hidden: torch.Tensor, decision: RoutingDecision) -> Any:
        _, plan = self.prepare(hidden, decision, lambda _, *tensors: tensors)
        sort, probs = plan.sent, decision.probs.flatten()
        rows = moves.copy_rows(hidden, sort.source, sort.slots, self.drops)
        of_choice = sort.slots.view(probs.shape[0], -1)
        weights = moves.copy_rows(probs, sort.order, of_choice, self.drops)
        sent, arrival = zip(*(self.send((one,), plan) for one in (rows, weights)))

        def sorted_alike(step: Any, *arrived: torch.Tensor) -> Any:
            return [moves.copy_rows(one, step.order, step.inverse.unsqueeze(1)) for one in arrived]

        return self.arrange(tuple(one for (one,) in sent), arrival[0], sorted_alike)


def exchanged(
    hidden_size: int, dtype: torch.dtype, router: torch.dtype, etp: int, drops: bool, nobody: bool, machine: int = 1
) -> Any:
    """Rows, weights and both gradients, as bytes: in one exchange, in two, and over nodes of so many ranks."""
    world, rank = dist.group.WORLD, dist.get_rank()
    ep = world.size() // etp
    groups = MoEGroups(world, world, world, world, world, ep, rank // etp, etp, rank % etp)
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS, hidden_size, generator=generator).to(dtype).requires_grad_()
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]
    if nobody:  # the last rank gets no row
        ids = torch.tensor([[0, 1, 2]]).repeat(TOKENS, 1)
    probs = torch.randn(TOKENS, TOPK, generator=generator, dtype=router)
    probs[:2, 0] = torch.tensor([float("nan"), 1e-44], dtype=router)  # no number is looked at on the way
    kept = torch.rand(TOKENS, TOPK, generator=generator) < 0.7 if drops else None
    decision = RoutingDecision(ids, probs.requires_grad_(), kept)
    found = []
    pretend_machines(machine)
    for way in (dispatch.AllToAllDispatcher, TwoExchanges, *(() if etp > 1 else (ByNodeDispatcher,))):
        given, _ = way(EXPERTS, groups, drops).dispatch(hidden, decision)
        slope = torch.Generator().manual_seed(10 + rank)
        slopes = [torch.randn(one.shape, generator=slope).to(one.dtype) for one in (given.rows, given.probs)]
        grads = torch.autograd.grad((given.rows, given.probs), (hidden, probs), slopes)
        assert given.host_offsets is not None and given.host_offsets().tolist() == given.offsets.tolist()
        found.append([one.detach().view(torch.uint8) for one in (given.rows, given.probs, *grads)])
    return found


def all_exchanged(machine: int) -> Any:
    return {name: exchanged(*case, machine) for name, case in CASES.items()}


@pytest.mark.parametrize(("ranks", "machine"), rows([(2, 1), (6, 2), (6, 3)], test=[(2, 1)]))
def test_rows_and_weights_have_the_bits_of_two_exchanges_and_of_one_that_knows_nodes(gloo: Any, ranks, machine) -> None:
    for rank in gloo.run(ranks, all_exchanged, machine=machine):
        for name, (one, *others) in rank.items():
            for other in others:
                assert len(one) == 4 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), name


def exchanges_of_layer() -> tuple[int, int]:
    """How many all-to-alls a layer's forward and backward pass call."""
    case = {**random_case(3), "dispatcher": "alltoall", "padding": False}
    layer, _ = build_layer(case, dict(expert_model_parallel_size=2))
    hidden, _ = tokens_and_padding(case, 4, 1)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as called:
        output, _ = layer(hidden.requires_grad_())
        forward = called.call_count
        output.sum().backward()
    # NCCL copies in packs of 16 bytes where all rows begin at a multiple of them.
    for call in called.call_args_list:
        received, sent = call.args[:2]
        assert all(one.data_ptr() % 16 == one[0].nbytes % 16 == 0 for one in (received, sent) if one.dim() == 2)
    return forward, called.call_count - forward


def test_a_layer_exchanges_counts_then_rows_with_weights_then_results(gloo: Any) -> None:
    assert gloo.run(2, exchanges_of_layer) == [(3, 2)] * 2


RESULTS = (256.0, 1.0, -256.0, 1.0)  # of expert 0 to 3; bf16 has no number between 256 and 258


def added_up(kind: str) -> float:
    """What comes home to a token that chose all four experts."""
    world, rank = dist.group.WORLD, dist.get_rank()
    groups = MoEGroups(world, world, world, world, world, world.size(), rank, 1, 0)
    dispatcher = dispatch.build_dispatcher(kind, len(RESULTS), groups)
    hidden = torch.zeros(1, 8, dtype=torch.bfloat16)
    given, plan = dispatcher.dispatch(hidden, RoutingDecision(torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4), None))
    here = torch.tensor(RESULTS).chunk(world.size())[rank]
    counts = given.offsets.diff(prepend=torch.zeros(1, dtype=given.offsets.dtype))
    rows = here.repeat_interleave(counts).to(hidden.dtype).unsqueeze(1).expand(-1, hidden.shape[1])
    return float(dispatcher.combine(rows.contiguous(), plan)[0, 0])


@pytest.mark.parametrize(("kind", "ranks"), [("allgather", 2), ("alltoall", 2), ("alltoall", 1)])
def test_results_of_bf16_experts_are_added_up_in_fp32(gloo, kind, ranks):
    assert gloo.run(ranks, added_up, kind=kind) == [2.0] * ranks
