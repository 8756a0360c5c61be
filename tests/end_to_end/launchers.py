"""Two ways to start the ranks of a job, for tests that kill them.

`Torchrun` is what users have; a start costs seconds, for every rank imports torch and the engine. `Forked` forks ranks
from one process that has imported both: real processes of their own that run `pretrain_moe.main`, meet by gloo's TCP
store and are killed by SIGKILL, at a tenth of the cost. This file as a program is that process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]


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
        while any(alive(pid) for pid in ranks):
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


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ---- the parent of forked ranks


def serve() -> None:
    """Answer requests on standard input, one JSON object a line, until it ends; then end all ranks."""
    import torch._dynamo  # noqa: F401  which the first optimizer would load

    import megatron_moe.training.run  # noqa: F401  what a rank would spend seconds on
    import pretrain_moe

    gc.collect()
    gc.freeze()  # or a rank's collector would write into every page that it shares with this process
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
            pids = [fork(pretrain_moe.main, request["start"], rank) for rank in range(request["start"]["world_size"])]
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


def fork(main: Any, job: dict[str, Any], rank: int) -> int:
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
    serve()
