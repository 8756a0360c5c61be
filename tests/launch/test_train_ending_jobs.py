"""A rank of a real run dies, hangs or gets a signal: the job ends, says why, leaves nothing behind and goes on."""

import pytest

from megatron_moe.report.jsonl import read_events
from megatron_moe.report.run_info import read_info
from tests.helpers import kills
from tests.helpers.ranks import RankParent
from tests.helpers.rows import rows
from tests.launch import broken_jobs

ITERATIONS, TIMEOUT, PATIENCE = 8, 10.0, 600.0
FAULTS = [
    # kind, phase, rank, iteration: each job is started again in the folder of the one before
    ("KILL", "backward", 1, 3),
    ("exception", "save", 0, 4),
    ("STOP", "eval", 1, 4),
    ("skipped", "forward", 1, 5),
]


@pytest.fixture(scope="module")
def launcher(rank_parent: RankParent) -> broken_jobs.Breaking:
    return broken_jobs.Breaking(rank_parent)


def test_broken_jobs_name_the_rank_and_go_on_to_the_bit(launcher, tmp_path):
    world_size, flags = kills.LAYOUTS["EP2"]
    argv = kills.flags(ITERATIONS, *flags, eval_interval=4)
    oracle = kills.undisturbed_job(launcher, tmp_path / "oracle", argv, world_size)
    argv += ["--save-interval", "2"]
    hasty = ["--distributed-timeout-minutes", str(TIMEOUT / 60)]
    folder, endings = tmp_path / "job", []
    for kind, phase, rank, iteration in FAULTS:
        # The other rank's collective fails when its partner dies; it is asked for its status while it closes files.
        slow = 5.0 if kind == "KILL" else 0.0
        fault = {"kind": kind, "phase": phase, "rank": rank, "iteration": iteration, "slow_close": slow}
        broken = broken_jobs.break_job(launcher, folder, [*argv, *hasty], world_size, fault)
        assert broken.defects(kind, rank, PATIENCE) == [], broken.said
        assert "rank 0: " in broken.cause() and "reporter.py" not in broken.cause()
        stacks = sorted((folder / "checkpoints" / "faults").glob("stacks_rank_*.txt"))
        assert len(stacks) == (1 if kind == "KILL" else 2)
        for path in (*stacks, folder / "log.txt"):
            path.unlink()
        killed = read_info(folder / "metrics.jsonl")["attempts"][-1]
        endings.append(killed["ending"])
        assert endings[-1].startswith("failed: ") and killed["end_iteration"] in (iteration - 1, iteration)
        kinds = [event.kind for event in read_events(folder / "metrics.jsonl")]
        assert kinds[-1] == "end" and kinds.count("fault") == len(endings)

    # A step ends and is saved after a signal to one rank, and a second signal changes nothing.
    for signals, iteration in (("USR1", 5), ("TERM TERM", 7)):
        fault = {"kind": signals, "phase": "forward", "rank": 1, "iteration": iteration}
        stopped = broken_jobs.break_job(launcher, folder, [*argv, "--exit-signal-handler"], world_size, fault)
        assert (stopped.status, stopped.left) == (0, []), stopped.said
        assert len(kills.raw_lines(folder / "metrics.jsonl")) == iteration
        assert max((folder / "checkpoints").glob("iter_*")).name == f"iter_{iteration:07d}"
        assert kills.steps_in(folder / "checkpoints")[1] == []
        endings.append(f"stopped by SIG{signals.split()[0]}")

    job = kills.undisturbed_job(launcher, folder, argv, world_size)
    assert [one["ending"] for one in read_info(folder / "metrics.jsonl")["attempts"]] == [*endings, "finished"]
    assert kills.differences(job, oracle, 2) == []


@pytest.mark.parametrize(("phase", "rank"), rows([("forward", 1), ("backward", 0)], test=[("forward", 1)]))
def test_a_rank_that_fails_while_others_gather_weights_ends_them(launcher, tmp_path, phase, rank):
    argv = kills.flags(4, "--data-parallel-sharding-strategy", "optim_grads_params")
    fault = {"kind": "exception", "phase": phase, "rank": rank, "iteration": 2, "slow_close": 0.0}
    broken = broken_jobs.break_job(launcher, tmp_path / "job", argv, 2, fault)
    assert broken.defects("exception", rank, PATIENCE) == [], broken.said
    assert "a fault of the test" in broken.cause() and f"rank {1 - rank}: waiting in" in broken.cause()
