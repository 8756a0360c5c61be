"""State in fewer bytes than fp32: exact where it has to be, unbiased where it is rounded, finite only where it is."""

import math
from typing import Any

import pytest
import torch

from megatron_moe.optim.adam import adam_update
from megatron_moe.precision import packed_state
from megatron_moe.precision.packed_state import GROUP, StochasticRounding, random_bits, seeds_of
from tests.helpers import stepped_trainer as steps
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, PP2, STORED, TP2, ZERO_2, ZERO_3, trained, whole
from tests.optim import layout_cases
from tests.optim.layout_cases import FEW, OFFLOAD, PACKED
from tests.precision import packed_cases

NARROW = ("bf16", "int8", "fp8")


def packed(main: torch.Tensor) -> packed_state.AdamState:
    """A main weight in 16 and some bits, with moments of zero."""
    return packed_cases.state(main, *torch.zeros(2, main.numel()), ("fp32", "fp32"), packed=True)


def moment_after(*args: Any) -> torch.Tensor:
    """Values of a moment once they were packed; see `packed_cases.packed_moment`."""
    return packed_state.unpacked_moment(*packed_cases.packed_moment(*args))


def test_a_main_weight_comes_back_to_the_bit_in_all_65536_places_around_bf16_numbers() -> None:
    upper = torch.tensor([0x3F80, 0x3F81, 0x0000, 0x8000, 0x0001, 0x7F7E, 0xC2FF, 0x0080], dtype=torch.int32)
    bits = ((upper[:, None] << 16) + torch.arange(1 << 16, dtype=torch.int32)).flatten()
    main = bits.view(torch.float32)
    made = packed(main)
    assert torch.equal(packed_state.unpacked_main(made).view(torch.int32), bits)
    assert made.weight is not None and torch.equal(made.weight.view(torch.int16), main.bfloat16().view(torch.int16))
    assert made.carry_bits is not None and int(made.carry_bits.count_nonzero()) > 0  # 16 bits do not do without


def test_an_infinite_main_weight_stays_infinite() -> None:
    main = torch.tensor([float("inf"), -float("inf"), 3.4e38, 1.0])
    assert packed_state.unpacked_main(packed(main)).tolist() == main.tolist()


@pytest.mark.parametrize("second", [False, True], ids=["first moment", "second moment"])
@pytest.mark.parametrize("name", NARROW)
def test_the_mean_of_many_roundings_is_the_number(name: str, second: bool) -> None:
    numbers = torch.tensor([1.0, 0.7123, 0.3333, 0.0421, 0.0087, 0.6180])  # the first one sets a group's exponent
    draws = 5 * 10**5 // GROUP * GROUP
    for index in range(1, len(numbers)):
        values = torch.full((draws,), float(numbers[index]))
        values[::GROUP] = 1.0
        places = StochasticRounding(torch.tensor([index << 40]), draws, 0, seeds_of(7, index))
        found = moment_after(name, values, second, places)
        found = found.double().view(-1, GROUP)[:, 1:].flatten()
        assert found.unique().numel() == 2  # down and up, to the neighbours
        error = float(found.std()) / math.sqrt(found.numel())
        assert abs(float(found.mean()) - float(values[1])) <= 3 * error


def test_a_moment_that_changes_by_less_than_half_a_step_still_moves() -> None:
    values, steps = torch.full((GROUP * 64,), 1.0), 1000
    for step in range(steps):
        places = StochasticRounding(torch.tensor([5]), values.numel(), 0, seeds_of(3, step))
        values = moment_after("bf16", values * 0.9995, True, places)
    nearest = torch.ones(())
    for _ in range(steps):
        nearest = (nearest * 0.9995).bfloat16().float()
    assert float(nearest) == 1.0  # rounded to nearest, it would never decay
    assert float(values.mean()) == pytest.approx(0.9995**steps, rel=0.01)


