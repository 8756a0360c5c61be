"""The kernels of AdamW on packed state: C's bits are those of torch's form; Triton's, in its interpreter, are near."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels import choice
from megatron_moe.kernels.choice import launches_seen_by
from megatron_moe.optim.adam import adam_update
from megatron_moe.precision.packed_state import GROUP, AdamState, AdamStep
from tests.helpers.rows import rows
from tests.kernels.compiled_kernels import all_kernels
from tests.precision import packed_cases

STEP = AdamStep(3e-3, (0.9, 0.95), 1e-8, 0.1, 7)
PAIRS = [(first, second) for first in packed_cases.FORMATS for second in packed_cases.FORMATS]
# Each pair of formats once, half of them with packed main weights and on two threads.
FORMS = [(pair, (n + n // 4) % 2 == 0, 1 + (n // 2) % 2) for n, pair in enumerate(PAIRS)]
# In the interpreter: each format of either moment, and both kinds of main weights.
IN_TEST = [(("fp32", "bf16"), False), (("bf16", "fp32"), True), (("int8", "fp8"), True), (("fp8", "int8"), False)]
in_c = pytest.mark.skipif(choice.why_no_c() is not None, reason="the kernels in C cannot be had here")
TRITON = pytest.mark.parametrize(
    ("formats", "packed"), rows(list(itertools.product(PAIRS, (False, True))), test=IN_TEST)
)


def both_forms(
    kernel: Any, numbers: Sequence[Tensor], formats: tuple[str, str], packed: bool, step: AdamStep, drawn: Any
) -> tuple[AdamState, AdamState]:
    """The state after a step from (gradient, main weight, first and second moment), by a kernel and by torch."""
    grad, *before = numbers
    ours, theirs = (packed_cases.state(*before, formats, packed) for _ in range(2))
    drawn_of_all = None if drawn is None else [drawn]
    assert kernel([grad], [ours], step, drawn_of_all) is None
    adam_update.eager([grad], [theirs], step, drawn_of_all)  # type: ignore[attr-defined]
    return ours, theirs


by_c_and_torch = functools.partial(both_forms, choice.adam_update)


def assert_same_bits(ours: AdamState, theirs: AdamState) -> None:
    for found, wanted in zip(packed_cases.tensors(ours), packed_cases.tensors(theirs), strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@in_c
@pytest.mark.parametrize(("formats", "packed", "number"), FORMS)
def test_the_kernel_in_c_has_the_bits_of_torchs_form(threads: Any, formats: Any, packed: bool, number: int) -> None:
    threads(number)
    for numel, width in ((1, 7), (127, 7), (1003, 100), (70_001, 4096)):
        drawn = packed_cases.rounding(numel, width)
        assert_same_bits(*by_c_and_torch(packed_cases.values(numel), formats, packed, STEP, drawn))


@in_c
@pytest.mark.parametrize("formats", [("int8", "int8"), ("fp8", "fp8"), ("fp8", "int8")], ids="-".join)
def test_the_kernel_in_c_has_torchs_exponent_for_every_size(formats: tuple[str, str]) -> None:
    # The largest of a group is at, below or above a power of two or what codes end at, up to where squares overflow.
    step = AdamStep(0.0, (0.5, 0.5), 1e-8, 0.0, 3)
    exponents = torch.arange(-149, 60).double()
    generator = torch.Generator().manual_seed(4)
    for limit in (1.0, 127.0, 448.0, 65025.0**0.5):
        largest = (torch.ldexp(torch.tensor(limit / 256, dtype=torch.double), exponents)).float()
        largest = torch.stack([largest, largest.nextafter(largest * 2), largest.nextafter(largest * 0)]).flatten()
        first = largest[:, None] * torch.rand(len(largest), GROUP, generator=generator)
        first[:, 17] = largest
        first = first.flatten()
        drawn = packed_cases.rounding(first.numel(), 4096)
        assert_same_bits(*by_c_and_torch((first, first, first, first * first), formats, True, step, drawn))


@in_c
def test_the_kernel_in_c_divides_as_torch() -> None:
    # It multiplies in the place of a division: roots of every size, 0 and infinity among them, many corrections.
    sizes = torch.ldexp(torch.ones(()), torch.arange(-149, 128, dtype=torch.float64)).float()
    second = torch.cat([sizes[:, None] * torch.linspace(1.0, 1.99, 123), torch.zeros(277, 1)], 1).flatten()
    second[5], zeros = float("inf"), torch.zeros_like(second)
    # Of 3 10^9 quotients four are so near the middle of two numbers that they have to be corrected: two of them.
    second[6:9] = torch.tensor([2.74648452, 2.22487783, 2.22487783]) / 0.95
    second[8] = second[7].nextafter(torch.tensor(0.0))
    numbers = (zeros, zeros, torch.ones_like(zeros), second)
    for beta2, number in [(0.95, n) for n in (1, 2, 3, 10, 25, 33, 1000)] + [(0.5, 1), (0.999, 77), (1 - 2**-24, 1)]:
        step = AdamStep(1.0, (0.9, beta2), 0.0, 0.0, number)
        ours, theirs = by_c_and_torch(numbers, ("fp32", "fp32"), False, step, None)
        assert ours.main is not None and theirs.main is not None
        assert torch.equal(ours.main, theirs.main)
        assert ours.main[5] == 0.0 and bool((ours.main != 0.0).any())


@in_c
def test_the_kernel_in_c_codes_squares_as_torch_next_to_whole_roots() -> None:
    # A root just below a whole number may be rounded up to it.
    whole = torch.arange(1, 256).repeat_interleave(127).double() * 2.0**0.5
    near = torch.arange(127).repeat(255) - 63.0
    grad = (whole.float().view(torch.int32) + near.int()).view(torch.float32).view(255, 127)
    grad = torch.cat([grad, torch.full((255, 1), 255.0 * 2.0**0.5)], 1).flatten()
    squares = 0.5 * grad * grad
    roots = squares.sqrt()
    assert int(((roots == roots.trunc()) & (roots.double() ** 2 > squares.double())).sum()) > 30
    step, zeros = AdamStep(0.0, (0.5, 0.5), 1e-8, 0.0, 3), torch.zeros_like(grad)
    for seed in range(5):
        drawn = packed_cases.rounding(grad.numel(), 4096)._replace(seeds=(seed, 1))
        assert_same_bits(*by_c_and_torch((grad, zeros, zeros, zeros), ("int8", "int8"), True, step, drawn))


@in_c
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
        moment = torch.tensor([0.0, 255.0, float(codes[number])])
        numbers = (torch.tensor([0.0, 0.0, float(grad[number])]), moment, moment, moment * moment)
        assert_same_bits(*by_c_and_torch(numbers, ("int8", "int8"), True, step, packed_cases.rounding(3)))


@in_c
def test_the_kernel_in_c_keeps_what_is_not_finite() -> None:
    numbers = packed_cases.values(1000)
    numbers[0][300], numbers[0][700] = float("inf"), float("nan")
    for formats in PAIRS:
        states = by_c_and_torch(numbers, formats, False, STEP, packed_cases.rounding(1000))
        for found, wanted in zip(*(packed_cases.unpacked(state) for state in states), strict=True):
            assert torch.equal(found.isfinite(), wanted.isfinite())
            assert not found[300].isfinite() or not found[700].isfinite()


@TRITON
def test_the_triton_kernel_packs_to_the_bit_what_needs_no_rounding_to_compute(formats: Any, packed: bool) -> None:
    # The gradient is the first moment, and its square the second: with decays of a half both stay what they are.
    numel = 1300
    _, main, first, _ = packed_cases.values(numel, seed=2)
    first = torch.ldexp(torch.sign(first), torch.log2(first.abs()).round().clamp(-20, 6))
    drawn = packed_cases.rounding(numel, 130)
    step = AdamStep(0.0, (0.5, 0.5), 1e-8, 0.0, 3)
    numbers = (first, main, first, first * first)
    assert_same_bits(*both_forms(all_kernels().adam_update, numbers, formats, packed, step, drawn))


def assert_near(found: AdamState, wanted: AdamState, formats: tuple[str, str]) -> None:
    mains, *moments = zip(packed_cases.unpacked(found), packed_cases.unpacked(wanted), strict=True)
    torch.testing.assert_close(*mains, rtol=2e-6, atol=1e-8)
    for name, (one, other) in zip(formats, moments, strict=True):
        # The last bit of a product decides now and then which neighbour is taken.
        differ = int((~torch.isclose(one, other, rtol=2e-6, atol=1e-9)).sum())
        assert differ == 0 if name == "fp32" else differ <= 0.002 * one.numel() + 1


@TRITON
def test_the_triton_kernel_updates_as_torchs_form(formats: Any, packed: bool) -> None:
    numbers, drawn = packed_cases.values(1300, seed=3), packed_cases.rounding(1300, 4096)
    assert_near(*both_forms(all_kernels().adam_update, numbers, formats, packed, STEP, drawn), formats)


def test_the_triton_kernel_updates_many_weights_at_once() -> None:
    # Weights that vectors of 16 fit are apart from those they do not: by their size, or where they begin.
    sizes, shifts = (2560, 32, 2500, 17, 4096, 48), (0, 0, 0, 0, 1, 0)
    grads, drawn, alone, together = [], [], [], []
    for number, (numel, shift) in enumerate(zip(sizes, shifts)):
        grad, *numbers = packed_cases.values(numel, number)
        grads.append(torch.cat([grad[:shift], grad])[shift:])
        drawn.append(packed_cases.rounding(numel, 100 + number, start=number))
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
        assert_near(other, state, ("bf16", "int8"))
