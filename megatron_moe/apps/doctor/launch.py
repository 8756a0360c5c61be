"""The doctor's ranks: processes that are started once, given one layout after another, and never left behind."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import megatron_moe
from megatron_moe.apps.doctor.measure import Request
from megatron_moe.config.schema import flatten

PACKAGE_ROOT = Path(megatron_moe.__file__).resolve().parents[1]
START_SECONDS = 180.0
# After one rank has failed its peers see closed connections at once; this is for those that compute.
GRACE_SECONDS = 10.0
STACK_SECONDS = 1.5


class RankFailure(Exception):
    """A layout was not measured: some rank raised, died or did not end. The message says which, with its traceback."""


class _Process:
    """One rank's process and its pipes."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.log = number, folder / f"rank{number}.log"
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "megatron_moe.apps.doctor.rank"],
                env=environment,
                cwd=PACKAGE_ROOT,  # which `-m` would search first, wherever the doctor was started
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # so that it ends with all that it started, and Ctrl-C is the doctor's alone
            )
        self._pending = b""

    def give(self, task: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task).encode() + b"\n")
        self.process.stdin.flush()

    def take(self) -> dict[str, Any] | None:
        """The next answer, an empty dict while its line is incomplete, None once the process has ended."""
        assert self.process.stdout is not None
        read = os.read(self.process.stdout.fileno(), 1 << 16)
        self._pending += read
        line, newline, rest = self._pending.partition(b"\n")
        if not newline:
            return {} if read else None
        self._pending = rest
        return json.loads(line)

    def output(self) -> str:
        """The end of what the process has printed."""
        return self.log.read_text(errors="replace")[-3000:].strip() or "(it printed nothing)"

    def end(self) -> None:
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


class Ranks:
    """As many processes as the largest layout needs, started when first needed. A context: at its end all are gone.

    Args:
        number: of processes.
        seconds: a layout that takes longer has hung.
    """

    def __init__(self, number: int, seconds: float = 120.0) -> None:
        self._number, self._seconds = number, seconds
        self._folder = Path(tempfile.mkdtemp(prefix="doctor-"))
        self._processes: list[_Process] = []
        self._tasks = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def measure(self, request: Request, ranks: int) -> list[dict[str, Any]]:
        """Every rank's record of one layout.

        Raises:
            RankFailure: some rank raised, died or hung; all processes are then ended.
        """
        if not self._processes:
            self._start()
        self._tasks += 1
        results = [self._folder / f"record{rank}.pt" for rank in range(ranks)]
        try:
            for process, result in zip(self._processes, results):
                task = {
                    "number": self._tasks,
                    "rank": process.number,
                    "ranks": ranks,
                    "store": str(self._folder / f"store{self._tasks}"),
                    "seconds": self._seconds,
                    "result": str(result),
                    "flags": flatten(request.run),
                    "request": {name: value for name, value in vars(request).items() if name != "run"},
                }
                try:
                    process.give(task)
                except BrokenPipeError:
                    pass  # it died between two layouts: its end is seen, and told, when its answer is awaited
            self._collect(self._processes[:ranks], "number", self._seconds)
        except RankFailure:
            self._end()  # one that hangs is of no more use; the next layout gets new ones
            raise
        return [torch.load(result, weights_only=True) for result in results]

    def _start(self) -> None:
        self._processes = [_Process(number, self._folder) for number in range(self._number)]
        self._collect(self._processes, "ready", START_SECONDS)

    def _end(self) -> None:
        for process in self._processes:
            process.end()
        self._processes = []

    def _collect(self, processes: list[_Process], key: str, seconds: float) -> None:
        """Wait for one answer of every process."""
        deadline, failures = time.monotonic() + seconds, dict[int, str]()
        waiting = {process.number: process for process in processes}
        with selectors.DefaultSelector() as selector:
            for process in processes:
                assert process.process.stdout is not None
                selector.register(process.process.stdout, selectors.EVENT_READ, process)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for event, _ in selector.select(left):
                    process = event.data
                    answer = process.take()
                    if answer is None:
                        status = process.process.wait()
                        failures[process.number] = f"ended with status {status}; its last output:\n{process.output()}"
                    elif key not in answer:
                        continue
                    elif answer.get("error"):
                        failures[process.number] = f"raised\n{answer['error'].strip()}"
                    selector.unregister(event.fileobj)
                    del waiting[process.number]
                    if failures:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting or failures:
            why = "" if failures else f"{len(waiting)} of {len(processes)} ranks did not end within {seconds:g} s\n"
            raise RankFailure(why + _told(failures, _stacks(list(waiting.values()))))


def _stacks(hanging: list[_Process]) -> dict[int, str]:
    """Where each of these processes is, from its faulthandler."""
    sizes = {process.number: process.log.stat().st_size for process in hanging}
    for process in hanging:
        if process.process.poll() is None:
            process.process.send_signal(signal.SIGUSR1)
    if hanging:
        time.sleep(STACK_SECONDS)
    return {
        process.number: "did not end; it is at\n"
        + process.log.read_bytes()[sizes[process.number] :].decode(errors="replace").strip()
        for process in hanging
    }


def _told(*reports: dict[int, str]) -> str:
    """The ranks' reports, first the ones that raised for a reason of their own: the others lost their peer."""
    texts = {number: text for report in reports for number, text in report.items()}

    def consequence(text: str) -> bool:
        return "Connection closed by peer" in text or "Connection reset by peer" in text or text.startswith("did not")

    order = sorted(texts, key=lambda number: (consequence(texts[number]), number))
    return "\n".join(f"--- rank {number} {texts[number]}" for number in order)
