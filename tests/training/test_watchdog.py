"""A rank that dies or hangs ends the whole job in time, is named, and leaves nothing behind."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.helpers.ranks import Child, RankParent

TIMEOUT, PATIENCE, WORLD, FAULTY = 8.0, 300.0, 3, 1

# What the verdict says of the faulty rank; the others are told to wait in the collective that it did not come to.
BLAMED = {
    "KILL": "rank 1 is gone: its process ended without a word",
    "exit": "rank 1 is gone: its process ended without a word",
    "exception": "rank 1 failed at",
    "STOP": "rank 1 is stopped (SIGSTOP)",
    "sleep": "rank 1 did not come to the collective: at",
    "interpreter": "rank 1 does not answer",
    "skipped": "the ranks wait in different places: rank 1 waiting in",
}
# What gloo makes of it differs from run to run: data that is mixed up, an abort of the process, or no answer.
UNEVEN = "wrong order"


@dataclass
class Ended:
    """How a job ended: with which statuses by rank, and what it said and wrote."""

    statuses: list[int | None]
    folder: Path

    @property
    def verdict(self) -> str:
        return (self.folder / "verdict.txt").read_text()

    @property
    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def stacks(self) -> list[int]:
        return sorted(int(path.stem.rpartition("_")[2]) for path in self.folder.glob("stacks_rank_*.txt"))


@pytest.fixture(scope="module")
def ended(rank_parent: RankParent, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """One job for each fault, all of them beside each other."""
    jobs: dict[str, dict[str, Any]] = {fault: {"fault": fault} for fault in (*BLAMED, UNEVEN, "shared")}
    jobs["slow"] = {"fault": "STOP", "slow": 2.0}
    jobs["sleep on device"] = {"fault": "sleep", "device": True}
    jobs["kernel on device"] = {"fault": "kernel", "faulty": (0, 1), "world": 2, "device": True}
    usual = {"timeout": TIMEOUT, "world": WORLD, "faulty": (FAULTY,), "device": False, "slow": 0.0}
    stores, pids, folders = [], {}, {}
    for name, job in jobs.items():
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        folders[name] = tmp_path_factory.mktemp("job")
        given = {**usual, "folder": str(folders[name]), "port": stores[-1].port, **job}
        ranks = [{**given, "rank": rank} for rank in range(given["world"])]
        target, log = "tests.training.watched_job:rank_of_job", str(folders[name] / "log")
        pids[name] = rank_parent.fork([Child(target, rank, log) for rank in ranks])
    return {
        name: Ended([rank_parent.statuses([pid], PATIENCE)[0] for pid in pids[name]], folders[name]) for name in jobs
    }


@pytest.mark.parametrize("fault", BLAMED)
def test_the_rank_that_is_to_blame_is_named_and_all_end_in_time(ended, fault):
    job = ended[fault]
    assert BLAMED[fault] in job.verdict, job.said
    assert job.said.count("the job of 3 ranks is ended") == 1
    assert None not in job.statuses and 0 not in job.statuses
    assert job.statuses[0] == job.statuses[2] == 1
    others = job.verdict.partition(BLAMED[fault])[2]
    assert "ranks 0, 2: waiting in all_reduce of float32[8]" in others and "iteration 3" in others
    assert {0, 2} <= set(job.stacks())


def test_ranks_whose_collectives_do_not_fit_end_in_time_and_the_odd_one_is_named(ended):
    job = ended[UNEVEN]
    assert None not in job.statuses and 0 not in job.statuses
    assert re.search(r"is ended(?: \([^)]*\))?: (the ranks [a-z ]*: )?rank 1 ", job.verdict), job.said


def test_the_stacks_of_a_rank_that_hangs_are_shown_too(ended):
    assert ended["sleep"].stacks() == ended["STOP"].stacks() == [0, 1, 2]
    assert "time.sleep(1000)" in (ended["sleep"].folder / "stacks_rank_00001.txt").read_text()
    # No thread of this one runs; its stack is written from C.
    assert "watched_job.py" in ended["interpreter"].said.partition("Current thread")[2]
    assert ended["interpreter"].statuses[1] == -signal.SIGKILL


def test_a_rank_asked_while_it_reads_its_own_error_tells_of_the_error_and_not_of_the_reading(ended):
    """The collective of the others fails after its timeout, which is when the watchdog's own thread wakes too."""
    job = ended["slow"]
    assert BLAMED["STOP"] in job.verdict, job.said
    assert "ranks 0, 2: waiting in all_reduce of float32[8]" in job.verdict and "iteration 3" in job.verdict


def test_an_exception_is_told_with_its_traceback_and_one_that_all_ranks_share_is_no_broken_job(ended):
    assert "ValueError: layer 3 is upside down" in ended["exception"].verdict
    assert "Traceback" in ended["exception"].said
    assert ended["shared"].statuses == [1, 1, 1]
    assert [path.name for path in ended["shared"].folder.iterdir()] == ["log"]


def test_where_the_hosts_wait_for_their_devices_the_flight_recorder_names_the_rank(ended):
    """Under NCCL; here in gloo's collectives, with a host that waits in C for what is queued."""
    asleep = ended["sleep on device"]
    joined = "number 3 of process group 0 (default_pg), in which ranks 0, 2 wait"
    assert f"rank 1 did not join all_reduce of Float[8], {joined}: at " in asleep.verdict, asleep.said
    assert "ranks 0, 2: waiting in item, for the device, at " in asleep.verdict and "iteration 3" in asleep.verdict
    assert asleep.statuses == [1, 1, 1]
    kernel = ended["kernel on device"]
    assert "all ranks wait for their devices: every collective that was begun has ended" in kernel.verdict, kernel.said
    assert kernel.statuses == [1, 1]
