"""Runs that are killed with SIGKILL at random times and started again until they are done. Nothing else may change.

`killed_job` is the trial: it starts a job, kills all of its ranks or one of them at a uniformly random time, starts it
again with the same flags, and so on. `undisturbed_job` and `differences` are oracle E of docs/reliability.md.

Two launchers start the ranks. `Torchrun` is what users have; a start costs seconds, for every rank imports torch and
the engine. `Forked` forks ranks from one process that has imported both: real processes of their own that run
`pretrain_moe.main`, meet by gloo's TCP store and are killed by SIGKILL, at a tenth of the cost.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_moe.checkpoint import manifest
from megatron_moe.checkpoint.folder import step_folder, steps

ROOT = Path(__file__).resolve().parents[2]
CLOCKS = ("seconds", "tokens_per_second", "model_tflops", "mfu", "seconds_left", "memory_bytes")
"""Fields of metrics.jsonl that tell of the machine, not of the training."""

HOW_TO_SAVE = ("save_interval", "async_save", "keep_last_k", "save_retain_interval", "distributed_timeout_minutes")
"""Settings in which the oracle may differ: when and how a run is saved, or ended, must not change what it computes."""
BELONG = {".megatron_moe_checkpoints", "latest_checkpointed_iteration.txt", "faults"}
"""What lies in a folder of checkpoints beside its steps."""

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    # name -> ranks, flags
    "DP2": (2, ["--use-distributed-optimizer"]),
    "TP2": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "EP2": (2, ["--expert-model-parallel-size", "2", "--use-distributed-optimizer"]),
    "PP2": (2, ["--pipeline-model-parallel-size", "2"]),
    "TP2xEP2": (
        4,
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2"],
    ),
}


class Launcher(Protocol):
    """Starts the ranks of one job; its ranks may be killed from outside."""

    def start(self, argv: list[str], world_size: int, folder: Path, log: Path) -> None:
        """Start `pretrain_moe.py` with `argv` in `folder` on that many ranks."""

    def ranks(self) -> list[int]:
        """Process ids of the ranks that were started last."""

    def wait(self, seconds: float) -> int | None:
        """The job's exit status, or None where it goes on after that many seconds."""

    def kill(self, rank: int | None) -> None:
        """SIGKILL to one rank, or to all and what launched them. Returns when no process is left."""


# ---- launchers


