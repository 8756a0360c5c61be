"""R6: a run that goes on with another number of data-parallel ranks reads the same samples, in the same order."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_moe.data.batches import added, batch_iterator, hex_of
from megatron_moe.training.batch_size import BatchSchedule
from tests.data.test_batches import Numbered, make_run

pytestmark = pytest.mark.engine


def one(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def read(dp: int, micro_batch: int, steps: int, consumed: int, ramp: Any) -> tuple[list[int], list[str | None], int]:
    """Samples in the order in which a global batch is laid out, the hash of each step, and where it ends."""
    run = make_run(micro_batch_size=micro_batch)
    groups = [SimpleNamespace(tp=one(), pp=one(), cp=one(), dp=one(rank, dp)) for rank in range(dp)]
    ranks = [batch_iterator(Numbered(512), run, consumed_samples=consumed, pg_collection=g) for g in groups]
    schedule = BatchSchedule(micro_batch, dp, 16, ramp)
    order: list[int] = []
    hashes = []
    for _ in range(steps):
        for _ in range(schedule.num_micro_batches(consumed)):
            for rank in ranks:
                order += next(rank)["tokens"][:, 0].tolist()
        consumed += schedule.global_batch_size(consumed)
        hashes.append(hex_of(*added(rank.take_sample_words() for rank in ranks)))
    return order, hashes, consumed


@pytest.mark.parametrize("ramp", [None, (8, 4, 90)])
@pytest.mark.parametrize(("before", "after"), itertools.permutations((1, 2, 4), 2))
def test_samples_are_read_on_in_one_order_none_missing_none_twice(before, after, ramp):
    whole, hashes, end = read(1, 4, 20, 0, ramp)
    assert whole == list(range(end))
    for cut in (1, 5, 9):
        first, told, consumed = read(before, 1, cut, 0, ramp)
        second, more, last = read(after, 4 // after, 20 - cut, consumed, ramp)
        # not sorted before they are compared
        assert first + second == whole
        assert last == end and told + more == hashes
