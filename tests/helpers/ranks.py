"""Start local ranks by forking them from one process that has imported torch, the engine and the trainer.

A fresh interpreter spends three seconds of a processor on these imports before a rank can begin; a fork spends none.
Forked ranks are processes of their own all the same: they meet through gloo, can be killed, and exit with a status.
What they share is the seed of Python's hashes, so that an order that depends on it would not differ between them; the
tests under torchrun and those of the doctor start ranks as interpreters of their own.

`RankParent` is the test's side. This file as a program is the process that forks: it answers requests on its standard
input, one JSON object per line, until the input ends, and then ends all ranks.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Child:
    """What one forked process runs.

    Attributes:
        target: "module:function", imported after the fork; called with `argument`, returns the exit status or None.
        argument: plain data.
        log: the file that standard output and standard error are appended to.
        folder: the working directory.
        environment: variables to set.
        own_session: whether the process leads a session, so that it can be ended with whatever it starts.
    """

    target: str
    argument: Any
    log: str
    folder: str = str(ROOT)
    environment: dict[str, str] = field(default_factory=dict)
    own_session: bool = False


class RankParent:
    """The process that forks ranks, started when it is first needed. `close` ends it and all ranks.

    Args:
        program: what Python runs: this file, alone or by way of a program that prepares the process.
    """

    def __init__(self, program: tuple[str, ...] = ("-m", "tests.helpers.ranks")) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, children: list[Child]) -> list[int]:
        """Return the process ids of the children, which run from now on."""
        test = {"PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", "")}
        given = [asdict(replace(child, environment={**test, **child.environment})) for child in children]
        return self._ask({"fork": given})["pids"]

    def statuses(self, pids: list[int], seconds: float = 0.0) -> list[int | None]:
        """Return each process's exit status, None for one that runs.

        Waits until all have ended, or one has failed, or so many seconds have passed. A process that nobody has asked
        the status of keeps its process id after its end.
        """
        return self._ask({"wait": pids, "seconds": seconds})["statuses"]

    def close(self) -> None:
        """End all ranks and the process that forked them."""
        if self._process is not None:
            self._process.communicate(timeout=300)
            self._process = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, *self._program],
                cwd=ROOT,
                env=rank_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the test session, which then ends this process
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks ranks is gone"
        return json.loads(line)


def rank_environment() -> dict[str, str]:
    """Return the environment of ranks on this machine: no CUDA device, one thread that does not spin, our packages."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **quiet, "PYTHONPATH": path}


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ---- the process that forks


def serve() -> None:
    """Answer requests until standard input ends; then end all ranks."""
    import pytest  # noqa: F401  which the files of cases import
    import torch._dynamo  # noqa: F401  which the first optimizer would load

    import megatron_moe.training.run  # noqa: F401  the engine with it
    import pretrain_moe  # noqa: F401

    gc.collect()
    gc.freeze()  # or a rank's collector would write into every page that it shares with this process
    answers = os.dup(1)
    os.dup2(2, 1)
    statuses: dict[int, int | None] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "fork" in request:
            pids = [_fork(child, answers) for child in request["fork"]]
            statuses.update(dict.fromkeys(pids))
            answer = {"pids": pids}
        else:
            asked = {pid: statuses[pid] for pid in request["wait"]}
            _wait(asked, request["seconds"])
            statuses.update(asked)
            answer = {"statuses": list(asked.values())}
        os.write(answers, json.dumps(answer).encode() + b"\n")
    for pid, status in statuses.items():
        if status is None:
            os.kill(pid, signal.SIGKILL)
    os._exit(0)  # taking torch apart takes seconds


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


def _fork(child: dict[str, Any], answers: int) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.close(answers)  # or the test would not see that this rank's parent is gone
        if child["own_session"]:
            os.setsid()
        log = os.open(child["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(child["folder"])
        os.environ.update(child["environment"])
        module, _, name = child["target"].partition(":")
        status = getattr(importlib.import_module(module), name)(child["argument"]) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
