"""Jobs of `megatron-moe slurm` on a real Slurm: what ends an attempt, what is requeued, and that no bit of it is lost.

The cluster is of this module: three nodes that are processes of this machine. test_slurm_script.py runs the script
without Slurm. Where Slurm is not installed the module is skipped, and says what is missing.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_moe_tools import slurm
from tests.docs import guides
from tests.helpers import kills
from tests.helpers.launchers import Forked
from tests.helpers.ranks import ROOT, RankParent
from tests.launch import slurm_cluster
from tests.launch.slurm_cluster import Cluster

ABSENT = slurm_cluster.missing()
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=f"no Slurm here: {ABSENT}")

MODEL = "--preset tiny --mock-data --vocab-size 256 --deterministic-mode --eval-iters 0 --log-interval 1000000".split()
TRAINING = [*MODEL, "--train-iters", "1000000", "--save-interval", "5"]
FILES = ["--save", "runs/checkpoints", "--metrics-file", "runs/metrics.jsonl"]
# All nodes would bind their ranks to this machine's first core.
OPTIONS = "--time 30 --save-seconds 20 --no-preflight --output runs/job.log --cpu-bind none".split()
SHORTEST = "tests/launch/test_slurm.py::test_a_job_whose_rank_is_killed_goes_on_to_the_bit"
by_test_all = pytest.mark.test_all(instead=SHORTEST)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def environment(folder: Path) -> dict[str, str]:
    """A user's shell with this Python's environment active and the clone on its path."""
    return {
        "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder),
        "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip


def losses(metrics: Path) -> dict[int, str]:
    """Iteration -> the bits of its loss."""
    return {row["iteration"]: row["loss_hex"] for row in map(json.loads, kills.raw_lines(metrics))}


@dataclass
class Job:
    """A job that was written by the program and submitted, with its log and its run's files."""

    cluster: Cluster
    folder: Path
    number: int

    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("runs/*.log"))

    def steps(self) -> dict[int, str]:
        return losses(self.folder / "runs/metrics.jsonl")

    def attempts(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads((self.folder / "runs/metrics.run.json").read_text())["attempts"]
        return found

    def until(self, holds: Callable[[], object], what: str) -> None:
        try:
            self.cluster.until(holds, what, self.number)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def begins(self, attempt: int) -> tuple[str, int]:
        """Wait until an attempt has begun; return its nodes, and the step that it goes on from."""
        line = re.compile(rf"attempt {attempt} on (\S+?); (?:.*goes on from step (\d+)|.*no checkpoint yet)")
        self.until(lambda: self.cluster.hurry(self.number) or line.search(self.log()), f"attempt {attempt}")
        found = line.search(self.log())
        assert found
        return found[1], int(found[2] or 0)

    def trains(self, attempt: int) -> tuple[str, int]:
        """Wait until an attempt has begun and has saved; return as `begins` does."""
        nodes, step = self.begins(attempt)
        began = self.folder / "runs/metrics.run.json"
        self.until(lambda: began.exists() and len(self.attempts()) == attempt, "the first step")
        self.until(lambda: max(self.steps(), default=0) > step + 6, "some steps")
        return nodes, step

    def requeued(self, times: int) -> None:
        self.until(lambda: int(self.cluster.job(self.number)["Restarts"]) == times, f"requeue {times}")

    def rank_on(self, node: str) -> psutil.Process:
        def ranks() -> list[psutil.Process]:
            return self.cluster.processes(having="RANK", SLURM_JOB_ID=str(self.number), SLURMD_NODENAME=node)

        self.until(ranks, f"a rank on {node}")
        return ranks()[0]

    def cancelled(self) -> None:
        self.cluster.run("scancel", str(self.number))
        assert self.cluster.ended(self.number)["JobState"] == "CANCELLED", self.log()


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Write job.sbatch with more options, and submit it as a user does."""
    monkeypatch.chdir(tmp_path)

    def write_and_submit(*options: str) -> Job:
        assert slurm.main([*OPTIONS, *options, "--script", "job.sbatch", "--", *TRAINING, *FILES]) == 0
        return Job(cluster, tmp_path, cluster.submit("job.sbatch", cwd=tmp_path, **environment(tmp_path)))

    return write_and_submit


def assert_same_bits(job: Job, last_start: int, rank_parent: RankParent) -> None:
    """The steps of all attempts, and some after the last start, are those of two ranks that nothing interrupts."""
    launcher, log = Forked(rank_parent), job.folder / "reference.log"
    argv = [*MODEL, "--train-iters", str(last_start + 4), "--metrics-file", "reference.jsonl"]
    launcher.start(argv, 2, job.folder, log)
    assert launcher.wait(slurm_cluster.PATIENCE) == 0, log.read_text()
    expected, steps = losses(job.folder / "reference.jsonl"), job.steps()
    assert sorted(steps)[: last_start + 4] == sorted(expected)
    assert {number: steps[number] for number in expected} == expected


def test_a_job_whose_rank_is_killed_goes_on_to_the_bit(submit, rank_parent):
    job = submit("--nodes", "2", "--max-restarts", "0")  # the first attempt leaves a newer checkpoint
    assert job.trains(1) == ("node[1-2]", 0)
    job.rank_on("node2").kill()
    job.requeued(1)
    assert "was killed by SIGKILL" in job.log() and "nodes that failed so far: node2" in job.log()
    _, second = job.trains(2)
    assert second > 0 and second % 5 == 0
    job.cancelled()
    attempts = job.attempts()
    assert [attempt["start_iteration"] for attempt in attempts] == [0, second]
    assert "ending" not in attempts[0] or str(attempts[0]["ending"]).startswith("failed: ")
    assert attempts[1]["ending"] == "stopped by SIGTERM"
    assert_same_bits(job, second, rank_parent)


@by_test_all
def test_a_job_saves_at_its_time_limit_when_it_is_preempted_and_when_it_is_requeued(cluster, submit, tmp_path):
    job = submit("--max-restarts", "0")
    starts = [job.trains(1)[1]]
    minutes = 2 + int(cluster.run("squeue", "-h", "-j", str(job.number), "-O", "TimeUsed").split(":")[-2])
    cluster.run("scontrol", "update", f"jobid={job.number}", f"timelimit={minutes}")
    job.requeued(1)
    cluster.run("scontrol", "update", f"jobid={job.number}", "timelimit=60")
    assert "time is almost up" in job.log()
    starts.append(job.trains(2)[1])
    urgent = cluster.submit(
        "--partition", "urgent", "--nodes", "3", "--output", "/dev/null", "--wrap", "true", cwd=tmp_path
    )
    job.requeued(2)
    assert cluster.ended(urgent)["JobState"] == "COMPLETED"
    starts.append(job.trains(3)[1])
    cluster.run("scontrol", "requeue", str(job.number))
    starts.append(job.trains(4)[1])
    job.cancelled()
    attempts = job.attempts()
    assert [attempt["ending"] for attempt in attempts] == ["stopped by SIGUSR1", *["stopped by SIGTERM"] * 3]
    assert [attempt["end_iteration"] for attempt in attempts[:3]] == starts[1:]  # not at its interval
    assert "gives up" not in job.log()


@by_test_all
def test_lost_nodes_are_gone_on_from_to_the_bit(cluster, submit, rank_parent):
    job = submit("--nodes", "2", "--max-restarts", "0")
    assert job.trains(1) == ("node[1-2]", 0)
    cluster.kill_node("node1")  # with the batch script
    try:
        job.requeued(1)
        nodes, second = job.trains(2)
        assert nodes == "node[2-3]" and second > 0 and "without a word" in job.log()
        cluster.kill_node("node3")
        job.requeued(2)
    finally:
        cluster.start_node("node1")
    try:
        nodes, third = job.trains(3)
        assert nodes == "node[1-2]" and third > second
        job.cancelled()
    finally:
        cluster.start_node("node3")
    assert_same_bits(job, third, rank_parent)


@by_test_all
def test_a_node_that_fails_twice_is_left_out_and_the_budget_ends(cluster, submit):
    job = submit("--max-restarts", "3", "--exclude", "node3")
    for attempt in (1, 2):
        assert job.begins(attempt) == ("node1", 0)
        job.rank_on("node1").kill()
        job.requeued(attempt)
    assert job.begins(3) == ("node2", 0)
    assert cluster.job(job.number)["ExcNodeList"] == "node1,node3"
    job.rank_on("node2").kill()
    job.requeued(3)
    assert job.begins(4) == ("node2", 0)
    job.rank_on("node2").kill()
    ended = cluster.ended(job.number)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "3"), job.log()
    assert "gives up: 4 attempts" in job.log()


@by_test_all
def test_the_example_runs_from_a_clone_as_it_is(cluster, tmp_path):
    for name in ("examples", "megatron_moe", "megatron_moe_tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".venv").symlink_to(sys.prefix)  # as `make setup` leaves it
    fresh = {**environment(tmp_path), "VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PYTHONPATH": ""}
    number = cluster.submit("examples/slurm/cpu.sbatch", cwd=tmp_path, **fresh)
    ended = cluster.ended(number)
    log = (tmp_path / f"moe-cpu-{number}.log").read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert re.search(r"(PASS|WARN): \d+ pass, \d+ warn, 0 fail", log) and "done: 100 iterations" in log, log
    assert json.loads((tmp_path / "runs/slurm-cpu/summary.json").read_text())["iterations"] == 100


def typed_in(cluster: Cluster, folder: Path, commands: str, shell: dict[str, str], number: Path | None) -> str:
    """Return what commands print; the job whose number is in the file does not wait to start again."""
    with open(folder / "typed.log", "w+") as output:
        words = ["bash", "-euo", "pipefail", "-c", commands]
        typed = subprocess.Popen(words, cwd=folder, env=shell, stdout=output, stderr=output)

        def is_done() -> bool:
            if number:
                cluster.hurry(int(number.read_text()))
            return typed.poll() is not None

        cluster.until(is_done, commands)
        output.seek(0)
        printed = output.read()
    assert typed.returncode == 0, printed
    return printed


@by_test_all
def test_the_guide_as_written(cluster, tmp_path):
    page = guides.substituted(
        (guides.DOCS / "start" / "slurm.md").read_text(),
        {
            "--script job.sbatch": "--cpu-bind none --no-preflight --script job.sbatch",
            # All nodes are one machine here: the rank is named by the test, and no other run's.
            "pkill -KILL -f '[p]ython -u -c .*megatron_moe'": "bash -c 'kill -KILL $(cat rank)'",
        },
    )
    programs = f"{Path(sys.prefix) / 'bin'}:{cluster.environment['PATH']}"
    shell = cluster.inherited(**{**environment(tmp_path), "PATH": programs, "OMP_NUM_THREADS": "1"})
    steps = guides.steps(page)
    assert len(steps) == 4
    number = tmp_path / "job"
    for index, step in enumerate(steps):
        if index == 1:
            job = Job(cluster, tmp_path, int(number.read_text()))
            (tmp_path / "rank").write_text(str(job.rank_on("node2").pid))
        printed = typed_in(cluster, tmp_path, step.commands, shell, number if index else None)
        assert guides.missing(step.shown, printed) == [], printed
