"""The kernels of AdamW on packed state: C's bits are those of torch's form; Triton's, in its interpreter, are near."""

from __future__ import annotations

import pytest
import torch

from megatron_moe.kernels import compiled
from megatron_moe.kernels.launching import launches_seen_by
from megatron_moe.precision.packed_state import AdamStep
from megatron_moe.training.precision_aware_adam import adam_update
from tests.helpers import packed_cases
from tests.helpers.compiled_kernels import all_kernels

STEP = AdamStep(3e-3, (0.9, 0.95), 1e-8, 0.1, 7)
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["fp32 main weights", "packed main weights"])
FORMATS = pytest.mark.parametrize(
    "formats", [(first, second) for first in packed_cases.FORMATS for second in packed_cases.FORMATS], ids="-".join
)


@pytest.mark.skipif(compiled.why_not() is not None, reason="the kernels in C cannot be had here")
@pytest.mark.parametrize("threads", [1, 2])
@PACKED
@FORMATS
def test_the_kernel_in_c_has_the_bits_of_torchs_form(formats: tuple[str, str], packed: bool, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for numel, width in ((1, 7), (127, 7), (1003, 100), (70_001, 7), (70_001, 4096)):
            grad, *numbers = packed_cases.values(numel)
            drawn = packed_cases.chances(numel, width)
            ours = packed_cases.state(*numbers, formats, packed)
            theirs = packed_cases.state(*numbers, formats, packed)
            assert compiled.adam_update([grad], [ours], STEP, [drawn]) is None
            adam_update.eager([grad], [theirs], STEP, [drawn])  # type: ignore[attr-defined]
            for found, wanted in zip(packed_cases.tensors(ours), packed_cases.tensors(theirs), strict=True):
                assert torch.equal(found, wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(compiled.why_not() is not None, reason="the kernels in C cannot be had here")
@pytest.mark.parametrize("formats", [("int8", "int8"), ("fp8", "fp8"), ("fp8", "int8")], ids="-".join)
def test_the_kernel_in_c_has_torchs_exponent_for_every_size(formats: tuple[str, str]) -> None:
    # The largest of a group is at, below or above a power of two or what codes end at, up to where squares overflow.
    step = AdamStep(0.0, (0.5, 0.5), 1e-8, 0.0, 3)
    exponents = torch.arange(-149, 60).double()
    generator = torch.Generator().manual_seed(4)
    for limit in (1.0, 127.0, 448.0, 65025.0**0.5):
        largest = (torch.ldexp(torch.tensor(limit / 256, dtype=torch.double), exponents)).float()
        largest = torch.stack([largest, largest.nextafter(largest * 2), largest.nextafter(largest * 0)]).flatten()
        first = largest[:, None] * torch.rand(len(largest), packed_cases.GROUP, generator=generator)
        first[:, 17] = largest
        first = first.flatten()
        drawn = packed_cases.chances(first.numel(), 4096)
        ours, theirs = (packed_cases.state(first, first, first * first, formats, packed=True) for _ in range(2))
        compiled.adam_update([first], [ours], step, [drawn])
        adam_update.eager([first], [theirs], step, [drawn])  # type: ignore[attr-defined]
        for found, wanted in zip(packed_cases.tensors(ours), packed_cases.tensors(theirs), strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.skipif(compiled.why_not() is not None, reason="the kernels in C cannot be had here")
def test_the_kernel_in_c_divides_as_torch() -> None:
    # It multiplies in the place of a division: roots of every size, 0 and infinity among them, many corrections.
    sizes = torch.ldexp(torch.ones(()), torch.arange(-149, 128, dtype=torch.float64)).float()
    second = torch.cat([sizes[:, None] * torch.linspace(1.0, 1.99, 123), torch.zeros(277, 1)], 1).flatten()
    second[5], zeros = float("inf"), torch.zeros_like(second)
    # Of 3 10^9 quotients four are so near the middle of two numbers that they have to be corrected: two of them.
    second[6:9] = torch.tensor([2.74648452, 2.22487783, 2.22487783]) / 0.95
    second[8] = second[7].nextafter(torch.tensor(0.0))
    for beta2, number in [(0.95, n) for n in (1, 2, 3, 10, 25, 33, 1000)] + [(0.5, 1), (0.999, 77), (1 - 2**-24, 1)]:
        step = AdamStep(1.0, (0.9, beta2), 0.0, 0.0, number)
        ours, theirs = (
            packed_cases.state(zeros, torch.ones_like(zeros), second, ("fp32", "fp32"), packed=False) for _ in range(2)
        )
        compiled.adam_update([zeros], [ours], step, None)
        adam_update.eager([zeros], [theirs], step, None)  # type: ignore[attr-defined]
        assert ours.main is not None and theirs.main is not None
        assert torch.equal(ours.main, theirs.main)
        assert ours.main[5] == 0.0 and bool((ours.main != 0.0).any())


@pytest.mark.skipif(compiled.why_not() is not None, reason="the kernels in C cannot be had here")
def test_the_kernel_in_c_codes_squares_as_torch_next_to_whole_roots() -> None:
    # A root just below a whole number may be rounded up to it.
    whole = torch.arange(1, 256).repeat_interleave(127).double() * 2.0**0.5
    near = torch.arange(127).repeat(255) - 63.0
    grad = (whole.float().view(torch.int32) + near.int()).view(torch.float32).view(255, 127)
    grad = torch.cat([grad, torch.full((255, 1), 255.0 * 2.0**0.5)], 1).flatten()
    squares = 0.5 * grad * grad
    roots = squares.sqrt()
    assert int(((roots == roots.trunc()) & (roots.double() ** 2 > squares.double())).sum()) > 30
    step = AdamStep(0.0, (0.5, 0.5), 1e-8, 0.0, 3)
    for seed in range(5):
        drawn = packed_cases.chances(grad.numel(), 4096)._replace(seeds=(seed, 1))
        zeros = torch.zeros_like(grad)
        ours, theirs = (packed_cases.state(zeros, zeros, zeros, ("int8", "int8"), packed=True) for _ in range(2))
        compiled.adam_update([grad], [ours], step, [drawn])
        adam_update.eager([grad], [theirs], step, [drawn])  # type: ignore[attr-defined]
        for found, wanted in zip(packed_cases.tensors(ours), packed_cases.tensors(theirs), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.skipif(compiled.why_not() is not None, reason="the kernels in C cannot be had here")
def test_the_kernel_in_c_has_torchs_exponent_where_the_last_numbers_are_rounded_otherwise() -> None:
    # torch adds another product unrounded in the last n % 8 numbers: here that decides whether 65025 is passed.
    codes = torch.arange(1.0, 255.0).repeat_interleave(401)
    near = torch.arange(401).repeat(254) - 200
    first = ((65025.0 - 0.95 * codes * codes) / 0.05).sqrt()
    grad = (first.view(torch.int32) + near.int()).view(torch.float32)
    share, decay = (torch.tensor(one).double() for one in (1 - 0.95, 0.95))
    slope, old = grad.double(), codes.double() ** 2
    product, kept = (share * slope).float().double(), (old * decay).float().double()
    at_first, at_last = product * slope + kept, old * decay + (product * slope).float()
    passes = (at_first.float() > 65025.0) != (at_last.float() > 65025.0)
    assert int(passes.sum()) > 30
    step = AdamStep(0.0, (0.9, 0.95), 1e-8, 0.0, 3)
    for number in passes.nonzero().flatten().tolist():
        numbers = torch.tensor([0.0, 255.0, float(codes[number])])
        own = torch.tensor([0.0, 0.0, float(grad[number])])
        ours, theirs = (
            packed_cases.state(numbers, numbers, numbers * numbers, ("int8", "int8"), packed=True) for _ in range(2)
        )
        drawn = packed_cases.chances(3)
        compiled.adam_update([own], [ours], step, [drawn])
        adam_update.eager([own], [theirs], step, [drawn])  # type: ignore[attr-defined]
        for found, wanted in zip(packed_cases.tensors(ours), packed_cases.tensors(theirs), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.skipif(compiled.why_not() is not None, reason="the kernels in C cannot be had here")
@FORMATS
def test_the_kernel_in_c_keeps_what_is_not_finite(formats: tuple[str, str]) -> None:
    grad, *numbers = packed_cases.values(1000)
    grad[300], grad[700] = float("inf"), float("nan")
    drawn = packed_cases.chances(1000)
    ours, theirs = (packed_cases.state(*numbers, formats, packed=False) for _ in range(2))
    compiled.adam_update([grad], [ours], STEP, [drawn])
    adam_update.eager([grad], [theirs], STEP, [drawn])  # type: ignore[attr-defined]
    for found, wanted in zip(packed_cases.unpacked(ours), packed_cases.unpacked(theirs), strict=True):
        assert torch.equal(found.isfinite(), wanted.isfinite())
        assert not found[300].isfinite() or not found[700].isfinite()


@pytest.mark.triton
@PACKED
@FORMATS
def test_the_triton_kernel_packs_to_the_bit_what_needs_no_rounding_to_compute(
    formats: tuple[str, str], packed: bool
) -> None:
    # The gradient is the first moment, and its square the second: with decays of a half both stay what they are.
    numel = 2500
    _, main, first, _ = packed_cases.values(numel, seed=2)
    first = torch.ldexp(torch.sign(first), torch.log2(first.abs()).round().clamp(-20, 6))
    drawn = packed_cases.chances(numel, 130)
    step = AdamStep(0.0, (0.5, 0.5), 1e-8, 0.0, 3)
    ours, theirs = (packed_cases.state(main, first, first * first, formats, packed) for _ in range(2))
    for state, update in ((ours, all_kernels().adam_update), (theirs, adam_update.eager)):  # type: ignore[attr-defined]
        update([first], [state], step, [drawn])
    for found, wanted in zip(packed_cases.tensors(ours), packed_cases.tensors(theirs), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.triton
@PACKED
@FORMATS
def test_the_triton_kernel_updates_as_torchs_form(formats: tuple[str, str], packed: bool) -> None:
    numel = 2500
    grad, *numbers = packed_cases.values(numel, seed=3)
    drawn = packed_cases.chances(numel, 4096)
    ours, theirs = (packed_cases.state(*numbers, formats, packed) for _ in range(2))
    all_kernels().adam_update([grad], [ours], STEP, [drawn])
    adam_update.eager([grad], [theirs], STEP, [drawn])  # type: ignore[attr-defined]
    mains, *moments = zip(packed_cases.unpacked(ours), packed_cases.unpacked(theirs), strict=True)
    torch.testing.assert_close(*mains, rtol=2e-6, atol=1e-8)
    for number, (found, wanted) in enumerate(moments):
        # The last bit of a product decides now and then which neighbour is taken.
        differ = ~torch.isclose(found, wanted, rtol=2e-6, atol=1e-9)
        assert float(differ.double().mean()) < (0.002 if formats[number] != "fp32" else 1e-9)


@pytest.mark.triton
def test_the_triton_kernel_updates_many_weights_at_once() -> None:
    # Weights that vectors of 16 fit are apart from those they do not: by their size, or where they begin.
    sizes, shifts = (2560, 32, 2500, 17, 4096, 48), (0, 0, 0, 0, 1, 0)
    grads, drawn = [], []
    alone, together = [], []
    for number, (numel, shift) in enumerate(zip(sizes, shifts)):
        grad, *numbers = packed_cases.values(numel, number)
        grads.append(torch.cat([grad[:shift], grad])[shift:])
        drawn.append(packed_cases.chances(numel, 100 + number, start=number))
        for states in (alone, together):
            states.append(packed_cases.state(*numbers, ("bf16", "int8"), packed=number % 2 == 0))
    launched = []
    with launches_seen_by(lambda kernel, arguments, constants: launched.append((arguments[1], constants))):
        all_kernels().adam_update(grads, together, STEP, drawn)
    forms = [(weights.bincount().tolist(), one["PACKED"], one["ALIGNED"]) for weights, one in launched]
    assert forms == [([3], True, True), ([1, 1], False, True), ([3, 4], True, False), ([1], False, False)]
    for grad, state, own in zip(grads, alone, drawn):
        adam_update.eager([grad], [state], STEP, [own])  # type: ignore[attr-defined]
    for state, other in zip(alone, together):
        mains, *moments = zip(packed_cases.unpacked(other), packed_cases.unpacked(state), strict=True)
        torch.testing.assert_close(*mains, rtol=2e-6, atol=1e-8)
        for found, wanted in moments:
            differ = ~torch.isclose(found, wanted, rtol=2e-6, atol=1e-9)
            assert int(differ.sum()) <= 0.002 * differ.numel() + 1
