"""Local gloo ranks that a program starts, gives work to, and ends with itself. No torch in the parent.

A rank (`serve`) reads requests from a pipe, each in JSON: ranks, store, seconds, argument. For each it joins a process
group, calls the function with the argument, and answers in JSON: the function's value, a refusal or a traceback. It
ends when its pipe does, and when the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any

import megatron_moe
from megatron_moe.config.errors import ConfigError

PACKAGE_ROOT = Path(megatron_moe.__file__).resolve().parents[1]
START_SECONDS = 180.0
# After one rank has failed its peers see closed connections at once; this is for those that compute.
GRACE_SECONDS = 10.0
STACK_SECONDS = 1.5
_POLL_SECONDS = 1.0
_RANK = "import sys; sys.path[0] = sys.argv[1]; from megatron_moe_tools.launch.local_ranks import serve; serve()"
"""Code of a rank. Python would search the folder first in which the program was started; the package's goes there."""
_SHOWN_CHARACTERS = 3000
"""Characters of a dead rank's output that a failure shows."""


class RankFailure(Exception):
    """A rank raised, died or did not end. The message says which, with its traceback or last output.

    Attributes:
        refusal: the message of the ConfigError that a rank raised, where that is what happened.
    """

    def __init__(self, message: str, refusal: str | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal


class LocalRanks:
    """Processes that call one function on many ranks, one request after the other; a context manager that ends them.

    They are started at the first request, without a GPU, in sessions of their own: Ctrl-C reaches the caller alone, and
    a rank ends with all that it has started.

    Args:
        function: of a module, not of a script; takes one JSON value and returns one.
        number: of processes; a request may use fewer.
        seconds: a request that takes longer has hung.
        threads: of torch in each rank; default: OMP_NUM_THREADS, or 1 where it is not set.

    Attributes:
        folder: for files that the ranks and the caller exchange; it goes when the ranks do.
    """

    def __init__(
        self, function: Callable[[Any], Any], number: int, *, seconds: float, threads: int | None = None
    ) -> None:
        self._function = f"{function.__module__}:{function.__qualname__}"
        self._number, self._seconds = number, seconds
        self._threads = os.environ.get("OMP_NUM_THREADS", "1") if threads is None else str(threads)
        self.folder = Path(tempfile.mkdtemp(prefix="local-ranks-"))
        self._processes: list[_RankProcess] = []
        self._requests = 0

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, argument: object, ranks: int | None = None) -> list[Any]:
        """Call the function with `argument` on `ranks` ranks, default all, and return their values in order.

        Raises:
            RankFailure: some rank raised, died or hung; all processes are then ended.
        """
        try:
            if not self._processes:
                environment = {
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": self._threads,
                    "OMP_WAIT_POLICY": "passive",
                    "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                }
                for rank in range(self._number):
                    self._processes.append(_RankProcess(rank, self._function, environment, self.folder))
                _collect(self._processes, START_SECONDS)
            self._requests += 1
            called = self._processes[:ranks]
            request = {
                "ranks": len(called),
                "store": str(self.folder / f"store{self._requests}"),
                "seconds": self._seconds,
                "argument": argument,
            }
            for process in called:
                with contextlib.suppress(ConnectionError):  # one that is dead is reported when its answer is awaited
                    process.pipe.send_bytes(json.dumps(request).encode())
            answers = _collect(called, self._seconds)
        except BaseException:
            self._end()  # one that hangs is of no more use; the next request gets new ones
            raise
        return [answers[process.rank]["value"] for process in called]

    def _end(self) -> None:
        for process in self._processes:
            process.end()
        self._processes = []


class _RankProcess:
    """One rank's process, the pipe to it, and its log."""

    def __init__(self, rank: int, function: str, environment: Mapping[str, str], folder: Path) -> None:
        self.rank, self.log = rank, folder / f"rank{rank}.log"
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-W", "ignore", "-c", _RANK, str(PACKAGE_ROOT), function, str(theirs.fileno())]
        with open(self.log, "wb") as log, theirs:
            self.process = subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def last_output(self, start: int = 0) -> str:
        """Return the end of what the process has printed, from byte `start` of its log on."""
        text = self.log.read_bytes()[start:].decode(errors="replace")
        return text[-_SHOWN_CHARACTERS:].strip() or "(it printed nothing)"

    def end(self) -> None:
        """Kill the process and all that it has started, and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


def _collect(processes: list[_RankProcess], seconds: float) -> dict[int, dict[str, Any]]:
    """Wait for an answer from every process; returns rank -> answer.

    Raises:
        RankFailure: not every process answered well within `seconds`.
    """
    deadline = time.monotonic() + seconds
    answers: dict[int, dict[str, Any]] = {}
    failures: dict[int, str] = {}
    waiting = {process.pipe: process for process in processes}
    while waiting and (left := deadline - time.monotonic()) > 0:
        heard = connection.wait(list(waiting), min(left, _POLL_SECONDS))
        # The pipe of a dead rank does not end while a process that the rank has started holds it open.
        for process in list(waiting.values()):
            if process.pipe not in heard and (heard or process.process.poll() is None):
                continue
            del waiting[process.pipe]
            answer: dict[str, Any] = {}
            try:
                if not process.pipe.poll():
                    raise EOFError
                answer = json.loads(process.pipe.recv_bytes())
            except (EOFError, OSError):
                status = process.process.wait()
                failures[process.rank] = f"ended with status {status}; its last output:\n{process.last_output()}"
            if answer.get("error"):
                failures[process.rank] = f"raised\n{answer['error'].strip()}"
            answers[process.rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if not waiting and not failures:
        return answers
    why = ""
    if not failures:
        why = f"{len(waiting)} of {len(processes)} ranks did not end within {seconds:g} s\n"
    # Where the others are is told by their faulthandlers.
    sizes = {process: process.log.stat().st_size for process in waiting.values()}
    for process in sizes:
        if process.process.poll() is None:
            process.process.send_signal(signal.SIGUSR1)
    if sizes:
        time.sleep(STACK_SECONDS)
    for process, size in sizes.items():
        failures[process.rank] = f"did not end; it is at\n{process.last_output(size)}"
    # The ones come first that failed for a reason of their own: the others lost their peer.
    own, consequences = [], []
    for rank, text in sorted(failures.items()):
        shown = f"--- rank {rank} {text}"
        if "Connection closed by peer" in text or "Connection reset by peer" in text or text.startswith("did not"):
            consequences.append(shown)
        else:
            own.append(shown)
    refusals = [answers[rank].get("refusal") for rank in sorted(answers)]
    raise RankFailure(why + "\n".join(own + consequences), next(filter(None, refusals), None))


# Functions that run in a rank's process.


def join_group(store: str, rank: int, world_size: int, seconds: float) -> None:
    """Initialize the default gloo group of `world_size` ranks, which find each other by the file `store`."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )
    dist.barrier()  # a rank that leaves the group at once would cut off ranks that still connect


def serve() -> None:
    """Answer requests until the pipe ends. What libraries print goes to the log, and the stacks at SIGUSR1."""
    target, number = sys.argv[2:]
    pipe = connection.Connection(int(number))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)  # a costly import, before the first request is timed
    pipe.send_bytes(json.dumps({}).encode())
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        answer: dict[str, Any] = {"value": None, "error": None, "refusal": None}
        try:
            import torch.distributed as dist

            join_group(request["store"], int(os.environ["RANK"]), request["ranks"], request["seconds"])
            answer["value"] = function(request["argument"])
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:
            answer |= {"value": None, "error": traceback.format_exc()}
            if isinstance(error, ConfigError):
                answer["refusal"] = str(error)
        pipe.send_bytes(json.dumps(answer).encode())


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone, whatever it is waiting for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
