"""Counts are exact and the bias step decides in integers."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_moe.moe.load_balance import count_tokens, updated_expert_bias
from tests.numbers.reference_moe import bias_step


def test_counts_per_sequence_follow_the_engines_order_of_tokens() -> None:
    ids = torch.tensor([[0], [3], [0], [2]])  # tokens 0 and 2 are sequence 0, and there are as many as experts
    assert count_tokens(ids, 4, None, num_sequences=2).tolist() == [[2, 0, 0, 0], [0, 0, 1, 1]]
    assert count_tokens(ids, 4, torch.tensor([False, True, False, False])).tolist() == [[2, 0, 1, 0]]


@pytest.mark.parametrize("seed", range(6))
def test_the_bias_step_has_the_bits_of_integer_arithmetic(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(2, 65, (1,), generator=generator))
    # Close to balance, with counts beyond 2^24 in sum: where rounding would turn signs round.
    counts = 40840 * 1000 + torch.randint(-3, 4, (experts,), generator=generator)
    bias = torch.randn(experts, generator=generator)
    stepped = updated_expert_bias(bias, counts, 1e-3)
    wanted = torch.tensor(bias_step(bias.tolist(), counts.tolist(), 1e-3))
    assert torch.equal(stepped.view(torch.int32), wanted.view(torch.int32))


def test_an_expert_at_the_mean_is_left_alone() -> None:
    bias = torch.tensor([0.5, 0.25, -0.5])
    assert updated_expert_bias(bias, torch.tensor([7, 6, 8]), 0.001).tolist()[0] == 0.5


@pytest.mark.parametrize("seed", range(2))
def test_a_centred_bias_has_mean_zero_and_the_same_differences(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bias, counts = torch.randn(64, generator=generator) + 0.3, torch.randint(0, 99, (64,), generator=generator)
    plain = updated_expert_bias(bias, counts, 1e-3)
    centred = updated_expert_bias(bias, counts, 1e-3, center=True)
    wanted = torch.tensor([b - math.fsum(plain.tolist()) / 64 for b in plain.tolist()])
    assert centred.dtype == torch.float32
    torch.testing.assert_close(centred, wanted, rtol=2**-23, atol=1e-9)  # one unit in the last place
    assert abs(centred.double().mean()) < 1e-7 < abs(plain.double().mean())


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.int64), (torch.float32, torch.float32)])
def test_other_dtypes_are_refused(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    with pytest.raises(TypeError, match="float32 bias and int64 counts"):
        updated_expert_bias(torch.zeros(2, dtype=dtypes[0]), torch.zeros(2, dtype=dtypes[1]), 0.001)
