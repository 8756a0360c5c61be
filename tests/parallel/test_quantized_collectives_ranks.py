"""ZeRO++'s collectives on real ranks: equal bits everywhere, errors within their bound, and the bytes that are sent."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

LENGTHS, QUANTIZED = (40, 1024, 17, 500), (False, True, False, True)


def gathered(dtype: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from megatron_moe.parallel.quantization import Segments
    from megatron_moe.parallel.quantized_collectives import QuantizedAllGather

    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(rank)).to(getattr(torch, dtype))
    gather = QuantizedAllGather(lambda: Segments(LENGTHS, QUANTIZED), ranks)
    output = gather.allocate((ranks * len(own),), dtype=own.dtype, device=own.device)
    gather(output_tensor=output, input_tensor=own, group=dist.group.WORLD)
    return {"own": own, "output": output}


def reduced(bits: int, per_machine: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from megatron_moe.parallel import groups
    from megatron_moe.parallel.quantization import Segments
    from megatron_moe.parallel.quantized_collectives import QuantizedReduceScatter

    ranks = dist.get_world_size()
    rows = torch.randn(ranks, sum(LENGTHS), generator=torch.Generator().manual_seed(dist.get_rank()))
    world = dist.new_group(list(range(ranks)))
    parts = groups.partition(world, per_machine) if per_machine < ranks else (None, None)
    scatter = QuantizedReduceScatter(lambda: Segments(LENGTHS, QUANTIZED), bits, *parts)
    output = torch.empty(sum(LENGTHS))
    scatter(output_tensor=output, input_tensor=rows.view(-1), group=world, op=dist.ReduceOp.SUM)
    groups._parts.clear()
    return {"rows": rows, "output": output}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_rank_gathers_the_same_bits(gloo: Any, dtype: str) -> None:
    import torch

    from tests.numbers.reference_quantization import bound

    found = gloo.run(4, gathered, dtype=dtype)
    exact = torch.stack([one["own"] for one in found])
    assert all(torch.equal(one["output"], found[0]["output"]) for one in found)
    got = found[0]["output"].view(4, -1)
    start = 0
    for length, quantized in zip(LENGTHS, QUANTIZED):
        if not quantized:
            assert torch.equal(got[:, start : start + length], exact[:, start : start + length])
        start += length
    mine = torch.cat([got[:, 40:1064], got[:, 1081:]], dim=1)
    theirs = torch.cat([exact[:, 40:1064], exact[:, 1081:]], dim=1)
    eps = torch.finfo(exact.dtype).eps
    for row, wanted in zip(mine, theirs):
        limit = bound(wanted, 8) + eps * wanted.double().abs() + 1e-9
        assert bool(((row.double() - wanted.double()).abs() <= limit * 1.001).all())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("ranks", "per_machine"), [(2, 2), (4, 4), (4, 2), (4, 1), (6, 2), (6, 3)])
def test_a_sum_is_off_by_its_roundings(gloo: Any, ranks: int, per_machine: int, bits: int) -> None:
    import torch

    from tests.numbers.reference_quantization import bound, rounded

    found = gloo.run(ranks, reduced, bits=bits, per_machine=per_machine)
    rows = torch.stack([one["rows"] for one in found])  # [from, to, numel]
    machines = ranks // per_machine
    plain = [slice(0, 40), slice(1064, 1081)]
    inside = torch.ones(sum(LENGTHS), dtype=torch.bool)
    for part in plain:
        inside[part] = False
    for rank, one in enumerate(found):
        exact, got = rows[:, rank].double().sum(dim=0), one["output"].double()
        for part in plain:
            assert torch.allclose(got[part], exact[part], rtol=1e-5, atol=1e-5)
        # The first rounding of what each rank sends; where there are machines, the second of each machine's sum.
        limit = sum(bound(rows[source, rank][inside], bits) for source in range(ranks))
        if machines > 1 and per_machine > 0:
            for machine in range(machines):
                sent = [
                    rounded(rows[source, rank][inside], bits)
                    for source in range(machine * per_machine, (machine + 1) * per_machine)
                ]
                limit = limit + bound(torch.stack(sent).sum(dim=0), bits)
        error = (got[inside] - exact[inside]).abs()
        assert bool((error <= 1.001 * limit + 1e-5).all())
        assert float(error.max()) > 0.02 * float(limit.max()), "the numbers were rounded"
