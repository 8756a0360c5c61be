"""Groups, facts and seeds: of one process without a launcher, and of several ranks."""

import dataclasses
import itertools
import math
import random
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_moe.config.launch import launched_world
from megatron_moe.config.schema import Run, replace
from megatron_moe.engine.schedules import _own_group
from megatron_moe.parallel import groups

pytestmark = pytest.mark.engine

GROUPS = (
    "tp pp cp dp dp_cp tp_cp tp_dp_cp mp embd pos_embd ep expt_tp expt_dp tp_ep tp_ep_pp intra_dp_cp intra_expt_dp"
).split()


@pytest.fixture(autouse=True)
def alone(monkeypatch, one_process):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_this_process_is_the_world():
    assert launched_world() == (0, 1)
    collection = groups.initialize(Run())
    assert {name: getattr(collection, name).size() for name in GROUPS} == dict.fromkeys(GROUPS, 1)
    assert str(groups.rank_facts()) == "rank 0/1 (tp 0/1, pp 0/1, cp 0/1, dp 0/1, ep 0/1, etp 0/1)"


def test_the_launchers_world_is_read_without_joining_it(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launched_world() == (3, 8)
    assert not dist.is_initialized()


def test_groups_can_be_left_and_built_again_and_the_timeout_is_the_runs():
    groups.destroy()
    for _ in range(2):
        groups.initialize(replace(Run(), distributed_timeout_minutes=1.5))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=90)
        groups.destroy()
        assert not dist.is_initialized()


def test_a_seed_repeats_every_stream_and_another_changes_them():
    groups.initialize(Run())
    seen = []
    for seed in (1, 1, 2**32 + 5):
        groups.seed_everything(replace(Run(), seed=seed))
        seen.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert seen[0] == seen[1]
    assert all(first != second for first, second in zip(seen[0], seen[2], strict=True))


def test_ranks_with_other_tokens_or_layers_have_streams_of_their_own(monkeypatch):
    groups.initialize(Run())
    facts, seeds = groups.rank_facts(), {}
    for tp, *place in itertools.product(range(2), repeat=4):
        axes = dict(zip(("pp", "cp", "dp"), place))
        here = {f"{axis}_{what}": n for axis, rank in axes.items() for what, n in (("rank", rank), ("size", 2))}
        monkeypatch.setattr(
            groups, "rank_facts", lambda here=here, tp=tp: dataclasses.replace(facts, tp_rank=tp, **here)
        )
        groups.seed_everything(Run())
        assert seeds.setdefault(tuple(place), torch.initial_seed()) == torch.initial_seed()
    assert len(set(seeds.values())) == 8


@pytest.mark.parametrize("sizes", [[2, 1, 4, 1, 3], [1, 8, 2, 2, 1], [2, 2, 2, 2, 2]])
def test_an_imagined_rank_is_in_the_groups_that_the_engine_gives_it(sizes):
    world_size = math.prod(sizes)
    for mask in itertools.product((False, True), repeat=len(sizes)):
        every = parallel_state.generate_masked_orthogonal_rank_groups(world_size, sizes, mask)
        for rank in range(world_size):
            assert _own_group(rank, world_size, sizes, mask) == [group for group in every if rank in group]


# ---- several ranks


def group_sizes(run: Run) -> tuple[str, dict[str, int]]:
    collection = groups.initialize(run)
    return str(groups.rank_facts()), {name: getattr(collection, name).size() for name in SIZES}


SIZES = {
    **{"tp": 2, "pp": 1, "cp": 1, "dp": 2, "dp_cp": 2, "tp_cp": 2, "tp_dp_cp": 4, "mp": 2},
    **{"ep": 2, "expt_tp": 1, "expt_dp": 2, "tp_ep": 2, "tp_ep_pp": 2, "intra_dp_cp": 2, "intra_expt_dp": 2},
}


def test_every_group_has_its_size(gloo: Any) -> None:
    flags = {"num_experts": 8, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    run = replace(Run(), tensor_model_parallel_size=2, sequence_parallel=True, **flags)
    place, sizes = gloo.run(4, group_sizes, run=run)[3]
    assert place == "rank 3/4 (tp 1/2, pp 0/1, cp 0/1, dp 1/2, ep 1/2, etp 0/1)"
    assert sizes == SIZES


def streams(run: Run) -> dict[str, float]:
    """The next number of each random stream of this rank."""
    groups.initialize(run)
    groups.seed_everything(run)
    drawn = {"python": random.random(), "numpy": float(numpy.random.rand()), "torch": float(torch.rand(()))}
    with get_cuda_rng_tracker().fork():
        drawn["tensor parallel"] = float(torch.rand(()))
    return drawn


STREAMS = ["python", "numpy", "torch", "tensor parallel"]


@pytest.mark.parametrize(
    ("layout", "differing"),
    [
        ({}, STREAMS),
        ({"tensor_model_parallel_size": 2}, ["tensor parallel"]),
        ({"pipeline_model_parallel_size": 2}, STREAMS),
    ],
    ids=["DP2", "TP2", "PP2"],
)
def test_ranks_draw_differently_but_for_what_tensor_parallel_ranks_share(gloo, layout: Any, differing: list[str]):
    first, second = gloo.run(2, streams, run=replace(Run(), **layout))
    assert [name for name in first if first[name] != second[name]] == differing
