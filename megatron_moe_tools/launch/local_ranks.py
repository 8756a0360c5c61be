"""Local gloo ranks that a program starts, gives work to, and ends with itself. No torch in the parent.

A rank (`serve`) reads requests from standard input, each a line of JSON: number, ranks, store, seconds, argument. For
each it joins a process group, calls the function with the argument, and answers on standard output with a line of JSON:
the number, and the function's value, a refusal or a traceback. It ends when its standard input does, and when the
process that started it is gone.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import selectors
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
from pathlib import Path
from typing import Any, TextIO

import megatron_moe
from megatron_moe.config.errors import ConfigError

PACKAGE_ROOT = Path(megatron_moe.__file__).resolve().parents[1]
START_SECONDS = 180.0
# After one rank has failed its peers see closed connections at once; this is for those that compute.
GRACE_SECONDS = 10.0
STACK_SECONDS = 1.5
_POLL_SECONDS = 1.0
_RANK = (
    "import sys; sys.path[0] = sys.argv[1]; from megatron_moe_tools.launch.local_ranks import serve; serve(sys.argv[2])"
)
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
    """

    def __init__(
        self, function: Callable[[Any], Any], number: int, *, seconds: float, threads: int | None = None
    ) -> None:
        self._function = f"{function.__module__}:{function.__qualname__}"
        self._number, self._seconds = number, seconds
        self._threads = os.environ.get("OMP_NUM_THREADS", "1") if threads is None else str(threads)
        self._folder = Path(tempfile.mkdtemp(prefix="local-ranks-"))
        self._processes: list[_RankProcess] = []
        self._requests = 0

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def folder(self) -> Path:
        """A folder for files that the ranks and the caller exchange; it goes when the ranks do."""
        return self._folder

    def call(self, argument: object, ranks: int | None = None) -> list[Any]:
        """Call the function with `argument` on `ranks` ranks, default all, and return their values in order.

        Raises:
            RankFailure: some rank raised, died or hung; all processes are then ended.
        """
        try:
            if not self._processes:
                self._start()
            self._requests += 1
            called = self._processes[:ranks]
            request = {
                "number": self._requests,
                "ranks": len(called),
                "store": str(self._folder / f"store{self._requests}"),
                "seconds": self._seconds,
                "argument": argument,
            }
            for process in called:
                process.give(request)
            answers = _collect(called, "number", self._seconds)
        except BaseException:
            self._end()  # one that hangs is of no more use; the next request gets new ones
            raise
        return [answers[process.rank]["value"] for process in called]

    def _start(self) -> None:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": self._threads,
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        for rank in range(self._number):
            self._processes.append(_RankProcess(rank, self._function, environment, self._folder))
        _collect(self._processes, "ready", START_SECONDS)

    def _end(self) -> None:
        for process in self._processes:
            process.end()
        self._processes = []


class _RankProcess:
    """One rank's process, its pipes and its log."""

    def __init__(self, rank: int, function: str, environment: Mapping[str, str], folder: Path) -> None:
        self.rank, self.log = rank, folder / f"rank{rank}.log"
        command = [sys.executable, "-W", "ignore", "-c", _RANK, str(PACKAGE_ROOT), function]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._pending = b""

    def give(self, request: dict[str, Any]) -> None:
        """Send a request. A process that is dead is reported when its answer is awaited."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def take(self) -> dict[str, Any] | None:
        """Return the next answer, an empty dict while its line is incomplete, None once the process has ended."""
        assert self.process.stdout is not None
        ended = self.process.poll() is not None
        try:
            read = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return None if ended else {}
        self._pending += read
        line, newline, rest = self._pending.partition(b"\n")
        if not newline:
            return {} if read else None
        self._pending = rest
        return json.loads(line)

    def last_output(self, start: int = 0) -> str:
        """Return the end of what the process has printed, from byte `start` of its log on."""
        text = self.log.read_bytes()[start:].decode(errors="replace")
        return text[-_SHOWN_CHARACTERS:].strip() or "(it printed nothing)"

    def end(self) -> None:
        """Kill the process and all that it has started, and wait for it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                pass


def _collect(processes: list[_RankProcess], key: str, seconds: float) -> dict[int, dict[str, Any]]:
    """Wait for an answer that has `key` from every process; returns rank -> answer.

    Raises:
        RankFailure: not every process answered well within `seconds`.
    """
    deadline = time.monotonic() + seconds
    answers: dict[int, dict[str, Any]] = {}
    failures: dict[int, str] = {}
    waiting = {process.rank: process for process in processes}
    with selectors.DefaultSelector() as selector:
        for process in processes:
            assert process.process.stdout is not None
            selector.register(process.process.stdout, selectors.EVENT_READ, process)
        while waiting and (left := deadline - time.monotonic()) > 0:
            heard = [event.data for event, _ in selector.select(min(left, _POLL_SECONDS))]
            if not heard:
                # The pipe of a dead rank does not end while a process that the rank has started holds it open.
                heard = [one for one in waiting.values() if one.process.poll() is not None]
            for process in heard:
                answer = process.take()
                if answer is None:
                    status = process.process.wait()
                    failures[process.rank] = f"ended with status {status}; its last output:\n{process.last_output()}"
                elif key not in answer:
                    continue
                elif answer.get("error"):
                    failures[process.rank] = f"raised\n{answer['error'].strip()}"
                answers[process.rank] = answer or {}
                selector.unregister(process.process.stdout)  # type: ignore[arg-type]
                del waiting[process.rank]
                if failures:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if waiting or failures:
        why = ""
        if not failures:
            why = f"{len(waiting)} of {len(processes)} ranks did not end within {seconds:g} s\n"
        refusals = [answers[rank].get("refusal") for rank in sorted(answers)]
        refusal = next(filter(None, refusals), None)
        raise RankFailure(why + _report(failures | _stacks(list(waiting.values()))), refusal)
    return answers


def _stacks(hanging: list[_RankProcess]) -> dict[int, str]:
    """Return where each of these processes is, from its faulthandler."""
    sizes, found = [], {}
    for process in hanging:
        sizes.append(process.log.stat().st_size)
        if process.process.poll() is None:
            process.process.send_signal(signal.SIGUSR1)
    if hanging:
        time.sleep(STACK_SECONDS)
    for process, size in zip(hanging, sizes):
        found[process.rank] = f"did not end; it is at\n{process.last_output(size)}"
    return found


def _report(texts: dict[int, str]) -> str:
    """Return the ranks' reports, first the ones that failed for a reason of their own: the others lost their peer."""
    own, consequences = [], []
    for rank, text in sorted(texts.items()):
        shown = f"--- rank {rank} {text}"
        if "Connection closed by peer" in text or "Connection reset by peer" in text or text.startswith("did not"):
            consequences.append(shown)
        else:
            own.append(shown)
    return "\n".join(own + consequences)


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


def serve(target: str) -> None:
    """Answer requests until standard input ends. Libraries' output goes to the log, and the stacks at SIGUSR1."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)  # a costly import, before the first request is timed
    _answer(answers, {"ready": os.getpid()})
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {"number": request["number"], "value": None, "error": None, "refusal": None}
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
        _answer(answers, answer)


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone, whatever it is waiting for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
