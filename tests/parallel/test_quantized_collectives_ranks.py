"""ZeRO++'s collectives on real ranks: equal bits everywhere, errors within their bound, and the bytes that are sent."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe.parallel import groups
from megatron_moe.parallel.quantized_collectives import (
    BLOCK,
    QuantizedAllGather,
    QuantizedReduceScatter,
    Segments,
    dequantize,
    packed_bytes,
    quantize,
)
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


# ---- numbers as integers in blocks: their errors against fp64, their bytes, and what is not finite


SHAPES = [(1, 1), (3, 255), (2, 256), (1, 257), (2, 1000)]
WIDTHS = [8, 4]


def numbers(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different sizes from block to block."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.logspace(-6, 2, -(-shape[1] // BLOCK)).repeat_interleave(BLOCK)[: shape[1]]
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_number_is_the_nearest_of_its_blocks(shape, bits, dtype):
    values = numbers(shape, dtype)
    packed = quantize(values, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (shape[0], packed_bytes(shape[1], bits))
    found = dequantize(packed, shape[1], bits)
    assert found.dtype == torch.float32 and found.shape == shape
    for row, got in zip(values, found):
        limit = bound(row, bits)
        error = (got.double() - row.double()).abs()
        assert bool((error <= limit * (1 + 1e-5) + 1e-44).all())
        if shape[1] >= BLOCK:
            assert float((error / limit).max()) > 0.95, "the bound is the error's, not a far larger number"
        # fp32 may round a number in the middle between two steps to the other one
        assert float(((got.double() - rounded(row, bits)).abs() > limit * 1e-3).double().mean()) < 0.05


@pytest.mark.parametrize(("bits", "of_fp32", "of_bf16"), [(8, 0.27, 0.54), (4, 0.15, 0.30)])
def test_bytes_scales_included(bits, of_fp32, of_bf16):
    assert packed_bytes(2**16, bits) < of_fp32 * 4 * 2**16 and packed_bytes(2**16, bits) < of_bf16 * 2 * 2**16


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_block_and_no_other(bits, value):
    values = numbers((2, 3 * BLOCK), torch.float32)
    values[1, BLOCK + 5] = value
    found = dequantize(quantize(values, bits), 3 * BLOCK, bits)
    assert not bool(found[1, BLOCK : 2 * BLOCK].isfinite().any())
    assert bool(found[0].isfinite().all()) and bool(found[1, :BLOCK].isfinite().all())
    assert bool(found[1, 2 * BLOCK :].isfinite().all())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 3e38])
def test_a_block_of_one_number_is_that_number_or_zero(bits, value):
    found = dequantize(quantize(torch.full((1, 300), value), bits), 300, bits)
    # Scales below fp32's smallest number are zero.
    wanted = 0.0 if value < 7 * 2.0**-149 else value
    assert bool(((found - wanted).abs() <= 1e-43 + 1e-6 * wanted).all())


def test_segments_that_are_not_quantised_keep_their_bits():
    rows = numbers((4, 1030), torch.bfloat16)
    segments = Segments((5, 1000, 18, 7), (False, True, False, True))
    found = segments.unpack(segments.pack(rows, 8), torch.bfloat16, 8)
    for begin, end in ((0, 5), (1005, 1023)):
        assert torch.equal(found[:, begin:end].view(torch.int16), rows[:, begin:end].view(torch.int16))
    assert not torch.equal(found[:, 5:1005], rows[:, 5:1005])
    assert torch.allclose(found[:, 1023:].float(), rows[:, 1023:].float(), rtol=0, atol=float(rows.abs().max()) / 100)
