"""The optimizer of packed state: what it stores, what it says of it, and what it refuses."""

from typing import Any

import pytest
import torch

from megatron_moe.config.schema import build
from megatron_moe.optim.adam import PrecisionAwareAdam
from megatron_moe.precision.packed_state import StochasticRounding
from tests.helpers.stepped_trainer import TINY
from tests.optim.layout_cases import PACKED

BF16 = {"moment_dtypes": ("bf16", "bf16")}


def adam(numel: int = 1000, **options: Any) -> tuple[PrecisionAwareAdam, torch.Tensor, torch.Tensor]:
    """An optimizer of one bf16 weight with its main weight packed."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(numel, generator=generator).bfloat16()
    main = weight.float()
    made = PrecisionAwareAdam([main], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **options)
    made.allocate()
    made.pack_main_param(main, weight)
    made.place(main, StochasticRounding(torch.tensor([17]), numel, 0, (0, 0)))
    return made, main, weight


def step(optimizer: PrecisionAwareAdam, main: torch.Tensor, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    main.grad = torch.randn(main.shape, generator=generator) * 1e-2
    optimizer.step()


def test_a_packed_main_weight_reads_as_nan_and_cannot_be_written() -> None:
    _, main, _ = adam()
    assert main.isnan().all() and main.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="single memory location"):
        main.add_(1.0)


def test_the_bytes_are_those_that_are_said() -> None:
    for moments in (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "fp8"), ("fp8", "int8"), ("bf16", "int8")):
        made, main, _ = adam(1001, moment_dtypes=moments)
        held = sum(tensor.numel() * tensor.element_size() for tensor in made.state[main].values())
        flags = {"bf16": True, **PACKED, "exp_avg_dtype": moments[0], "exp_avg_sq_dtype": moments[1]}
        derived = build({**TINY, **flags}).derived
        assert held == derived.main_weight_bytes(1001, 2) + derived.moment_bytes(1001)


def test_each_step_draws_anew_and_a_seed_draws_the_same_again() -> None:
    def moments(seed: int) -> list[torch.Tensor]:
        made, main, _ = adam(seed=seed, **BF16)
        found = []
        for _ in range(2):
            main.grad = torch.full_like(main, 0.0123, memory_format=torch.contiguous_format)
            for name in ("exp_avg", "exp_avg_sq"):
                made.state[main][name].zero_()
            made.step()
            found.append(made.values_of(main, "exp_avg").clone())
        return found

    first, second = moments(5)
    assert first.unique().numel() == 2 and not torch.equal(first, second)
    assert all(torch.equal(*pair) for pair in zip(moments(5), (first, second)))
    assert not torch.equal(moments(6)[0], first)


def test_pieces_of_state_on_the_host_are_rounded_as_the_whole() -> None:
    found = []
    for on_host in (False, True):
        made, main, _ = adam(on_host=on_host, **BF16)
        made.piece_numel = 256
        for number in range(3):
            step(made, main, number)
        found.append([made.values_of(main, name).clone() for name in ("exp_avg", "exp_avg_sq", "param")])
    assert all(torch.equal(*pair) for pair in zip(*found))
    assert torch.equal(made.values_of(main, "exp_avg", 70, 300), found[1][0][70:300])  # from within a group on


def test_weights_that_are_loaded_alone_are_the_main_weights() -> None:
    made, main, weight = adam()
    for number in range(5):
        step(made, main, number)
    assert not torch.equal(made.main_param(main), weight.float())
    weight.copy_(torch.randn(weight.shape))
    made.drop_low_bits()
    assert torch.equal(made.main_param(main), weight.float())


def test_evidence_is_finite_exactly_where_the_state_is() -> None:
    for moments in (("bf16", "bf16"), ("int8", "fp8"), ("fp32", "int8")):
        for damaged in (None, "weight", "exp_avg", "exp_avg_sq"):
            made, main, _ = adam(moment_dtypes=moments)
            step(made, main, 0)
            with made.unpacked(keep=True):
                if damaged == "weight":
                    main.data[7] = torch.nan
                elif damaged is not None:
                    made.state[main][damaged][300] = torch.inf
            assert all(one.isfinite().all() for one in made.evidence()) == (damaged is None), (moments, damaged)


def test_a_second_moment_that_is_loaded_is_not_rounded_to_zero() -> None:
    made, main, _ = adam(moment_dtypes=("int8", "int8"))
    with made.unpacked(keep=True):
        made.state[main]["exp_avg_sq"].fill_(1e-9)[::10] = 1.0
    assert made.values_of(main, "exp_avg_sq").gt(0).all()


def test_nothing_is_kept_of_a_load_that_fails() -> None:
    made, main, _ = adam(**BF16)
    step(made, main, 0)
    before = {name: value.clone() for name, value in made.state[main].items()}
    with pytest.raises(ZeroDivisionError), made.unpacked(keep=True):
        main.data.zero_()
        raise ZeroDivisionError
    assert all(torch.equal(before[name], value) for name, value in made.state[main].items())
    assert main.isnan().all()


def test_decay_in_the_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="adam_w_mode=False"):
        PrecisionAwareAdam([torch.zeros(3)], adam_w_mode=False)