@pytest.mark.parametrize("second", [False, True], ids=["first moment", "second moment"])
@pytest.mark.parametrize("name", NARROW)
def test_packing_what_was_unpacked_gives_the_same_bits(name: str, second: bool) -> None:
    *_, first, squares = packed_cases.values(5000, seed=4)
    first[1::GROUP] = -1e-7 * first[::GROUP].abs()  # rounded to zero, from below, where there are codes
    values = moment_after(name, squares if second else first, second)
    again = moment_after(name, values, second, packed_cases.rounding(5000, width=11))
    assert torch.equal(again.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_second_moment_is_zero_only_where_it_was(name: str) -> None:
    values = torch.logspace(-30, 0, 2 * GROUP)  # a group has numbers of fifteen powers of ten
    values[::3] = 0.0
    assert torch.equal(moment_after(name, values, True) == 0.0, values == 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NARROW)
def test_what_is_not_finite_does_not_become_finite(name: str, value: float) -> None:
    values = torch.ones(3 * GROUP)
    values[GROUP + 5] = value
    moment, exponents = packed_cases.packed_moment(name, values, False)
    found = packed_state.unpacked_moment(moment, exponents)
    assert not found[GROUP + 5].isfinite() and found[:GROUP].isfinite().all() and found[2 * GROUP :].isfinite().all()
    assert exponents is None or (exponents == packed_state.NOT_FINITE).tolist() == [False, True, False]


def test_a_state_takes_back_what_was_computed_on_another_device() -> None:
    here, there = (
        packed_cases.state(*packed_cases.values(300, seed)[1:], ("int8", "bf16"), packed=True) for seed in (1, 2)
    )
    here.copy_(there)
    for name in ("low_bits", "carry_bits", "moments", "exponents"):
        torch.testing.assert_close(getattr(here, name), getattr(there, name), rtol=0, atol=0)


def test_chances_are_uniform_and_of_the_place_and_step_alone() -> None:
    whole = random_bits(StochasticRounding(torch.arange(64) * 1000 + 17, 1000, 0, seeds_of(1, 2)), 64_000)
    part = random_bits(StochasticRounding(torch.arange(10, 20) * 1000 + 17, 1000, 250, seeds_of(1, 2)), 7_000)
    assert torch.equal(part, whole[10_250:17_250])
    later = random_bits(StochasticRounding(torch.arange(64) * 1000 + 17, 1000, 0, seeds_of(1, 3)), 64_000)
    assert float((later == whole).double().mean()) < 0.001
    assert max(max(seeds_of(1, step)) for step in range(8)) < 2**32
    for half in (whole & 0xFFFF, whole >> 16):
        counts = torch.bincount(half >> 12, minlength=16).double()
        assert float(((counts - 4000) ** 2 / 4000).sum()) < 45  # chi-square, 15 degrees of freedom: 1 in 10,000


@pytest.mark.parametrize("packs", [False, True], ids=["fp32 main weights", "packed main weights"])
def test_moments_in_fp32_have_the_bits_of_torchs_adamw(packs: bool) -> None:
    numel = 1003
    grad, *numbers = packed_cases.values(numel)
    made = packed_cases.state(*numbers, ("fp32", "fp32"), packs)
    wide = [one.clone() for one in numbers]
    for number in range(1, 201):
        step = packed_state.AdamStep(1e-2, (0.9, 0.95), 1e-8, 0.1, number)
        grad = grad.roll(1) * 1.001
        adam_update([grad], [made], step, None)
        packed_state.update_by_torch(wide[0], grad, wide[1:], step)
    for found, wanted in zip(packed_cases.unpacked(made), wide, strict=True):
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


# ---- packed optimizer state over layouts, precisions and checkpoints: one rank is the oracle


BF16 = {"bf16": True, **FEW}
BF16_MOMENTS = {**FEW, **layout_cases.BF16_MOMENTS}
CODES = {**BF16, **layout_cases.CODES}
EVERY = {**layout_cases.EVERY, "offload": (1, OFFLOAD)}


@pytest.mark.parametrize("layout", rows(EVERY, test=["DP2, distributed optimizer", "DP2, ZeRO 3", "TP2", "PP2"]))
def test_a_layout_rounds_as_one_rank_does(gloo: Any, once: Any, layout: str) -> None:
    ranks, changes = EVERY[layout]
    one = once(1, trained, flags=BF16_MOMENTS)
    steps.require_rounded_alike(one, gloo.run(ranks, trained, flags={**BF16_MOMENTS, **changes}))


@pytest.mark.engine
@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, DISTRIBUTED)], ids=["plain", "distributed optimizer"])
def test_packed_main_weights_train_as_fp32_ones_to_the_bit(gloo: Any, ranks: int, changes: dict[str, Any]) -> None:
    flags = {**BF16, **changes}
    plain = gloo.run(ranks, trained, flags=flags, steps=4)
    packed = gloo.run(ranks, trained, flags={**flags, **PACKED}, steps=4)
    assert packed[0][0] == plain[0][0]
    assert any(".state.param." in key for key in whole(packed))
    steps.require_same_bits(plain, packed)


