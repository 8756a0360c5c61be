"""The launcher with real ranks: how a run is stopped, interrupted and killed, and what is said of it, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.mistakes import LAUNCHER
from tests.training.test_run_torchrun import Launch as Torchrun
from tests.training.test_run_torchrun import gone, steps, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


class Launch(Torchrun):
    """`megatron_moe.train` with two ranks that train until they are ended."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.log, self.metrics = folder / "log", folder / "metrics.jsonl"
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT), TMPDIR=str(folder))
        command = [
            sys.executable, "-m", "megatron_moe.train", "--nproc-per-node", "2", "--preset", "tiny", "--mock-data",
            "--vocab-size", "99", "--train-iters", "1000000", "--log-interval", "1000000",
            "--metrics-file", str(self.metrics), *flags,
        ]  # fmt: skip
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def trains(self) -> list[int]:
        """Wait for the second step; return the ranks' process ids."""
        until(lambda: len(steps(self.metrics)) >= 2, self)
        return self.ranks()


def test_a_rank_that_is_killed_is_told_of_in_one_paragraph(tmp_path):
    launch = Launch(tmp_path)
    ranks = launch.trains()
    by_rank = {Path(f"/proc/{pid}/environ").read_bytes().split(b"\0RANK=")[1][:1]: pid for pid in ranks}
    os.kill(by_rank[b"1"], signal.SIGKILL)
    assert launch.wait() == 128 + signal.SIGKILL, launch.output()
    said = launch.output()
    told = [line for line in said.splitlines() if "SIGKILL" in line]
    assert len(told) == 1 and f"rank 1 on {os.uname().nodename} (process {by_rank[b'1']}) was killed" in told[0], said
    assert "rank 0: " in told[0] and "Traceback" not in said and said.count("is ended") == 1, said
    assert gone(ranks)


def test_sigterm_saves_and_is_a_good_end(tmp_path):
    launch = Launch(tmp_path, "--save", str(tmp_path / "c"), "--exit-signal-handler")
    ranks = launch.trains()
    launch.process.send_signal(signal.SIGTERM)
    assert launch.wait() == 0, launch.output()
    said = launch.output()
    assert "by SIGTERM" in said and "Traceback" not in said and "rank 0 on" not in said, said
    reached = len(steps(launch.metrics))
    assert [step.name for step in (tmp_path / "c").glob("iter_*")] == [f"iter_{reached:07d}"] and gone(ranks)
    assert list(tmp_path.glob("megatron-moe-*")) == []


def test_ctrl_c_ends_all_ranks_with_a_word(tmp_path):
    launch = Launch(tmp_path)
    ranks = launch.trains()
    os.killpg(launch.process.pid, signal.SIGINT)  # as a terminal does
    assert launch.wait() == 130, launch.output()
    said = launch.output()
    assert said.count("interrupted") == 1 and "Traceback" not in said and gone(ranks), said
