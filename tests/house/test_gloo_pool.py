"""The harness itself: results by rank, failures that name their rank, layouts one after another, nothing left."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.schema import Run, replace
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


def place(run: Run) -> str:
    from megatron_moe.parallel import groups

    groups.initialize(run)
    return str(groups.rank_facts())


def log_losses(layers: int) -> int:
    """Log an auxiliary loss of each layer as the engine's router does; how many are noted."""
    how = {"layer_number": layers, "num_layers": layers}
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # before 0.19
        from megatron.core.transformer.moe import moe_utils

        moe_utils.save_to_aux_losses_tracker("load_balancing_loss", torch.ones(()), **how)
        return len(moe_utils.get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"])
    get_moe_metrics_tracker().record("load_balancing_loss", torch.ones(()), **how)
    return len(get_moe_metrics_tracker().metrics["load_balancing_loss"].values)


def test_every_rank_returns_its_result(gloo):
    assert gloo.run(2, sums, factor=10.0) == [30.0, 30.0]
    assert gloo.run(4, sums, factor=1.0) == [10.0] * 4
    assert gloo.run(1, sums, factor=1.0) == [1.0]


def test_layouts_may_follow_each_other_in_one_pool(gloo):
    tensor_parallel = gloo.run(2, place, run=replace(Run(), tensor_model_parallel_size=2))
    assert tensor_parallel[1] == "rank 1/2 (tp 1/2, pp 0/1, cp 0/1, dp 0/1, ep 0/1, etp 1/2)"
    expert_parallel = gloo.run(2, place, run=replace(Run(), expert_model_parallel_size=2, num_experts=4))
    assert expert_parallel[1] == "rank 1/2 (tp 0/1, pp 0/1, cp 0/1, dp 1/2, ep 1/2, etp 0/1)"


def test_losses_of_a_model_with_fewer_layers_are_forgotten(gloo):
    assert [gloo.run(1, log_losses, layers=layers) for layers in (1, 3)] == [[1], [3]]


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
