"""The harness itself: a rank that fails, hangs or dies is named, and the pool goes on after it."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_moe.training.signals import StopSignals

pytestmark = pytest.mark.engine


def sums() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def listen() -> None:
    StopSignals(save=True).__enter__().__exit__()


def broken(how: str) -> None:
    """Rank 1 is broken; rank 0 waits for it where it raises, and else has returned."""
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("the second rank gives up")
        time.sleep(1000) if how == "hangs" else os._exit(7)
    if how == "raises":
        dist.barrier()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", ["--- rank 1: Traceback", "the second rank gives up"]),
        ("hangs", ["--- rank 0: returned", "rank 1: did not end", "in broken"]),
        ("dies", ["--- rank 0: returned", "ended during the case"]),  # leaving the groups does not wait for a dead rank
    ],
)
def test_what_is_wrong_with_a_rank_is_told_and_the_pool_goes_on(gloo, how, said):
    gloo.run(2, listen)
    with pytest.raises(AssertionError) as failure:
        gloo.run_within(5.0, 2, broken, how=how)
    assert [text for text in said if text not in str(failure.value)] == []
    assert gloo.run(2, sums) == [3.0, 3.0]
