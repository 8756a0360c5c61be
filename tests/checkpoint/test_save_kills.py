"""Twelve kills at random times (R1 of docs/reliability.md): nothing of the run may depend on them.

Ranks are forked from one warm process, so that a start costs seconds; `make soak` runs two hundred,
in five layouts, and some under torchrun.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_moe.checkpoint.folder import steps
from tests.helpers import kills
from tests.helpers.launchers import Forked
from tests.helpers.ranks import RankParent

ITERATIONS = 21
INTERVAL = 3


@pytest.fixture(scope="module")
def forked(rank_parent: RankParent) -> Forked:
    return Forked(rank_parent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "wanted", "saving", "most_lost"),
    [
        ("EP2", 8, [], INTERVAL),
        ("TP2", 4, ["--async-save", "--keep-last-k", "2", "--save-retain-interval", "9"], 2 * INTERVAL),
    ],
    ids=["EP2 sync", "TP2 async"],
)
def test_a_run_that_is_killed_many_times_equals_one_that_is_not(
    forked: Forked, tmp_path: Path, layout: str, wanted: int, saving: list[str], most_lost: int
) -> None:
    world_size, flags = kills.LAYOUTS[layout]
    argv = kills.flags(ITERATIONS, *flags)
    oracle = kills.undisturbed_job(forked, tmp_path / "oracle", argv, world_size)
    rng = random.Random(f"{layout} {saving}")
    killed = 0
    while killed < wanted:
        job = kills.killed_job(
            forked, tmp_path / f"killed{killed}", [*argv, "--save-interval", str(INTERVAL), *saving], world_size, rng,
            kills=wanted - killed, horizon=1.5 * oracle.seconds,
        )  # fmt: skip
        assert kills.differences(job, oracle, most_lost) == []
        assert len(job.lines) >= ITERATIONS
        if saving:
            there = set(steps(job.folder / "checkpoints"))
            # Multiples of nine, two of the others, and the one that the last incarnation was loaded from, which is not
            # known where the one before was killed ahead of loading.
            loaded = there - {9, 15, 18, 21}
            assert there >= {9, 15, 18, 21} and len(loaded) <= 1
            assert job.resumed() < 0 or loaded <= {job.resumed()}
        killed += len(job.kills)
