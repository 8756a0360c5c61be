"""Runs under torchrun that are terminated, interrupted and killed go on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_moe.report.run_info import read_info
from tests.helpers import kills
from tests.helpers.launchers import Forked
from tests.helpers.ranks import ROOT, Child, RankParent, alive


class Torchrun:
    """torchrun in a session of its own, forked where torch is loaded; its two ranks are interpreters of their own."""

    def __init__(self, parent: RankParent, flags: list[str], folder: Path, log: Path) -> None:
        argv = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        argv += [str(ROOT / "pretrain_moe.py"), *flags]
        self._parent, self._log = parent, log
        (self.pid,) = parent.fork([
            Child("torch.distributed.run:main", argv, str(log), str(folder), own_session=True)
        ])  # fmt: skip

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        listing = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        """Wait for what happens while the job runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self._parent.statuses([self.pid]) != [None]:
                os.killpg(self.pid, signal.SIGKILL)
                raise AssertionError(f"it never happened:\n{self.output()}")
            time.sleep(0.05)

    def wait_until_gone(self, ranks: list[int], seconds: float = 300.0) -> None:
        """Wait for the end of torchrun and of its ranks."""
        assert self._parent.statuses([self.pid], seconds) != [None], self.output()
        deadline = time.monotonic() + seconds
        while left := [pid for pid in ranks if alive(pid)]:
            assert time.monotonic() < deadline, f"ranks were left behind: {left}\n{self.output()}"
            time.sleep(0.05)


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
        torchrun = Torchrun(rank_parent, flags, folder, tmp_path / f"{how.name}.log")
        torchrun.until(lambda before=reached: len(kills.raw_lines(metrics)) > before + 2)
        ranks = torchrun.ranks()
        assert len(ranks) == world_size
        os.kill(torchrun.pid, how)
        torchrun.wait_until_gone(ranks)
        reached = len(kills.raw_lines(metrics))
        newest = max(path.name for path in (folder / "checkpoints").glob("iter_*"))
        if how is signal.SIGTERM:
            assert newest == f"iter_{reached:07d}", "SIGTERM saves where it stops"
        words = {signal.SIGTERM: f"stopped at iteration {reached} by SIGTERM", signal.SIGINT: "interrupted"}
        assert words.get(how, "") in torchrun.output()
        # torchrun itself leaves with one; the ranks have nothing to add
        assert torchrun.output().count("Traceback") <= 1, torchrun.output()
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