class Torchrun:
    """torch.distributed.run in a session of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, argv: list[str], world_size: int, folder: Path, log: Path) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(ROOT / "pretrain_moe.py"), *argv,
        ]  # fmt: skip
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command, cwd=folder, env=_environment(), stdout=output, stderr=output, start_new_session=True
            )

    def ranks(self) -> list[int]:
        assert self._process is not None
        listing = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []

    def wait(self, seconds: float) -> int | None:
        assert self._process is not None
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self, rank: int | None) -> None:
        assert self._process is not None
        ranks = self.ranks()
        if rank is None or rank >= len(ranks):
            for pid in (self._process.pid, *ranks):  # ranks may be in sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[rank], signal.SIGKILL)
        status = self.wait(90)
        assert status is not None, "torchrun did not end within 90 s of a rank's death"
        deadline = time.monotonic() + 10
        while any(_alive(pid) for pid in ranks):
            assert time.monotonic() < deadline, f"ranks outlived torchrun: {ranks}"
            time.sleep(0.02)


class Forked:
    """Ranks forked from one process that has imported torch, the engine and the trainer already."""

    def __init__(self, *program: str) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, *(program or (__file__,))],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._ranks: list[int] = []
        assert self._answer() == {"ready": True}

    def start(self, argv: list[str], world_size: int, folder: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = {"argv": argv, "world_size": world_size, "folder": str(folder), "log": str(log), "port": port}
        self._ranks = self._ask({"start": job})["pids"]

    def ranks(self) -> list[int]:
        return self._ranks

    def wait(self, seconds: float) -> int | None:
        """As torchrun does: when one rank fails the others are ended."""
        statuses = self._ask({"wait": seconds})["statuses"]
        if all(status == 0 for status in statuses):
            return 0
        if all(status in (None, 0) for status in statuses):
            return None
        self._end()
        return 1

    def kill(self, rank: int | None) -> None:
        for pid in self._ranks if rank is None else [self._ranks[rank]]:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so that the id is still its own
        self._end()

    def close(self) -> None:
        """End the ranks and their parent."""
        self._parent.communicate(timeout=20)

    def _end(self) -> None:
        """What torchrun does to the ranks that are left: SIGTERM, and SIGKILL if that does not help."""
        if rank_left := self._left(0.0):
            for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
                for pid in rank_left:
                    os.kill(pid, number)
                if not (rank_left := self._left(seconds)):
                    return
        assert not self._left(0.0), "ranks that SIGKILL does not end"

    def _left(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while True:
            statuses = self._ask({"wait": 0.05})["statuses"]
            left = [pid for pid, status in zip(self._ranks, statuses) if status is None]
            if not left or time.monotonic() >= deadline:
                return left

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(request).encode() + b"\n")
        self._parent.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline()
        assert line, "the parent of the ranks is gone"
        return json.loads(line)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **quiet, "PYTHONPATH": path}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ---- jobs


@dataclass
class Kill:
    """One kill: when, of whom, how far the log was then, where the next incarnation began, and what lay in the folder:
    how many steps that can be loaded, and what is wrong with any that is visible."""

    seconds: float
    rank: int | None
    reached: int
    resumed: int = -1
    loadable: int = 0
    defects: list[str] = field(default_factory=list)


@dataclass
class Job:
    """A job that came to its end: all lines that any incarnation wrote, and its folder."""

    folder: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0

    def final(self) -> list[dict[str, Any]]:
        """The joined log."""
        return [json.loads(line) for line in raw_lines(self.folder / "metrics.jsonl")]

    def step(self) -> Path:
        """The last step."""
        return max((self.folder / "checkpoints").glob("iter_*"))

    def resumed(self) -> int:
        """The step that the last incarnation was loaded from; 0 where it began afresh."""
        return self.kills[-1].resumed if self.kills else 0

    def lost(self) -> int:
        """The most iterations that any kill cost."""
        return max((kill.reached - kill.resumed for kill in self.kills if kill.resumed >= 0), default=0)


def flags(iterations: int, *more: str) -> list[str]:
    """A tiny MoE with sigmoid routing, bias and dropout in bf16 on made-up tokens; all paths are relative."""
    return [
        "--preset", "tiny", "--mock-data", "--tokenizer-type", "ByteTokenizer", "--bf16", "--num-layers", "2",
        "--moe-layer-freq", "[0]+[1]", "--seq-length", "16", "--hidden-size", "32", "--global-batch-size", "2",
        "--micro-batch-size", "1", "--hidden-dropout", "0.1", "--lr-decay-style", "cosine", "--lr-warmup-iters", "3",
        "--eval-interval", "8", "--eval-iters", "1", "--health-interval", "0", "--train-iters", str(iterations),
        "--metrics-file", "metrics.jsonl", "--save", "checkpoints", "--load", "checkpoints", *more,
    ]  # fmt: skip


def undisturbed_job(launcher: Launcher, folder: Path, argv: list[str], world_size: int) -> Job:
    """The oracle: no kill, and one save, at the end."""
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    launcher.start(argv, world_size, folder, folder / "log.txt")
    status = launcher.wait(240)
    assert status == 0, f"status {status}:\n{_tail(folder)}"
    job = Job(folder, seconds=time.monotonic() - began)
    job.lines = job.final()
    return job


def killed_job(
    launcher: Launcher,
    folder: Path,
    argv: list[str],
    world_size: int,
    rng: random.Random,
    *,
    kills: int,
    horizon: float,
) -> Job:
    """Start, kill at a time drawn from [0, horizon] seconds, start again; after `kills` kills the job may end.

    A job that ends before its time is drawn ends with fewer kills.
    """
    folder.mkdir(exist_ok=True)
    job = Job(folder)
    began = time.monotonic()
    written: list[bytes] = []
    while True:
        launcher.start(argv, world_size, folder, folder / "log.txt")
        delay = rng.uniform(0.0, horizon) if len(job.kills) < kills else 240.0
        started = time.monotonic()
        status = launcher.wait(delay)
        if status is None:
            assert len(job.kills) < kills, f"it did not end in {delay} s:\n{_tail(folder)}"
            rank = rng.choice([None, rng.randrange(world_size)])
            launcher.kill(rank)
        lines = raw_lines(folder / "metrics.jsonl")
        fresh = [json.loads(line) for line in lines[_shared(written, lines) :]]
        written = lines
        if fresh:
            for kill in job.kills:
                kill.resumed = fresh[0]["iteration"] - 1 if kill.resumed < 0 else kill.resumed
        job.lines += fresh
        if status is None:
            reached = json.loads(lines[-1])["iteration"] if lines else 0
            job.kills.append(Kill(time.monotonic() - started, rank, reached, -1, *steps_in(folder / "checkpoints")))
            continue
        assert status == 0, f"status {status} after {len(job.kills)} kills:\n{_tail(folder)}"
        job.seconds = time.monotonic() - began
        return job


def differences(job: Job, oracle: Job, interval: int) -> list[str]:
    """Where a killed job differs from the undisturbed one, in words: oracle E.

    Every line that any incarnation wrote against the oracle's line of that iteration, but for clocks; the joined log
    and its evaluations; the last step file by file, so weights, moments, masters, expert_bias, counters, random states
    and the data's position; the work that a kill cost, in iterations at most `interval`; that every step which is
    visible is whole, and that one is there once one was; what lies in the folder at the end.
    """
    found = []
    expected = {line["iteration"]: _without_clocks(line) for line in oracle.lines}
    for line in job.lines:
        found += _fields_that_differ(_without_clocks(line), expected.get(line["iteration"], {}), line["iteration"])
    if [line["iteration"] for line in job.final()] != sorted(expected):
        found.append(f"iterations of the joined log: {[line['iteration'] for line in job.final()]}")
    evaluations = [
        [_without_clocks(json.loads(line)) for line in raw_lines(one.folder / "metrics.eval.jsonl")]
        for one in (job, oracle)
    ]
    if evaluations[0] != evaluations[1]:
        found.append(f"evaluations {evaluations[0]}, not {evaluations[1]}")
    found += _files_that_differ(job.step(), oracle.step())
    if job.lost() > interval:
        found.append(f"a kill cost {job.lost()} iterations, more than {interval}: {job.kills}")
    published = False
    for kill in job.kills:
        found += kill.defects
        if published and not kill.loadable:
            found.append(f"no loadable step was left: {kill}")
        published |= kill.loadable > 0
    left = {path.name for path in (job.folder / "checkpoints").iterdir()} - BELONG
    if left := sorted(name for name in left if not name.startswith("iter_")):
        found.append(f"left in the folder: {left}")
    return found


def steps_in(root: Path) -> tuple[int, list[str]]:
    """How many steps can be loaded, every file hashed, and the defects of visible steps and of the pointer."""
    sound, defects = 0, []
    for number in steps(root):
        step = step_folder(root, number)
        defect = manifest.structure_defect(step) or manifest.content_defect(step, manifest.read(step).files)
        if defect is None:
            sound += 1
        else:
            defects.append(f"{step.name}: it {defect}")
    pointer = root / "latest_checkpointed_iteration.txt"
    if pointer.exists() and not step_folder(root, int(pointer.read_text())).is_dir():
        defects.append(f"the pointer names step {pointer.read_text().strip()}, which is not there")
    return sound, defects


def _files_that_differ(step: Path, other: Path) -> list[str]:
    if step.name != other.name:
        return [f"last step {step.name}, not {other.name}"]
    files, wanted = (json.loads((folder / "manifest.json").read_text())["files"] for folder in (step, other))
    differing = [name for name in sorted(files.keys() | wanted.keys()) if files.get(name) != wanted.get(name)]
    return [f"{step.name}/{name} differs" for name in differing if not _same_content(step / name, other / name)]


def _same_content(file: Path, other: Path) -> bool:
    """For files whose bytes may differ: config.json names the oracle's way of saving, and two of the engine's are no
    function of their content: `.metadata` holds a random id of the save, in common.pt equal strings are one object or
    two."""
    if not (file.exists() and other.exists()):
        return False
    if file.name == ".metadata":
        indices = [pickle.loads(one.read_bytes()) for one in (file, other)]
        for index in indices:
            index.storage_meta.save_id = None
        return indices[0] == indices[1]
    if file.name == "config.json":
        configs = [json.loads(one.read_text()) for one in (file, other)]
        return not [name for name in configs[0] if configs[0][name] != configs[1].get(name) and name not in HOW_TO_SAVE]
    if file.name == "common.pt":
        import torch

        # Of floats that are not NaN repr tells every bit.
        one, two = (repr(torch.load(path, weights_only=True)) for path in (file, other))
        return one == two
    return False


def _fields_that_differ(line: dict[str, Any], wanted: dict[str, Any], iteration: int) -> list[str]:
    names = [name for name in line.keys() | wanted.keys() if line.get(name) != wanted.get(name)]
    return [f"iteration {iteration}: {name} {line.get(name)}, not {wanted.get(name)}" for name in names]


def _without_clocks(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in CLOCKS}


def raw_lines(path: Path) -> list[bytes]:
    """The complete lines of a file; none where there is no file."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _shared(one: list[bytes], other: list[bytes]) -> int:
    """How many lines two files begin with alike; clocks make every line one of a kind."""
    number = 0
    while number < min(len(one), len(other)) and one[number] == other[number]:
        number += 1
    return number


