"""What a Slurm job's script asks of Slurm, its budget; tests/launch/test_slurm.py has a real Slurm."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_moe import slurm

FLAGS = "--preset tiny --mock-data --vocab-size 99 --save runs/a/checkpoints".split()
OPTIONS = ["--time", "1:00:00"]

STAND_IN = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
open({record!r}, "a").write(json.dumps([name, *sys.argv[1:]]) + "\\n")
if name == "srun":
    save = "runs/a/checkpoints/latest_checkpointed_iteration.txt"
    if os.environ.get("SAVES"):
        os.makedirs(os.path.dirname(save), exist_ok=True)
        open(save, "w").write(os.environ["SAVES"])
    sys.exit(int(os.environ.get("STATUS", "0")))
if name == "scontrol" and sys.argv[1:3] == ["show", "node"]:
    print("NodeName=node1 NodeAddr=10.0.0.1 NodeHostName=node1")
elif name == "scontrol" and sys.argv[1:3] == ["show", "hostnames"]:
    print("node1\\nnode2")
"""


def write(folder: Path, *options: str, flags: Sequence[str] = FLAGS) -> Path:
    assert slurm.main([*OPTIONS, *options, "--script", "job.sbatch", "--", *flags]) == 0
    return folder / "job.sbatch"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of a user's, with stand-ins for the programs that a script calls."""
    monkeypatch.chdir(tmp_path)
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name in ("srun", "scontrol", "scancel", "sinfo", "megatron-moe"):
        (stand_ins / name).write_text(STAND_IN.format(python=sys.executable, record=str(tmp_path / "record")))
        (stand_ins / name).chmod(0o755)
    return tmp_path


