"""Runs under torchrun that are terminated, interrupted and killed go on as if nothing had happened."""

import signal
from pathlib import Path

import pytest

from megatron_moe.report.run_info import read_info
from tests.helpers import kills
from tests.helpers.launchers import Forked, Torchrun
from tests.helpers.ranks import ROOT, RankParent
from tests.helpers.rows import rows


# A run that Ctrl-C ends leaves what a killed one does; launch/test_train.py has the signal's way to the ranks.
@pytest.mark.parametrize("ways", rows(["TERM INT KILL", "TERM KILL"], test=["TERM KILL"]))
def test_a_run_that_is_stopped_in_several_ways_repeats_every_bit_of_an_undisturbed_one(rank_parent, tmp_path, ways):
    folder, whole = tmp_path / "parts", tmp_path / "whole"
    folder.mkdir()
    metrics, world_size, layout = folder / "metrics.jsonl", *kills.LAYOUTS["EP2"]
    flags = kills.flags(10**6, *layout, "--lr-decay-iters", "40", "--save-interval", "4", eval_interval=3)
    flags.append("--exit-signal-handler")
    reached = 0
    for how in (signal.Signals[f"SIG{way}"] for way in ways.split()):
        torchrun, log = Torchrun(), tmp_path / f"{how.name}.log"
        torchrun.start(flags, world_size, folder, log)
        assert kills.until_lines(torchrun, metrics, reached + 3) is None, log.read_text()
        assert len(torchrun.ranks()) == world_size
        torchrun.stop(how)
        reached = len(kills.raw_lines(metrics))
        newest = max(path.name for path in (folder / "checkpoints").glob("iter_*"))
        if how is signal.SIGTERM:
            assert newest == f"iter_{reached:07d}", "SIGTERM saves where it stops"
        words = {signal.SIGTERM: f"stopped at iteration {reached} by SIGTERM", signal.SIGINT: "interrupted"}
        output = log.read_text(errors="replace")
        assert words.get(how, "") in output
        # torchrun itself leaves with one; the ranks have nothing to add
        assert output.count("Traceback") <= 1, output
    last = reached + 3
    forked = Forked(rank_parent)  # torchrun's part is how a run stops
    oracle = kills.undisturbed_job(forked, whole, [*flags, "--exit-interval", str(last)], world_size)
    again = kills.undisturbed_job(forked, folder, [*flags, "--exit-interval", str(last)], world_size)
    assert kills.differences(again, oracle, interval=0) == []
    assert len(oracle.lines) == last
    endings = [one.get("ending") for one in read_info(metrics)["attempts"]]
    said = {"TERM": "stopped by SIGTERM", "INT": "stopped by SIGINT", "KILL": None}  # nobody records a SIGKILL
    assert endings == [*(said[way] for way in ways.split()), f"stopped (--exit-interval {last})"]


def test_a_mistake_is_told_once_and_every_rank_exits_with_status_2(rank_parent: RankParent, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    flags = ["--preset", "tiny", "--mock-data", "--vocab-size", "99", "--load", str(tmp_path)]
    forked, log = Forked(rank_parent), tmp_path.parent / "mistake.log"
    forked.start(flags, 2, ROOT, log)
    assert [rank_parent.statuses([pid], 300.0) for pid in forked.ranks()] == [[2], [2]]
    assert log.read_text().count("is not a checkpoint folder") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
