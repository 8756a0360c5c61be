"""A bit that differs between replicas is seen, named with its rank, and nothing else is an alarm."""

from typing import Any

import pytest
import torch

from megatron_moe.training.callbacks import checks
from megatron_moe.training.callbacks.checks import ReplicaDifference, bit_hashes
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import EP2, TP2, ZERO_3
from tests.training.replica_cases import flip, flipped_bits

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "EP2": (2, {**EP2, "bf16": True}),
    "TP2": (2, {**TP2, "global_batch_size": 2}),
    "TP2, ZeRO 3": (2, {**TP2, **ZERO_3, "fp16": True, "initial_loss_scale": 1024.0, "global_batch_size": 2}),
    "TP2 x DP2, ETP1": (4, {**TP2, **EP2, "expert_tensor_parallel_size": 1}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 8])
def test_every_single_bit_changes_the_hash_of_its_row_alone(dtype, width, monkeypatch):
    monkeypatch.setattr(checks, "_CHUNK", 4)  # rows in pieces
    rows = torch.randn(2 * width + 1).to(dtype)[1:].view(2, width)  # not aligned to 8 bytes
    first, second = bit_hashes([rows]).tolist()
    for element in range(width):
        for bit in range(8 * rows.element_size()):
            flip(rows[1], element, bit)
            changed = bit_hashes([rows]).tolist()
            assert changed[0] == first and changed[1] != second
            flip(rows[1], element, bit)
    others = [rows.flip(0), rows.new_empty(1, 0), rows.clone()]  # an empty shard too
    assert bit_hashes(others).tolist() == [second, first, 0, first, second]
    assert bit_hashes([rows.flip(1)]).tolist() != [first, second], "elements that changed places"


def test_the_odd_copy_is_named_where_there_is_a_majority():
    assert str(ReplicaDifference("w", ((0, 7), (2, 7), (4, 9)))) == (
        "w: of 3 copies (ranks 0, 2, 4) that of rank 4 differs from the others"
    )
    assert str(ReplicaDifference("w", ((0, 7), (2, 9)))) == "w: the copies of ranks 0 and 2 differ, with no majority"


@pytest.mark.parametrize("case", rows(CASES, test=["EP2", "TP2", "TP2, ZeRO 3"]))
def test_flipped_bits_are_caught_in_the_same_step(gloo, case):
    ranks, flags = CASES[case]
    for outcome in gloo.run(ranks, flipped_bits, flags=flags, trials=4):
        assert (outcome["missed"], outcome["alarms"]) == ([], [])
        assert (outcome["caught"], outcome["steps"]) == (4, 9)