RESUMED = {
    "one rank, codes": (1, CODES, {}),
    "distributed optimizer, codes": (2, {**CODES, **DISTRIBUTED}, {}),
    "ZeRO 2, codes, average": (2, {**CODES, **ZERO_2, "ema_decay": 0.75}, {}),
    "ZeRO 3, bf16": (2, {**BF16_MOMENTS, **ZERO_3}, {}),
    "fp16, codes": (1, {**CODES, "bf16": False, "fp16": True, "initial_loss_scale": 256.0}, {}),
    "offload, codes": (1, {**CODES, **OFFLOAD}, {}),
    "from fp32 masters to packed ones": (1, BF16, PACKED),
}


@pytest.mark.parametrize("name", rows(RESUMED, test=["ZeRO 2, codes, average", "from fp32 masters to packed ones"]))
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(gloo: Any, tmp_path: Any, name: str) -> None:
    ranks, flags, others = RESUMED[name]
    steps.require_resumed_to_the_bit(gloo, tmp_path / "run", ranks, flags, **others)


@pytest.mark.parametrize("layout", rows(EVERY, test=["DP2, distributed optimizer"]))
def test_a_checkpoint_is_the_same_to_the_bit_on_every_layout(gloo: Any, once: Any, folder: Any, layout: str) -> None:
    steps.require_loaded_to_the_bit(gloo, once, folder, {**BF16, **BF16_MOMENTS}, EVERY[layout])


def copies(flags: dict[str, Any]) -> list[str]:
    """The weights whose copies differ after a few steps: with other moments they would soon."""
    from megatron_moe.engine.optimizer import parts
    from megatron_moe.optim.optimizer import named_main_params
    from megatron_moe.training.callbacks.checks import compare_replicas

    trainer = steps.Trainer({**STORED, "lr": 1e-1, "lr_warmup_init": 1e-1, **flags})
    for _ in range(steps.STEPS):
        trainer.step()
    adams = [part.optimizer for part in parts(trainer.optimizer)]
    for parameter, main in named_main_params(trainer.model, trainer.optimizer):
        for adam in (one for one in adams if main in one.state):
            parameter.data.copy_(adam.values_of(main, "exp_avg_sq").view(parameter.shape))
    return [difference.name for difference in compare_replicas(trainer.trained)]


@pytest.mark.parametrize(
    "changes", [TP2, {**PP2, "untie_embeddings_and_output_weights": False}], ids=["TP2", "tied embeddings"]
)
def test_copies_of_a_weight_are_rounded_alike(gloo: Any, changes: dict[str, Any]) -> None:
    assert gloo.run(2, copies, flags={**BF16_MOMENTS, **changes}) == [[]] * 2
