"""A few kills (R1 of docs/internals/reliability.md): nothing of the run may depend on them.

Ranks are forked from one warm process, so that a start costs seconds; `make soak` kills hundreds of times in seven
layouts, and some under torchrun.
"""

import random
import time

import pytest

from megatron_moe.checkpoint.folder import steps
from tests.helpers import kills
from tests.helpers.launchers import Forked
from tests.helpers.rows import rows

ITERATIONS = 9
INTERVAL = 2
BACKGROUND = ("--async-save", "--keep-last-k", "2", "--save-retain-interval", "6")


@pytest.mark.parametrize(
    ("layout", "saving", "lines"),
    # a killed EP2 job that saves at once goes on in launch/test_train_ending_jobs.py too
    rows([("EP2", (), (4,)), ("TP2", BACKGROUND, (2, 5))], test=[("TP2", BACKGROUND, (2, 5))]),
)
def test_a_run_that_is_killed_equals_one_that_is_not(rank_parent, tmp_path, layout, saving, lines):
    """It is killed a moment after its log has that many lines."""
    forked = Forked(rank_parent)
    world_size, flags = kills.LAYOUTS[layout]
    argv = kills.flags(ITERATIONS, *flags)
    oracle = kills.undisturbed_job(forked, tmp_path / "oracle", argv, world_size)
    rng = random.Random(f"{layout} {saving}")

    def moment(number: int) -> int | None:
        status = kills.until_lines(forked, tmp_path / "killed" / "metrics.jsonl", lines[number])
        time.sleep(rng.uniform(0.0, 0.1))
        return status

    argv = [*argv, "--save-interval", str(INTERVAL), *saving]
    job = kills.killed_job(forked, tmp_path / "killed", argv, world_size, rng, kills=len(lines), moment=moment)
    assert len(job.kills) == len(lines)
    assert kills.differences(job, oracle, 2 * INTERVAL if saving else INTERVAL) == []
    assert len(job.lines) >= ITERATIONS
    if saving:
        there = set(steps(job.folder / "checkpoints"))
        # Multiples of six, two of the others, and the one that the last incarnation was loaded from.
        assert there >= {6, 8, 9} and there - {6, 8, 9} <= {job.kills[-1].resumed}