def _tail(folder: Path) -> str:
    return (folder / "log.txt").read_text(errors="replace")[-4000:]


# ---- the parent of forked ranks


def _serve() -> None:
    """Answer requests on standard input, one JSON object a line, until it ends; then end all ranks."""
    import megatron_moe.training.run  # noqa: F401  what a rank would spend seconds on
    import pretrain_moe

    answers = os.dup(1)
    os.dup2(2, 1)
    pids: list[int] = []
    statuses: dict[int, int | None] = {}

    def answer(value: dict[str, Any]) -> None:
        os.write(answers, json.dumps(value).encode() + b"\n")

    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pids = [_fork(pretrain_moe.main, request["start"], rank) for rank in range(request["start"]["world_size"])]
            statuses = dict.fromkeys(pids)
            answer({"pids": pids})
        else:
            _wait(statuses, request["wait"])
            answer({"statuses": list(statuses.values())})
    for pid, status in statuses.items():
        if status is None:
            os.kill(pid, signal.SIGKILL)


def _wait(statuses: dict[int, int | None], seconds: float) -> None:
    """Note who has ended; return when all have, or one has failed, or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        for pid, status in statuses.items():
            if status is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = os.waitstatus_to_exitcode(ended[1])
        if None not in statuses.values() or any(statuses.values()) or time.monotonic() >= deadline:
            return
        time.sleep(0.005)


def _fork(main: Any, job: dict[str, Any], rank: int) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(job["folder"])
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world_size"]), MASTER_ADDR="127.0.0.1",
            LOCAL_WORLD_SIZE=str(job["world_size"]), MASTER_PORT=str(job["port"]),
        )  # fmt: skip
        status = main(job["argv"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
