"""Runs under torchrun that are terminated, interrupted and killed go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.report.run_info import read_info
from tests.helpers import kills
from tests.helpers.launchers import Forked
from tests.helpers.ranks import ROOT, RankParent, alive, rank_environment


class Launch:
    """torchrun with two ranks, in a process group of its own as under a shell."""

    def __init__(self, flags: list[str], folder: Path, log: Path) -> None:
        self.log = log
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(ROOT / "pretrain_moe.py"), *flags,
        ]  # fmt: skip
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=rank_environment(), stdout=output, stderr=output, start_new_session=True
            )

    def wait(self, seconds: float = 600.0) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it did not end in {seconds} s:\n{self.output()}") from None

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []

    def kill(self) -> None:
        for pid in (*self.ranks(), self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def until(condition: Callable[[], Any], launch: Launch, seconds: float = 600.0) -> None:
    """Wait for what happens while a launched job runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or launch.process.poll() is not None:
            launch.kill()
            raise AssertionError(f"it never happened:\n{launch.output()}")
        time.sleep(0.05)


def steps(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file, at any moment."""
    return [json.loads(line) for line in kills.raw_lines(path)]


def gone(pids: list[int], seconds: float = 120.0) -> bool:
    """Whether processes have ended, or do so in that many seconds."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_run_that_is_stopped_three_ways_repeats_every_bit_of_an_undisturbed_one(
    rank_parent: RankParent, tmp_path: Path
) -> None:
    folder, whole = tmp_path / "parts", tmp_path / "whole"
    folder.mkdir()
    metrics, world_size, layout = folder / "metrics.jsonl", *kills.LAYOUTS["EP2"]
    flags = kills.flags(10**6, *layout, "--lr-decay-iters", "40", "--save-interval", "4", eval_interval=3)
    flags.append("--exit-signal-handler")
    reached = 0
    for how in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        launch = Launch(flags, folder, tmp_path / f"{how.name}.log")
        until(lambda before=reached: len(steps(metrics)) > before + 2, launch)
        ranks = launch.ranks()
        assert len(ranks) == world_size
        launch.process.send_signal(how)
        launch.wait()
        assert gone(ranks), f"{how.name} left ranks behind:\n{launch.output()}"
        reached = len(steps(metrics))
        newest = max(path.name for path in (folder / "checkpoints").glob("iter_*"))
        if how is signal.SIGTERM:
            assert newest == f"iter_{reached:07d}", "SIGTERM saves where it stops"
        words = {signal.SIGTERM: f"stopped at iteration {reached} by SIGTERM", signal.SIGINT: "interrupted"}
        assert words.get(how, "") in launch.output()
        # torchrun itself leaves with one; the ranks have nothing to add
        assert launch.output().count("Traceback") <= 1, launch.output()
    last = reached + 3
    forked = Forked(rank_parent)  # torchrun's part is how a run stops
    oracle = kills.undisturbed_job(forked, whole, [*flags, "--exit-interval", str(last)], world_size)
    again = kills.undisturbed_job(forked, folder, [*flags, "--exit-interval", str(last)], world_size)
    assert kills.differences(again, oracle, interval=0) == []
    assert len(oracle.lines) == last
    endings = [one.get("ending") for one in read_info(metrics)["attempts"]]
    assert endings[:3] == ["stopped by SIGTERM", "stopped by SIGINT", None], "nobody records a SIGKILL"
    assert endings[3] == f"stopped (--exit-interval {last})"


def test_a_mistake_is_told_once_and_every_rank_exits_with_status_2(rank_parent: RankParent, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    flags = ["--preset", "tiny", "--mock-data", "--vocab-size", "99", "--load", str(tmp_path)]
    forked, log = Forked(rank_parent), tmp_path.parent / "mistake.log"
    forked.start(flags, 2, ROOT, log)
    assert [rank_parent.statuses([pid], 300.0) for pid in forked.ranks()] == [[2], [2]]
    assert log.read_text().count("is not a checkpoint folder") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
