"""R1, R13 and R17 with their numbers: 280 kills in seven layouts, sync and async, 40 under torchrun, 100 with retention
and 80 that nodes are lost by."""

import random
from pathlib import Path

import pytest

from tests.checkpoint import local_jobs
from tests.helpers import kills
from tests.helpers.launchers import Launcher, Torchrun

ITERATIONS = 30
INTERVAL = 3
WAYS: dict[str, tuple[list[str], int]] = {"sync": ([], INTERVAL), "async": (["--async-save"], 2 * INTERVAL)}
"""How a job is saved -> the flags, and the most iterations that a kill may cost."""


def killed_until(
    launcher: Launcher, folder: Path, layout: str, saving: list[str], number: int, most_lost: int,
    iterations: int = ITERATIONS, horizon: float = 0.6,
) -> dict[str, object]:  # fmt: skip
    """Jobs that are killed until there were `number` kills; what the figures are made of.

    Args:
        horizon: the latest time of a kill, in parts of what an undisturbed job takes.
    """
    world_size, flags = kills.LAYOUTS[layout]
    argv = kills.flags(iterations, *flags)
    folder.mkdir()
    oracle = kills.undisturbed_job(launcher, folder / "oracle", argv, world_size)
    saving = ["--save-interval", str(INTERVAL), *saving]
    whole = kills.undisturbed_job(launcher, folder / "whole", [*argv, *saving], world_size)
    rng = random.Random(f"{layout} {saving}")
    jobs: list[kills.Job] = []
    found = kills.differences(whole, oracle, most_lost)
    while (done := sum(len(job.kills) for job in jobs)) < number:
        job = kills.killed_job(
            launcher, folder / f"killed{len(jobs)}", [*argv, *saving], world_size, rng,
            kills=min(10, number - done), moment=lambda _: launcher.wait(rng.uniform(0.0, horizon * whole.seconds)),
        )  # fmt: skip
        found += kills.differences(job, oracle, most_lost)
        jobs.append(job)
    every = [kill for job in jobs for kill in job.kills]
    return {
        "trials": len(every),
        "failures": len(found),
        "layout": layout,
        "jobs": len(jobs),
        "of_one_rank": sum(kill.rank is not None for kill in every),
        "lines_compared": sum(len(job.lines) for job in jobs),
        "lost_at_most": max(job.lost() for job in jobs),
        "after_a_save": sum(kill.loadable > 0 for kill in every),
        "fewest_loadable": min((kill.loadable for kill in every if kill.resumed > 0), default=None),
        "found": found[:20],
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", kills.LAYOUTS)
def test_kills_of_all_ranks_or_of_one(forked, tmp_path, scaled, figure, layout, way):
    saving, most_lost = WAYS[way]
    result = killed_until(forked, tmp_path / "jobs", layout, saving, scaled(20), most_lost)
    figure("R1", **result, saving=way, launcher="forked")
    assert result["found"] == []


@pytest.mark.parametrize("way", WAYS)
def test_kills_under_torchrun(tmp_path, scaled, figure, way):
    saving, most_lost = WAYS[way]
    # Most of a short job's time is the start of its ranks: a longer one, killed until its end.
    result = killed_until(Torchrun(), tmp_path / "jobs", "EP2", saving, scaled(20), most_lost, 120, 0.95)
    figure("R1", **result, saving=way, launcher="torchrun")
    assert result["found"] == []


@pytest.mark.parametrize("keep", ["1", "2"])
@pytest.mark.parametrize("way", WAYS)
def test_retention_under_kills(forked, tmp_path, scaled, figure, way, keep):
    saving, most_lost = WAYS[way]
    saving = ["--keep-last-k", keep, "--save-retain-interval", "9", *saving]
    result = killed_until(forked, tmp_path / "jobs", "DP2", saving, scaled(25), most_lost)
    figure("R13", **result, saving=way, keep_last_k=int(keep))
    assert result["found"] == []


LOCAL, NODES = 3, [("EP2", 1), ("TP2xEP2", 1), ("TP2xEP2", 2), ("ZeRO 3 x EP2", 1)]
"""Layouts, and ranks of a node."""


@pytest.mark.parametrize(("layout", "per_node"), NODES)
def test_nodes_that_are_lost_with_their_local_steps(rank_parent, tmp_path, scaled, figure, layout, per_node):
    """A node, two, or one and the next, which has its copies: with copies left a kill costs two local intervals."""
    world_size, flags = kills.LAYOUTS[layout]
    rng, number = random.Random(f"{layout} {per_node}"), scaled(20)
    launcher = local_jobs.NodesThatFail(rank_parent, per_node, rng)
    argv = kills.flags(ITERATIONS, *flags)
    saving = ["--save-interval", "10", "--local-save", "local", "--local-save-interval", str(LOCAL)]
    oracle = kills.undisturbed_job(launcher, tmp_path / "oracle", argv, world_size)
    whole = kills.undisturbed_job(launcher, tmp_path / "whole", [*argv, *saving], world_size)
    found, killed, by_copies, lost_at_most = kills.differences(whole, oracle, 0), 0, 0, 0
    while killed < number:
        folder = tmp_path / f"killed{killed}"
        job = kills.killed_job(
            launcher, folder, [*argv, *saving], world_size, rng, kills=min(10, number - killed),
            moment=lambda _: launcher.wait(rng.uniform(0.3, 0.9) * whole.seconds),
        )  # fmt: skip
        found += kills.differences(job, oracle, 10 + 2 * LOCAL)
        for place, kill in enumerate(job.kills):
            gone: set[int] = set()
            for later, lost in zip(job.kills[place:], launcher.lost[place:]):
                if later.resumed == kill.resumed:  # none of them got as far as a step
                    gone |= lost
            if launcher.keeps_all(gone) and kill.resumed >= 0:
                by_copies += 1
                lost_at_most = max(lost_at_most, kill.reached - kill.resumed)
                if kill.reached - kill.resumed > 2 * LOCAL:
                    found.append(f"{kill}, of {gone}")
        killed += len(job.kills)
    about = {"layout": layout, "per_node": per_node, "with_copies_left": by_copies, "lost_at_most": lost_at_most}
    figure("R17", trials=killed, failures=len(found), **about, found=found[:20])
    assert found == []
