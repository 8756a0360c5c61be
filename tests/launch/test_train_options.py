"""The launch options: torchrun's, read and checked without torch."""

import os

import pytest

from megatron_moe.config.errors import ConfigError
from megatron_moe.platform import host
from megatron_moe_tools.launch import node_ranks
from tests.helpers.ranks import Child


def test_every_option_of_torchrun_is_taken_or_refused_with_a_reason():
    from torch.distributed.run import get_args_parser

    takes_value = {
        next(name for name in action.option_strings if name.startswith("--")): action.nargs != 0
        for action in get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }
    assert takes_value.keys() <= node_ranks.TAKEN.keys() | set(node_ranks.REFUSED)
    assert not node_ranks.TAKEN.keys() & set(node_ranks.REFUSED)
    for name in takes_value.keys() & node_ranks.TAKEN.keys():
        assert (node_ranks.TAKEN[name] != node_ranks.SWITCH) == takes_value[name], name


@pytest.mark.parametrize(
    ("words", "environment", "world_size"),
    [
        ("--nproc-per-node 2 --preset tiny", {}, 2),
        ("--nproc_per_node=2 --preset tiny", {}, 2),
        ("--preset tiny --nnodes 3 --nproc-per-node 2", {}, 6),
        ("--nnodes 2:2 --preset tiny", {}, 2),
        ("--preset tiny", {"PET_NPROC_PER_NODE": "4"}, 4),
        ("--nproc-per-node 2 --preset tiny", {"PET_NPROC_PER_NODE": "4", "PET_NNODES": "2"}, 4),
        ("--preset tiny", {}, None),
    ],
)
def test_the_ranks_are_counted_and_the_flags_left(words, environment, world_size):
    launch, flags = node_ranks.split(words.split(), environment)
    assert (launch and launch.world_size, flags) == (world_size, ["--preset", "tiny"])


@pytest.mark.parametrize(
    ("word", "devices", "ranks"), [("gpu", 8, 8), ("auto", 8, 8), ("auto", 0, len(os.sched_getaffinity(0)))]
)
def test_gpu_and_cpu_are_counted_here(monkeypatch, word, devices, ranks):
    monkeypatch.setattr(host, "visible_devices", lambda: devices)
    launch, _ = node_ranks.split(["--nproc-per-node", word], {})
    assert launch is not None and launch.world_size == ranks and f"--nproc-per-node={ranks}" in launch.words


@pytest.mark.parametrize("option", ["--numa-binding=foo", "--redirects=foo"])
def test_a_value_that_torch_refuses_is_a_mistake(option):
    launch, _ = node_ranks.split([option, "--nproc-per-node", "1"], {})
    assert launch is not None
    with pytest.raises(ConfigError, match=f"launch options {option}"):
        node_ranks.start(launch, [])


def test_a_rank_does_not_launch():
    with pytest.raises(ConfigError, match="RANK=1"):
        node_ranks.split(["--nproc-per-node", "2"], {"RANK": "1"})


def test_a_dry_run_of_several_nodes_needs_none_of_them(rank_parent, tmp_path):
    flags = "--preset tiny --mock-data --vocab-size 64 --expert-model-parallel-size 8 --micro-batch-size 1 --dry-run"
    log = tmp_path / "log"
    argv = ["--nnodes", "8", "--nproc-per-node", "8", *flags.split(), "--global-batch-size", "64"]
    assert rank_parent.statuses(rank_parent.fork([Child("megatron_moe_tools.train:main", argv, str(log))]), 300) == [0]
    assert log.read_text().endswith("dry run: the configuration is sound\n")
