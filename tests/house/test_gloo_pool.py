"""The harness itself: failures name their rank, and the pool goes on after them."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_moe.training.signals import StopSignals

pytestmark = pytest.mark.engine


def sums(factor: float) -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return factor * value.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank gives up")
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def listen() -> None:
    StopSignals(save=True).__enter__().__exit__()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def test_an_exception_shows_its_rank_and_the_pool_goes_on(gloo):
    with pytest.raises(AssertionError, match="the second rank gives up") as failure:
        gloo.run(2, fail_on_rank_1)
    assert "--- rank 1: Traceback" in str(failure.value)
    assert gloo.run(2, sums, factor=1.0) == [3.0, 3.0]


def test_a_hanging_case_is_ended_and_shows_where_it_hangs(gloo):
    gloo.run(2, listen)
    with pytest.raises(AssertionError, match="hang_on_rank_1") as failure:
        gloo.run_within(5.0, 2, hang_on_rank_1)
    assert all(said in str(failure.value) for said in ("--- rank 0: returned", "rank 1: did not end"))
    assert "time.sleep" in str(failure.value) or "in hang_on_rank_1" in str(failure.value)
    assert gloo.run(2, sums, factor=1.0) == [3.0, 3.0]


def test_a_rank_that_dies_is_replaced(gloo):
    with pytest.raises(AssertionError, match="ended during the case") as failure:
        gloo.run(2, die_on_rank_1)
    assert "--- rank 0: returned" in str(failure.value), "leaving the groups does not wait for a dead rank"
    assert gloo.run(2, sums, factor=1.0) == [3.0, 3.0]
