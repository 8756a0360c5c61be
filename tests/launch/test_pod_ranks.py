"""The script of `megatron-moe kubernetes` in two pods that are processes of this machine, with real ranks in them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_moe_tools import kubernetes
from tests.helpers.ranks import ROOT
from tests.launch.test_slurm import losses

MODEL = "--preset tiny --mock-data --vocab-size 256 --seq-length 32 --deterministic-mode --eval-iters 0".split()
SAVING = ["--use-distributed-optimizer", "--save-interval", "5", "--log-interval", "1000000"]
AGAIN = 75
by_test_all = pytest.mark.test_all(
    instead="tests/launch/test_pod.py::test_pods_save_when_one_is_asked_to_end_and_all_go_on"
)


@dataclass
class Pods:
    """A job of two pods, each with one rank."""

    folder: Path
    pods: list[subprocess.Popen[str]] = field(default_factory=list)
    attempt: int = 0

    def write(self, *flags: str) -> None:
        """Write the job, with this machine in place of the first pod."""
        save = ["--save", f"{self.folder}/a/checkpoints", "--metrics-file", f"{self.folder}/a/metrics.jsonl"]
        options = ["--nodes", "2", "--image", "moe", "--mounts", f"runs:{self.folder}", "--no-preflight"]
        path = self.folder / "job.yaml"
        assert kubernetes.main([*options, "--script", str(path), "--", *MODEL, *SAVING, *save, *flags]) == 0
        script = next(yaml.safe_load_all(path.read_text()))["data"]["pod.sh"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            script = script.replace("PORT=29400", f"PORT={free.getsockname()[1]}")
        (self.folder / "pod.sh").write_text(script.replace("MEET=moe-ranks-0-0.moe", "MEET=127.0.0.1"))

    def start(self) -> None:
        """Start an attempt as the controllers do."""
        environment = {
            **os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "", "JOBSET_RESTART_ATTEMPT": str(self.attempt), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        self.pods = []
        for index in range(2):
            with open(self.folder / f"log{self.attempt}.{index}", "w") as log:
                pod = subprocess.Popen(
                    ["bash", "pod.sh"], cwd=self.folder, env={**environment, "JOB_COMPLETION_INDEX": str(index)},
                    stdout=log, stderr=log, start_new_session=True, text=True,
                )  # fmt: skip
            self.pods.append(pod)
        self.attempt += 1

    def ends(self) -> list[int]:
        return [pod.wait(300) for pod in self.pods]

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("log*")))

    def rank_of(self, pod: int) -> psutil.Process:
        """Return the rank, which is the launcher's child and has no children of this program's."""
        (launcher,) = psutil.Process(self.pods[pod].pid).children()
        return launcher.children()[0]

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert all(pod.poll() is None for pod in self.pods), self.log()
            time.sleep(0.1)

    def step(self) -> int:
        path = self.folder / "a/checkpoints/latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else 0


@pytest.fixture
def job(tmp_path) -> Iterator[Pods]:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/megatron-moe"
    program.write_text(f'#!/bin/bash\nexec {sys.executable} -m megatron_moe "$@"\n')
    (tmp_path / "bin/torchrun").symlink_to(program)
    program.chmod(0o755)
    pods = Pods(tmp_path)
    yield pods
    for pod in pods.pods:
        if pod.poll() is None:
            os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()


@by_test_all
def test_a_job_whose_rank_is_killed_and_whose_pod_is_evicted_goes_on_to_the_bit(job):
    job.write("--train-iters", "1000000")
    job.start()
    job.until(lambda: job.step() >= 5)
    job.rank_of(1).send_signal(signal.SIGKILL)
    assert job.ends() == [AGAIN, AGAIN], job.log()
    reached = job.step()
    job.start()
    job.until(lambda: job.step() > reached)
    job.pods[1].send_signal(signal.SIGTERM)
    assert job.ends() == [AGAIN, AGAIN], job.log()
    assert "the ranks save" in job.log() and "another node was asked to end" in job.log()
    last = job.step()
    seen = losses(job.folder / "a/metrics.jsonl")
    assert max(seen) == last
    # A job that ends, with the same steps in one attempt.
    undisturbed = Pods(job.folder / "undisturbed")
    undisturbed.folder.mkdir()
    (undisturbed.folder / "bin").symlink_to(job.folder / "bin")
    undisturbed.write("--train-iters", "1000000", "--exit-interval", str(last))
    undisturbed.start()
    assert undisturbed.ends() == [0, 0], undisturbed.log()
    assert losses(undisturbed.folder / "a/metrics.jsonl") == seen


@by_test_all
def test_a_mistake_that_only_the_pods_notice_ends_the_job(job):
    job.write("--train-iters", "10")
    script = job.folder / "pod.sh"
    script.write_text(script.read_text().replace("--mock-data", "--data-path /no/such/data"))
    job.start()
    assert job.ends() == [2, 2], job.log()
