"""What a Slurm job's script asks of Slurm, and what it makes of an attempt's end; test_slurm.py has a real Slurm."""

import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_moe_tools import slurm

FLAGS = "--preset tiny --mock-data --vocab-size 99 --save runs/a/checkpoints".split()
OPTIONS = ["--time", "1:00:00"]

STAND_IN = r"""#!/bin/bash
{ flock 9 && printf '%s\x1f' "${0##*/}" "$@" $'\x1e' >&9; } 9>>record # bash writes what has lines line by line
case "${0##*/} $*" in
srun*) # the ranks of two nodes
  until [[ $1 == bash ]]; do shift; done
  for node in 1 2; do
    SLURM_NODEID=$((node - 1)) SLURMD_NODENAME=node$node "$@" &
    started+=($!) # `jobs` may have forgotten one that has ended
  done
  worst=0
  for job in "${started[@]}"; do
    wait "$job"
    status=$?
    if ((status > worst)); then worst=$status; fi
  done
  exit "$worst" ;;
megatron-moe* | apptainer*) # a node's launcher: where TRAINS names it, it ends when it is asked to
  save=runs/a/checkpoints/latest_checkpointed_iteration.txt
  if [[ ${SAVES-} ]]; then mkdir -p "${save%/*}" && echo "$SAVES" >$save; fi
  if [[ ${TRAINS-} == *$SLURMD_NODENAME* ]]; then
    touch started
    until [[ -e asked ]]; do /bin/sleep 0.02; done
  fi
  status=STATUS_$SLURMD_NODENAME
  exit "${!status:-0}" ;;
sleep*) exec /bin/sleep 0.02 ;;
scancel*) touch asked ;;
"scontrol show node"*) echo "NodeName=node1 NodeAddr=10.0.0.1 NodeHostName=node1" ;;
"scontrol show hostnames node[1-2]") printf 'node1\nnode2\n' ;;
"scontrol show hostnames"*) echo "$3" ;;
*"-t down"*) echo "${DOWN-}" ;;
sinfo*) for node in $UP; do echo "$node"; done ;;
esac
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
    for name in ("srun", "scontrol", "scancel", "sinfo", "megatron-moe", "torchrun", "apptainer", "sleep"):
        (stand_ins / name).write_text(STAND_IN)
        (stand_ins / name).chmod(0o755)
    return tmp_path


def started(script: Path, **more: str) -> subprocess.Popen[str]:
    """Start a script as Slurm does on the first of two nodes."""
    folder = script.parent
    environment = {
        "PATH": f"{folder / 'bin'}:{os.defpath}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "debug",
        "UP": "node1 node2 node3 node4", **more,
    }  # fmt: skip
    (folder / "record").write_text("")
    pipe = subprocess.PIPE
    return subprocess.Popen(["bash", str(script)], env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def run(script: Path, **more: str) -> subprocess.CompletedProcess[str]:
    process = started(script, **more)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def called(folder: Path, program: str) -> list[list[str]]:
    """Return the words of each call of a program since the script was started."""
    calls = [call.split("\x1f")[:-1] for call in (folder / "record").read_text().split("\x1e\x1f")[:-1]]
    return [words[1:] for words in calls if words[0] == program]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("2:00:00", 7200),
        ("2-12", 216000),
        ("1-0:30", 88200),
        ("1-1:01:01", 90061),
        ("UNLIMITED", math.inf),
    ],
)
def test_a_time_limit_is_read_as_sbatch_does(limit, seconds):
    assert slurm._seconds(limit) == seconds


def test_srun_gets_the_cores_of_the_job_and_their_binding(folder):
    assert run(write(folder, "--no-preflight")).returncode == 0
    (words,) = called(folder, "srun")
    assert "--cpus-per-task" not in words and "--cpu-bind" not in words
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


def test_pyxis_starts_the_ranks_in_its_container(folder):
    flags = [*FLAGS[:-1], str(folder / "elsewhere/checkpoints")]
    script = write(folder, "--container", "pyxis", "--image", "a.sqsh", "--mounts", "/data", "/tok", flags=flags)
    assert run(script).returncode == 0
    for words in called(folder, "srun"):
        own = words[: words.index("bash")]
        assert own[own.index("--container-image") + 1] == "a.sqsh"
        assert own[own.index("--container-mounts") + 1] == f"{folder},{folder / 'elsewhere'},/data,/tok"
        assert {"torchrun", "megatron-moe"} & set(words[words.index("bash") :])
    # What is in a container is not looked for here.
    flags = [*FLAGS[:2], "--data-path", "/data/text", "--tokenizer-type", "ByteTokenizer", *FLAGS[-2:]]
    write(folder, "--container", "pyxis", "--image", "a.sqsh", flags=flags)
    assert slurm.main([*OPTIONS, "--", *flags]) == 2


def test_apptainer_starts_the_ranks_in_its_container(folder):
    script = write(folder, "--container", "apptainer", "--image", "a.sif", "--mounts", "/data", "--no-preflight")
    assert run(script).returncode == 0
    (words,) = called(folder, "srun")
    at = words.index("apptainer")
    nv = ["--nv"] if Path("/dev/nvidiactl").exists() else []
    command = ["apptainer", "exec", *nv, "--bind", f"{folder},/data", "--pwd", str(folder), "a.sif", "megatron-moe"]
    assert words[at : at + len(command)] == command


def test_no_word_of_the_command_line_is_run_and_settings_reach_the_ranks(folder):
    words = [";touch planted;", "a' ;touch planted; '", "(touch planted)"]
    flags = [*FLAGS[:-1], f"runs/{words[0]}/c"]
    settings = ["NCCL_SOCKET_IFNAME=eth0,ib0", f"A={words[1]}"]
    script = write(folder, "--no-preflight", "--env", *settings, "--cpu-bind", words[2], flags=flags)
    exported = [
        shlex.split(line) for line in script.read_text().splitlines() if line.startswith(("export N", "export A"))
    ]
    assert exported == [["export", setting] for setting in settings]
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
        done = run(script, STATUS_node1="1", SAVES=saves)
        assert done.returncode == 0 and "back into the queue: the training ended with status 1" in done.stdout
        assert ["requeue", "4711"] in called(folder, "scontrol")
    done = run(script, STATUS_node1="1", SAVES="7")
    assert done.returncode == 1 and "gives up: 2 attempts" in done.stdout, done.stdout
    assert ["requeue", "4711"] not in called(folder, "scontrol")
    # Whoever starts it again has a whole budget.
    assert run(script, STATUS_node1="1", SAVES="7").returncode == 0


@pytest.mark.parametrize(
    ("ended", "count"), [("running", "without a word"), ("Slurm ended it (cancelled)", "Slurm ended it")]
)
def test_an_attempt_that_slurm_ended_counts_and_a_node_that_is_down_has_failed(folder, ended, count):
    script = write(folder, "--nodes", "2", "--no-preflight", "--max-restarts", "0")
    state = folder / "runs/a/slurm-4711.state"
    state.write_text(f"attempt=1\nfruitless=0\nfrom=0\nnodes=node1\nended={ended}\nfailed=\n")
    done = run(script, DOWN="node1")
    assert done.returncode == 1 and count in done.stdout and not called(folder, "srun")
    assert ("failed=node1" in state.read_text()) == (ended == "running")


def test_a_mistake_is_not_requeued_and_without_an_environment_the_job_says_what_to_do(folder):
    script = write(folder, "--nodes", "2", "--no-preflight")
    done = run(script, STATUS_node1="1", STATUS_node2="2")
    assert done.returncode == 2 and "is not requeued: the training ended with status 2, a mistake in" in done.stdout
    assert ["requeue", "4711"] not in called(folder, "scontrol")
    (folder / "bin/megatron-moe").unlink()
    done = run(script)
    assert done.returncode == 2 and "no environment with megatron_moe and torch" in done.stdout
    assert not called(folder, "srun")


@pytest.mark.parametrize(
    ("exclude", "up", "says", "left_out"),
    [
        ("", "node1 node2 node3", "leaves out node2, which failed twice", "node2"),
        ("node3", "node1 node2 node3 node4", "leaves out node2, which failed twice", "node2,node3"),
        ("node3", "node1 node2 node3", "but only 1 other nodes of debug are up, of 2 needed", ""),
    ],
)
def test_a_node_that_was_killed_twice_is_left_out_where_others_are_up(folder, exclude, up, says, left_out):
    script = write(folder, "--nodes", "2", "--no-preflight", *(["--exclude", exclude] if exclude else []))
    for status in ("134", "137", "143", "139"):  # of SIGABRT and SIGTERM a node is not blamed
        done = run(script, STATUS_node1="1", STATUS_node2=status, UP=up)
        assert done.returncode == 0 and (says in done.stdout) == (status == "139"), done.stdout
    assert "nodes that failed so far: node2 node2\n" in done.stdout
    updates = [words for words in called(folder, "scontrol") if words[0] == "update"]
    assert updates == ([["update", "jobid=4711", f"excnodelist={left_out}"]] if left_out else [])


def test_nodes_that_go_on_without_one_that_failed_are_ended(folder):
    done = run(write(folder, "--nodes", "2", "--no-preflight"), STATUS_node1="1", TRAINS="node2")
    assert "node1 ended with status 1; the other nodes are ended" in done.stdout
    assert called(folder, "scancel") == [["--signal=INT", "4711"]]
    assert done.returncode == 0 and "back into the queue: the training ended with status 1" in done.stdout


def signalled(script: Path, number: int, ends: bool, **more: str) -> tuple[int, str]:
    """Return status and output of a script that gets a signal while its ranks train; `ends`: Slurm asks these, too."""
    process = started(script, TRAINS="node1 node2", **more)
    while not (script.parent / "started").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    if ends:
        (script.parent / "asked").touch()
    said = process.communicate()[0]
    return process.returncode, said


def test_ranks_are_asked_to_save_before_the_time_limit(folder):
    script = write(folder, "--nodes", "2", "--no-preflight")
    status, said = signalled(script, signal.SIGUSR1, ends=False, SAVES="8", STATUS_node1="138")
    assert ["--signal=USR1", "4711"] in called(folder, "scancel")
    assert status == 0 and "back into the queue: its time was up, newest checkpoint at step 8" in said
    assert ["requeue", "4711"] in called(folder, "scontrol")


def test_a_cancelled_job_is_not_requeued(folder):
    script = write(folder, "--nodes", "2", "--no-preflight")
    status, said = signalled(script, signal.SIGTERM, ends=True, SAVES="8")
    assert status == 143 and "queue" not in said and ["requeue", "4711"] not in called(folder, "scontrol")
    state = (folder / "runs/a/slurm-4711.state").read_text()
    assert "ended=Slurm ended it" in state and "newest checkpoint at step 8" in state
