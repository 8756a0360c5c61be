"""A rank that dies or hangs in a real run: the job ends in time, names it, leaves nothing behind and goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_moe.report.jsonl import read_events
from megatron_moe.report.run_info import read_info
from tests.helpers import broken_jobs, kills
from tests.helpers.ranks import RankParent

ITERATIONS, TIMEOUT = 8, 10.0
CASES = [
    ("KILL", "backward", 1),
    ("exception", "save", 0),
    ("STOP", "eval", 1),
    ("skipped", "forward", 1),
]


@pytest.fixture(scope="module")
def launcher(rank_parent: RankParent) -> broken_jobs.Breaking:
    return broken_jobs.Breaking(rank_parent)


@pytest.mark.slow
def test_broken_jobs_name_the_rank_and_go_on_to_the_bit(launcher: broken_jobs.Breaking, tmp_path: Path) -> None:
    world_size, flags = kills.LAYOUTS["EP2"]
    argv = kills.flags(ITERATIONS, *flags, eval_interval=4)
    hasty = ["--save-interval", "2", "--distributed-timeout-minutes", str(TIMEOUT / 60)]
    oracle = kills.undisturbed_job(launcher, tmp_path / "oracle", argv, world_size)
    for kind, phase, rank in CASES:
        folder = tmp_path / f"{kind} in {phase}"
        # The other rank's collective fails when its partner dies; it is asked for its status while it closes files.
        slow = 5.0 if kind == "KILL" else 0.0
        fault = {"kind": kind, "phase": phase, "rank": rank, "iteration": 4, "slow_close": slow}
        broken = broken_jobs.break_job(launcher, folder, [*argv, *hasty], world_size, fault)
        limit = 20.0 if kind in broken_jobs.DEATHS else TIMEOUT + 35
        assert broken.defects(kind, rank, limit) == [], broken.said
        assert "rank 0: " in broken.cause() and "reporter.py" not in broken.cause()
        stacks = sorted(path.name for path in (folder / "checkpoints" / "faults").glob("stacks_rank_*.txt"))
        assert len(stacks) == (1 if kind == "KILL" else 2)
        (killed,) = read_info(folder / "metrics.jsonl")["attempts"]
        assert killed["ending"].startswith("failed: ") and killed["end_iteration"] in (3, 4)
        kinds = [event.kind for event in read_events(folder / "metrics.jsonl")]
        assert kinds[-1] == "end" and kinds.count("fault") == 1
        job = kills.undisturbed_job(launcher, folder, [*argv, "--save-interval", "2"], world_size)
        endings = [one.get("ending") for one in read_info(folder / "metrics.jsonl")["attempts"]]
        assert endings == [killed["ending"], "finished"]
        assert kills.differences(job, oracle, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "rank"), [("forward", 1), ("backward", 0)])
def test_a_rank_that_fails_while_others_gather_weights_ends_them(
    launcher: broken_jobs.Breaking, tmp_path: Path, phase: str, rank: int
) -> None:
    argv = kills.flags(4, "--data-parallel-sharding-strategy", "optim_grads_params")
    fault = {"kind": "exception", "phase": phase, "rank": rank, "iteration": 2, "slow_close": 0.0}
    broken = broken_jobs.break_job(launcher, tmp_path / "job", argv, 2, fault)
    assert broken.defects("exception", rank, 20.0) == [], broken.said
    assert "a fault of the test" in broken.cause() and f"rank {1 - rank}: waiting in" in broken.cause()


@pytest.mark.slow
def test_a_signal_saves_and_the_run_goes_on_to_the_bit(launcher: broken_jobs.Breaking, tmp_path: Path) -> None:
    world_size, flags = kills.LAYOUTS["EP2"]
    argv = kills.flags(15, *flags, "--exit-signal-handler")
    result = broken_jobs.signalled_jobs(launcher, tmp_path, argv, world_size, random.Random(3), trials=3)
    assert result["found"] == [] and result["trials"] == 3 and result["longest_seconds"] < 30
