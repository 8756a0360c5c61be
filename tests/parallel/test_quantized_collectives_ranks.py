"""ZeRO++'s collectives on real ranks: equal bits everywhere, errors within their bound, and the bytes that are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe.parallel import groups
from megatron_moe.parallel.quantized_collectives import QuantizedAllGather, QuantizedReduceScatter, Segments
from tests.helpers.rows import rows
from tests.numbers.reference_quantization import bound, rounded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (8, 4)
LENGTHS, QUANTIZED = (40, 1024, 17, 500), (False, True, False, True)
INSIDE = torch.tensor(QUANTIZED).repeat_interleave(torch.tensor(LENGTHS))
"""The numbers that are quantised."""


def gathered() -> dict[str, dict[str, torch.Tensor]]:
    """What each rank sends and receives, by dtype."""
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), {}
    for dtype in DTYPES:
        own = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(rank)).to(dtype)
        gather = QuantizedAllGather(lambda: Segments(LENGTHS, QUANTIZED), ranks)
        output = gather.allocate((ranks * len(own),), dtype=own.dtype, device=own.device)
        gather(output_tensor=output, input_tensor=own, group=dist.group.WORLD)
        found[str(dtype)] = {"own": own, "output": output}
    return found


def reduced(machines: tuple[int, ...]) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """What each rank sends and receives, by the ranks of a machine and by bits."""
    ranks, found = dist.get_world_size(), {}
    mine = torch.randn(ranks, sum(LENGTHS), generator=torch.Generator().manual_seed(dist.get_rank()))
    world = dist.new_group(list(range(ranks)))
    for per_machine in machines:
        parts = groups.partition(world, per_machine) if per_machine < ranks else (None, None)
        for bits in BITS:
            scatter = QuantizedReduceScatter(lambda: Segments(LENGTHS, QUANTIZED), bits, *parts)
            output = torch.empty(sum(LENGTHS))
            scatter(output_tensor=output, input_tensor=mine.view(-1), group=world, op=dist.ReduceOp.SUM)
            found[per_machine, bits] = {"rows": mine, "output": output}
    groups._parts.clear()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_gathers_the_same_bits(once: Any, dtype: torch.dtype) -> None:
    found = [rank[str(dtype)] for rank in once(4, gathered)]
    exact = torch.stack([one["own"] for one in found])
    assert all(torch.equal(one["output"], found[0]["output"]) for one in found)
    got = found[0]["output"].view(4, -1)
    assert torch.equal(got[:, ~INSIDE], exact[:, ~INSIDE])
    eps = torch.finfo(exact.dtype).eps
    for row, wanted in zip(got[:, INSIDE], exact[:, INSIDE]):
        limit = bound(wanted, 8) + eps * wanted.double().abs() + 1e-9
        assert bool(((row.double() - wanted.double()).abs() <= limit * 1.001).all())


MACHINES = {2: (2,), 4: (4, 2, 1), 6: (2, 3)}
PLACES = [(ranks, per_machine) for ranks, machines in MACHINES.items() for per_machine in machines]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("ranks", "per_machine"), rows(PLACES, test=[place for place in PLACES if place[0] == 4]))
def test_a_sum_is_off_by_its_roundings(once: Any, ranks: int, per_machine: int, bits: int) -> None:
    found = [rank[per_machine, bits] for rank in once(ranks, reduced, machines=MACHINES[ranks])]
    sent = torch.stack([one["rows"] for one in found])  # [from, to, numel]
    machines = ranks // per_machine
    for rank, one in enumerate(found):
        exact, got = sent[:, rank].double().sum(dim=0), one["output"].double()
        assert torch.allclose(got[~INSIDE], exact[~INSIDE], rtol=1e-5, atol=1e-5)
        # The first rounding of what each rank sends; where there are machines, the second of each machine's sum.
        limit = sum(bound(row[INSIDE], bits) for row in sent[:, rank])
        if machines > 1:
            for of_machine in sent[:, rank].split(per_machine):
                limit = limit + bound(sum(rounded(row[INSIDE], bits) for row in of_machine), bits)
        error = (got - exact)[INSIDE].abs()
        assert bool((error <= 1.001 * limit + 1e-5).all())
        assert float(error.max()) > 0.02 * float(limit.max()), "the numbers were rounded"
