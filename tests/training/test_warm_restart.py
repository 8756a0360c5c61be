"""Ranks that are killed go on in processes that are there already, to the bit, and as often as the flag allows."""

import contextlib
import os
import random
import signal
import statistics
import time
from pathlib import Path

import pytest

from megatron_moe.io.program import DONE
from tests.helpers import kills
from tests.helpers.launchers import Forked, Torchrun
from tests.helpers.rows import rows

STEPS = 40


def trainers(launcher: Torchrun) -> list[int]:
    """The processes that train, by rank: the children of those that the launcher has started."""
    found = []
    for rank in launcher.ranks():
        children = Path(f"/proc/{rank}/task/{rank}/children")
        found += [int(pid) for pid in children.read_text().split()] if children.exists() else []
    return found


def flags(layout: str, *more: str) -> tuple[int, list[str]]:
    world_size, of_layout = kills.LAYOUTS[layout]
    saving = ["--save-interval", "4", "--warm-restarts", "2", *more]
    return world_size, kills.flags(STEPS, *of_layout, *saving, eval_interval=100)


def next_step(launcher: Torchrun, metrics: Path, before: list[bytes]) -> float:
    """Return the time at which a line is there that was not there before."""
    deadline = time.monotonic() + 240
    while not set(kills.raw_lines(metrics)) - set(before):
        assert launcher.wait(0.01) is None and time.monotonic() < deadline, kills.tail(metrics.parent)
    return time.monotonic()


WAYS = [("DP2", "KILL"), ("TP2xEP2", "KILL"), ("PP2", "KILL"), ("DP2", "STOP"), ("ZeRO 3 x EP2", "SEGV")]


@pytest.mark.parametrize(("layout", "way"), rows(WAYS, test=WAYS[:1]))
def test_a_rank_that_dies_costs_no_start_and_no_bit(rank_parent, tmp_path: Path, layout: str, way: str) -> None:
    world_size, argv = flags(layout, "--distributed-timeout-minutes", "0.1")
    plain = argv[: argv.index("--warm-restarts")]
    oracle = kills.undisturbed_job(Forked(rank_parent), tmp_path / "whole", plain, world_size)
    launcher, folder = Torchrun(), tmp_path / "killed"
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    launcher.start(argv, world_size, folder, folder / "log.txt")
    parents, times = [], []
    for reached in (6, 15, 24):
        assert kills.until_lines(launcher, metrics, reached) is None, kills.tail(folder)
        parents.append(launcher.ranks())
        pids, before = trainers(launcher), kills.raw_lines(metrics)
        began = time.monotonic()
        os.kill(random.Random(reached).choice(pids), getattr(signal, f"SIG{way}"))
        times.append(next_step(launcher, metrics, before) - began)
    assert launcher.wait(240) == DONE, kills.tail(folder)
    text = (folder / "log.txt").read_text()
    print(f"{layout}, {way}: {times}")
    job = kills.Job(folder)
    job.lines = job.final()
    assert kills.differences(job, oracle, 0) == []
    assert parents[0] == parents[1] == parents[2] and text.count("warm restart") == 3


@pytest.mark.test_all(instead="tests/training/test_warm_restart.py::test_a_rank_that_dies_costs_no_start_and_no_bit")
def test_the_end_is_the_launchers_where_no_restart_helps(tmp_path: Path) -> None:
    """A signal that is passed on, a mistake, and more attempts without a newer step than allowed."""
    for name, more, end, said in (
        ("asked", ["--exit-signal-handler"], "TERM", "by SIGTERM"),
        ("mistake", ["--pretrained-checkpoint", "nowhere"], "itself", "nowhere"),
        ("in vain", [], "every start", "no warm restart: 3 attempts in a row left no newer step"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        world_size, argv = flags("DP2", *more)
        launcher = Torchrun()
        launcher.start(argv, world_size, folder, folder / "log.txt")
        if end == "TERM":
            assert kills.until_lines(launcher, folder / "metrics.jsonl", 3) is None, kills.tail(folder)
            launcher.stop(signal.SIGTERM)
        killed: set[int] = set()
        while end == "every start" and launcher.wait(0.02) is None:
            for pid in set(trainers(launcher)) - killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        assert launcher.wait(240) == 1, kills.tail(folder)  # torchrun's, whatever the ranks' is
        text = (folder / "log.txt").read_text()
        assert said in text and text.count("\npretrain_moe.py: warm restart") == (2 if end == "every start" else 0), (
            text
        )


@pytest.mark.test_all(instead="tests/training/test_warm_restart.py::test_a_rank_that_dies_costs_no_start_and_no_bit")
def test_a_warm_restart_takes_at_most_a_third_of_a_cold_one(tmp_path: Path) -> None:
    """From the kill to the next step, in turn: torchrun's restart of all ranks, and this one."""
    took: dict[str, list[float]] = {"warm": [], "cold": []}
    for number in range(6):
        kind = ("warm", "cold")[number % 2]
        folder = tmp_path / str(number)
        folder.mkdir()
        world_size, argv = flags("TP2xEP2")
        if kind == "cold":
            argv = argv[: argv.index("--warm-restarts")]
        launcher = Torchrun({"PET_MAX_RESTARTS": "1"})
        launcher.start(argv, world_size, folder, folder / "log.txt")
        assert kills.until_lines(launcher, folder / "metrics.jsonl", 10) is None, kills.tail(folder)
        pids, before = (
            (trainers(launcher) if kind == "warm" else launcher.ranks()),
            kills.raw_lines(folder / "metrics.jsonl"),
        )
        began = time.monotonic()
        os.kill(pids[number % world_size], signal.SIGKILL)
        took[kind].append(next_step(launcher, folder / "metrics.jsonl", before) - began)
        launcher.kill(None)
    print({kind: [round(one, 1) for one in times] for kind, times in took.items()})
    assert statistics.median(took["warm"]) <= statistics.median(took["cold"]) / 3
