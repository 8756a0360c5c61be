"""The launcher: how a run of two ranks is stopped, interrupted and killed, and what is said of it, once."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_moe.io import launched
from megatron_moe_tools import train
from megatron_moe_tools.launch import node_ranks
from tests.helpers.ranks import ROOT, Child, RankParent

PATIENCE = 600.0
TRAINING = "--preset tiny --mock-data --vocab-size 99 --train-iters 1000000 --log-interval 1000000".split()
LIGHT_RANK = """
import json, os, signal, sys, time
launcher = os.getppid()
for name, status in json.loads(os.environ["ENDS_WITH"]).items():
    signal.signal(getattr(signal, name), lambda *_, status=status: os._exit(status))
open("ready" + os.environ["RANK"], "w").close()
while os.getppid() == launcher:
    time.sleep(0.05)
"""
"""A rank without a training: it ends as ENDS_WITH says, name of a signal -> exit status."""


def with_light_ranks(argv: list[str]) -> int:
    node_ranks._RANK = LIGHT_RANK
    launched.FIRST_NOTE_SECONDS = 0.0
    tempfile.tempdir = None  # as TMPDIR says
    return train.main(argv)


class Launch:
    """`megatron-moe train --nproc-per-node RANKS`, in a session of its own as under a shell."""

    def __init__(self, parent: RankParent, folder: Path, *flags: str, target: str, **environment: str) -> None:
        self.metrics, self._log, self._parent = folder / "metrics.jsonl", folder / "log", parent
        argv = ["--nproc-per-node", "2", *TRAINING, "--metrics-file", str(self.metrics), *flags]
        environment["TMPDIR"] = str(folder)
        child = Child(target, argv, str(self._log), str(folder), environment, own_session=True)
        (self.pid,) = parent.fork([child])

    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def steps(self) -> int:
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            status = self._parent.statuses([self.pid])[0]
            assert status is None and time.monotonic() < deadline, f"it never happened ({status}):\n{self.said()}"
            time.sleep(0.05)

    def ranks(self) -> list[psutil.Process]:
        return sorted(psutil.Process(self.pid).children(), key=lambda one: one.environ()["RANK"])

    def ends(self, ranks: list[psutil.Process]) -> int | None:
        """Wait for the end; return the exit status. No rank is left behind."""
        (status,) = self._parent.statuses([self.pid], PATIENCE)
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
        return status


def of_training(parent: RankParent, folder: Path) -> tuple[Launch, list[psutil.Process]]:
    launch = Launch(parent, folder, target="megatron_moe_tools.train:main")
    launch.until(lambda: launch.steps() >= 2)
    return launch, launch.ranks()


def of_light_ranks(parent: RankParent, folder: Path, **ends_with: int) -> tuple[Launch, list[psutil.Process]]:
    target = "tests.launch.test_train:with_light_ranks"
    launch = Launch(parent, folder, target=target, ENDS_WITH=json.dumps(ends_with))
    launch.until(lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)))
    return launch, launch.ranks()


def test_a_rank_that_is_killed_is_told_of_in_one_paragraph(rank_parent, tmp_path):
    launch, ranks = of_light_ranks(rank_parent, tmp_path)
    ranks[1].kill()
    assert launch.ends(ranks) == 128 + signal.SIGKILL, launch.said()
    (told,) = [line for line in launch.said().splitlines() if "SIGKILL" in line]
    assert f"rank 1 on {os.uname().nodename} (process {ranks[1].pid}) was killed by SIGKILL" in told, told
    assert "Then rank 0 was killed by SIGTERM" in told


@pytest.mark.parametrize(
    ("name", "ends_with", "status", "says"),
    [
        ("SIGTERM", {"SIGTERM": 0}, 0, ""),  # saved
        ("SIGUSR1", {"SIGUSR1": 0}, 0, ""),
        ("SIGTERM", {}, 143, "the ranks were ended by SIGTERM, without a checkpoint"),
        ("SIGINT", {"SIGINT": 130}, 130, ""),  # torch ends the slower rank by SIGTERM
    ],
)
def test_a_signal_reaches_all_ranks_whose_end_is_the_launchers(rank_parent, tmp_path, name, ends_with, status, says):
    launch, ranks = of_light_ranks(rank_parent, tmp_path, **ends_with)
    os.kill(launch.pid, getattr(signal, name))
    assert launch.ends(ranks) == status, launch.said()
    lines = launch.said().splitlines()[1:]  # after what it starts
    assert [line.partition("train: ")[2] for line in lines] == [says] * bool(says)
    assert list(tmp_path.glob("megatron-moe-*")) == []


def test_a_launcher_that_waits_for_other_nodes_ends_at_a_signal(rank_parent, tmp_path):
    flags = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --rdzv-conf is_host=true".split()
    launch = Launch(rank_parent, tmp_path, *flags, target="tests.launch.test_train:with_light_ranks")
    launch.until(lambda: "waiting for the other nodes of --nnodes 2" in launch.said())
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.ends([]) == 143
    assert "ended by SIGTERM before its ranks were started" in launch.said()


def test_a_rank_is_a_process_that_trains():
    program = [sys.executable, "-c", node_ranks._RANK, str(ROOT), "megatron_moe_tools.pretrain", "--help"]
    shown = subprocess.run(program, cwd="/", capture_output=True, text=True, check=True).stdout
    assert shown.startswith("usage: pretrain_moe.py")


@pytest.mark.test_all(instead="tests/launch/test_train.py::test_a_signal_reaches_all_ranks_whose_end_is_the_launchers")
def test_ctrl_c_ends_a_training_with_a_word_however_slow_rank_0_is(rank_parent, tmp_path):
    launch, ranks = of_training(rank_parent, tmp_path)
    ranks[0].suspend()
    os.killpg(launch.pid, signal.SIGINT)  # as a terminal does
    time.sleep(3.0)  # in which rank 1, if it did not wait, would end, and torch would end rank 0
    ranks[0].resume()
    assert launch.ends(ranks) == 130, launch.said()
    assert launch.said().count("interrupted") == 1 and "Traceback" not in launch.said(), launch.said()
