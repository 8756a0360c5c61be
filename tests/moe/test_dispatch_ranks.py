"""The results of a token's experts are added up in fp32 and rounded once, on whatever ranks the experts are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_moe.moe.dispatch import build_dispatcher
from megatron_moe.moe.options import MoEGroups
from megatron_moe.moe.routing import RoutingDecision

RESULTS = (256.0, 1.0, -256.0, 1.0)  # of expert 0 to 3; bf16 has no number between 256 and 258


def added_up(kind: str) -> float:
    """What comes home to a token that chose all four experts."""
    world, rank = dist.group.WORLD, dist.get_rank()
    groups = MoEGroups(world, world, world, world, world, world.size(), rank, 1, 0)
    dispatcher = build_dispatcher(kind, len(RESULTS), groups)
    hidden = torch.zeros(1, 8, dtype=torch.bfloat16)
    given, plan = dispatcher.dispatch(hidden, RoutingDecision(torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4), None))
    here = torch.tensor(RESULTS).chunk(world.size())[rank]
    counts = given.offsets.diff(prepend=torch.zeros(1, dtype=given.offsets.dtype))
    rows = here.repeat_interleave(counts).to(hidden.dtype).unsqueeze(1).expand(-1, hidden.shape[1])
    return float(dispatcher.combine(rows.contiguous(), plan)[0, 0])


@pytest.mark.parametrize(("kind", "ranks"), [("allgather", 2), ("alltoall", 2), ("alltoall", 1)])
def test_results_of_bf16_experts_are_added_up_in_fp32(gloo, kind, ranks):
    assert gloo.run(ranks, added_up, kind=kind) == [2.0] * ranks