def run(script: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script as Slurm does on the first of two nodes."""
    folder = script.parent
    environment = {
        "PATH": f"{folder / 'bin'}:{os.defpath}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "debug", **more,
    }  # fmt: skip
    return subprocess.run(["bash", str(script)], env=environment, cwd=folder, capture_output=True, text=True)


def called(folder: Path, program: str) -> list[list[str]]:
    lines = map(json.loads, (folder / "record").read_text().splitlines())
    return [words[1:] for words in lines if words[0] == program]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("2-12", 216000), ("1-0:30", 88200), ("1-1:01:01", 90061)],
)
def test_a_time_limit_is_read_as_sbatch_does(limit, seconds):
    assert slurm._seconds(limit) == seconds


def test_srun_gets_the_cores_of_the_job_and_their_binding(folder):
    script = write(folder, "--nodes", "2", "--cpus-per-task", "8", "--cpu-bind", "cores")
    assert "#SBATCH --cpus-per-task=8" in script.read_text()
    done = run(script, SLURM_CPUS_PER_TASK="8")
    assert done.returncode == 0, done.stderr
    preflight, training = called(folder, "srun")
    for words in (preflight, training):
        own = words[: words.index("bash")]
        assert own[own.index("--cpus-per-task") + 1] == "8" and own[own.index("--cpu-bind") + 1] == "cores"
    assert "preflight" in preflight and "train" not in preflight and "train" in training
    # Both get the flags of the run.
    assert preflight[-len(FLAGS) - 3 :] == training[-len(FLAGS) - 3 :]
    assert training[-3:] == ["--exit-signal-handler", "--load", "runs/a/checkpoints"]


def test_a_job_without_cores_gives_srun_none(folder):
    done = run(write(folder, "--no-preflight"))
    assert done.returncode == 0, done.stderr
    (words,) = called(folder, "srun")
    assert "--cpus-per-task" not in words and "--cpu-bind" not in words


def test_pyxis_starts_the_ranks_in_its_container(folder):
    flags = [*FLAGS[:-1], str(folder / "elsewhere/checkpoints")]
    script = write(folder, "--container", "pyxis", "--image", "a.sqsh", "--mounts", "/data", "/tok", flags=flags)
    assert run(script).returncode == 0
    for words in called(folder, "srun"):
        own = words[: words.index("bash")]
        assert own[own.index("--container-image") + 1] == "a.sqsh"
        assert own[own.index("--container-mounts") + 1] == f"{folder},{folder / 'elsewhere'},/data,/tok"
        assert {"torchrun", "megatron-moe"} & set(words[words.index("bash") :])


def test_apptainer_starts_the_ranks_in_its_container(folder):
    script = write(folder, "--container", "apptainer", "--image", "a.sif", "--mounts", "/data", "--no-preflight")
    assert run(script).returncode == 0
    (words,) = called(folder, "srun")
    at = words.index("apptainer")
    nv = ["--nv"] if Path("/dev/nvidiactl").exists() else []
    command = ["apptainer", "exec", *nv, "--bind", f"{folder},/data", "--pwd", str(folder), "a.sif", "megatron-moe"]
    assert words[at : at + len(command)] == command


def test_what_is_in_a_container_is_not_looked_for_here(folder):
    flags = ["--preset", "tiny", "--data-path", "/data/text", "--tokenizer-type", "ByteTokenizer", "--save", "runs/a/c"]
    write(folder, "--container", "pyxis", "--image", "a.sqsh", flags=flags)
    assert slurm.main([*OPTIONS, "--", *flags]) == 2


def test_the_settings_of_the_network_reach_the_ranks(folder):
    script = write(folder, "--env", "NCCL_SOCKET_IFNAME=eth0,ib0", "A=b 'c'", "--no-preflight")
    text = script.read_text()
    assert shlex.split(next(line for line in text.splitlines() if line.startswith("export N"))) == [
        "export", "NCCL_SOCKET_IFNAME=eth0,ib0",
    ]  # fmt: skip
    assert shlex.split(next(line for line in text.splitlines() if line.startswith("export A"))) == ["export", "A=b 'c'"]


def test_no_word_of_the_command_line_is_run(folder):
    words = [";touch planted;", "a' ;touch planted; '", "(touch planted)"]
    flags = [*FLAGS[:-1], f"runs/{words[0]}/c"]
    script = write(folder, "--no-preflight", "--env", f"A={words[1]}", "--cpu-bind", words[2], flags=flags)
    done = run(script)
    assert done.returncode == 0 and not (folder / "planted").exists(), done.stderr
    (srun,) = called(folder, "srun")
    assert srun[srun.index("--cpu-bind") + 1] == words[2] and srun[srun.index("--save") + 1] == flags[-1]


def test_the_log_is_in_the_folder_of_the_run(folder):
    script = write(folder, flags=[*FLAGS[:-1], "runs/50% a/checkpoints"])
    assert "#SBATCH --output='runs/50%% a/%x-%j.log'" in script.read_text().splitlines()
    assert (folder / "runs/50% a").is_dir()


def test_the_budget_counts_attempts_in_a_row_without_a_newer_checkpoint(folder):
    script = write(folder, "--nodes", "2", "--no-preflight", "--max-restarts", "1")
    for saves in ("", "5", "5", "7", "7"):
        done = run(script, STATUS="137", SAVES=saves)
        assert done.returncode == 0 and "back into the queue" in done.stdout, done.stdout
    assert len(called(folder, "scontrol")) and ["requeue", "4711"] in called(folder, "scontrol")
    done = run(script, STATUS="137", SAVES="7")
    assert done.returncode == 1 and "gives up: 2 attempts" in done.stdout, done.stdout
    # Whoever starts it again has a whole budget.
    assert run(script, STATUS="137", SAVES="7").returncode == 0


def test_an_attempt_that_ended_without_a_word_counts(folder):
    script = write(folder, "--nodes", "2", "--no-preflight", "--max-restarts", "0")
    (folder / "runs/a/slurm-4711.state").write_text(
        "attempt=1\nfruitless=0\nfrom=0\nnodes=node1\nended=running\nfailed=\n"
    )
    done = run(script)
    assert done.returncode == 1 and "without a word" in done.stdout and not called(folder, "srun")
