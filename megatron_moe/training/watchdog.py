"""The watchdog: threads in every rank that end all ranks when one dies or hangs, and report which one it was.

The ranks communicate through a key-value store, not through collectives, which would hang as well. Each rank writes a
heartbeat there, and watches its own progress and whether the next rank on the same machine still exists. The rank that
notices something first asks for the end; all answer with their stacks and what they wait for; one of them draws the
conclusion (`hang_report.py`), and every process ends with status 1. Processes that are stopped or do not answer are
ended by SIGKILL from a rank on their machine.

In a program that called `train` the rank that failed raises its own error instead, and the others a RunFault with the
conclusion.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from megatron_moe.checkpoint.errors import SharedError
from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.io import launched
from megatron_moe.io.program import StoppedEarly
from megatron_moe.training import hang_report
from megatron_moe.training.hang_report import DOING, FAILED, GONE, GONE_WORDS, LEFT, SILENT, STOPPED, RankStatus
from megatron_moe.training.signals import ignore_sigterm

BROKEN = 1
"""Exit status of every rank of a run that the watchdog ended."""

_SHARED = (ConfigError, RunFault, KeyboardInterrupt, StoppedEarly)
_STDERR = 2  # not sys.stderr, which a notebook or a test may have replaced
_RANKS_PER_BEAT_SECOND = 500
_FAILURES_OF_STORE = 3
_POLL_SECONDS = 0.05


# Processes.


@dataclass(frozen=True)
class Process:
    """A process; its start time distinguishes it from a later one with the same number."""

    host: str
    """Name and boot of its machine."""
    pid: int
    start: int
    """In clock ticks since boot, 0 where it is not known."""

    def is_gone(self) -> bool:
        """Return whether it has ended, a zombie included; False where that is unknown. Call it on its own machine."""
        if not Path("/proc/self/stat").exists():
            return False
        state, start = _stat(self.pid)
        return state in ("", "Z", "X") or (self.start > 0 and start != self.start)

    def state(self) -> str:
        """Return GONE, STOPPED, or SILENT for a process that runs and does not answer."""
        if self.is_gone():
            return GONE
        if _stat(self.pid)[0] in ("T", "t"):
            return STOPPED
        return SILENT

    def send(self, number: int) -> None:
        """Send the process a signal, unless it is gone."""
        if not self.is_gone():
            try:
                os.kill(self.pid, number)
            except OSError:
                pass


@cache
def this_process() -> Process:
    """Return the process that calls this.

    Its host differs between machines of one name, and between containers, which number processes anew.
    """
    host = [socket.gethostname()]
    try:
        host.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        host.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # not Linux: the name has to do
        pass
    return Process(" ".join(host), os.getpid(), _stat(os.getpid())[1])


def _stat(pid: int) -> tuple[str, int]:
    """Return (state letter, start time) from /proc; ("", 0) for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return "", 0
    return fields[0], int(fields[19])


# What the ranks tell one another.


class Store(Protocol):
    """The methods used of torch.distributed's stores; `get` waits, so `check` is called before it."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


Leave = Callable[[RunFault, Callable[[], None]], None]
"""Raises an error in the main thread, and calls a function before the process is ended because that was in vain."""


class RankBoard:
    """The ranks' heartbeats, their answers and the conclusion in a store; every method may raise the store's errors."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, name: str, value: str) -> None:
        """Write a value for all ranks."""
        self._store.set(f"watchdog/{name}", value)

    def has(self, name: str) -> bool:
        """Return whether a rank has written it."""
        return self._store.check([f"watchdog/{name}"])

    def read(self, name: str) -> str:
        """Return what a rank has written; `has` is asked before."""
        return self._store.get(f"watchdog/{name}").decode()

    def beat(self, rank: int, state: str, mark: str) -> None:
        """Write this rank's heartbeat."""
        beat = {"state": state, "mark": mark, "process": asdict(this_process())}
        self.write(f"beat/{rank}", json.dumps(beat))

    def beat_of(self, rank: int) -> dict[str, Any]:
        """Return a rank's last heartbeat, empty where it wrote none."""
        if not self.has(f"beat/{rank}"):
            return {}
        return json.loads(self._store.get(f"watchdog/beat/{rank}"))

    def process_of(self, rank: int) -> Process | None:
        """Return the process of a rank, where it is on this machine."""
        beat = self.beat_of(rank)
        if not beat or beat["process"]["host"] != this_process().host:
            return None
        return Process(**beat["process"])

    def is_lost(self, rank: int, process: Process | None) -> bool:
        """Return whether a rank's process ended without having reported that it is done."""
        return process is not None and process.is_gone() and self.beat_of(rank).get("state") != "done"

    def status_of(self, rank: int) -> RankStatus | None:
        """Return a rank's answer, if it has answered."""
        if not self.has(f"status/{rank}"):
            return None
        return RankStatus.of_json(self._store.get(f"watchdog/status/{rank}"))


# The watchdog.


class Watchdog:
    """The watchdog of this rank, a context manager around the run; every rank of the run has one.

    Args:
        store: a connection of its own, shared with nobody in this process; None for a run of one rank.
        timeout: seconds without progress after which all ranks are ended.
        folder: of the stacks, a file per rank, and the conclusion, besides standard error; may be set later.
        settle: seconds that ranks have to answer.
        on_device: whether tensors are on a CUDA device, so that this rank waits where it reads from it.
        recorded: returns the dump of NCCL's flight recorder (`hang_report.py`); None without NCCL.
        leave: lets the main thread leave the run with an error; None: the process is ended.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        timeout: float,
        folder: Path | None = None,
        settle: float = 4.0,
        *,
        on_device: bool = False,
        recorded: Callable[[], Mapping[str, Any]] | None = None,
        leave: Leave | None = None,
    ) -> None:
        self._board = None if store is None else RankBoard(store)
        self._rank, self._world, self._timeout = rank, world_size, timeout
        self._tick = max(min(1.0, timeout / 10), world_size / _RANKS_PER_BEAT_SECOND)
        self.folder, self._settle = folder, max(settle, 3 * self._tick)
        self._on_device, self._recorded, self._leave = on_device, recorded, leave
        # The ranks on this machine by the launcher's environment variables; all ranks without them.
        number = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        first = 0
        if number < world_size:
            first = rank - int(os.environ.get("LOCAL_RANK", rank))
        self._here = list(range(first, min(first + number, world_size)))
        self._mark, self._limited, self._since = "start", False, time.monotonic()
        self._stop, self._ending = threading.Event(), threading.Lock()
        # Two: a store whose machine died may never answer, and the clock is watched all the same.
        self._threads = [
            threading.Thread(target=self._watch_clock, name="watchdog", daemon=True),
            threading.Thread(target=self._watch_ranks, name="watchdog's store", daemon=True),
        ]
        self._failure: tuple[BaseException, float] | None = None
        self._fault: RunFault | None = None
        """What the main thread raises where the run was ended by another rank or by the clock."""
        self._concluded = threading.Event()
        self._host: Process | None = None
        """Rank 0's process where it is on this machine: without a launcher it holds the store."""
        self.on_abort: Callable[[str, str], None] = lambda _reason, _conclusion: None
        """Called where this rank concludes why the run ends, with "failed: " and the reason, and the reason."""

    # Called by the run.

    def __enter__(self) -> Watchdog:
        if hasattr(signal, "SIGUSR2"):
            faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True)
        if self._board is not None:
            self._board.beat(self._rank, "running", self._mark)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the watch. An error of a kind that all ranks raise is an end of the run; any other is this rank's own.

        Raises:
            RunFault: as `notice`.
        """
        self.notice(kind, error, trace)
        if self._leave is None:
            self._end_by_failure()
        if error is not None:  # for the others, should they not leave: a program may raise one of those kinds, too
            self._mark += f", {_short(f'{type(error).__name__}: {error}')}"
        if not self._concluded.is_set():
            with self._ending:  # which another thread may be about, and then ends the process
                self._stop.set()
                if self._board is not None:
                    self._board.beat(self._rank, "done", self._mark)
        for thread in self._threads:
            # One that comes back from the store's C++ when the interpreter has ended would abort the process.
            thread.join(self._settle)

    def at(self, mark: str, limited: bool = True) -> None:
        """Record that the run has come to `mark`. Not limited: what begins may take longer than the timeout.

        Raises:
            RunFault: the run has been ended, which something between the steps has caught.
        """
        if self._fault is not None:
            raise self._fault
        self._mark, self._limited, self._since = mark, limited, time.monotonic()

    def notice(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Take note of the error that the run ends with; the process goes on.

        It is called before files are closed and locks released, which takes time: a thread that is asked for this
        rank's status meanwhile answers with the error, not with what is being closed.

        Raises:
            RunFault: in a program, where the error only follows from another rank's.
        """
        if error is None or error is self._fault:
            return
        if not isinstance(error, _SHARED) and self._failure is None:
            self._failure = (error, time.time())
        if self._leave is not None:
            status = self._end_by_failure()
            if self._fault is not None and status is not None and not status.failed_by_itself:
                raise self._fault from None

    def _end_by_failure(self) -> RankStatus | None:
        """End the run by this rank's error, of which the others do not know; return the status, None: there is none."""
        if self._failure is None or self._board is None:  # a run of one rank raises it further
            return None
        ignore_sigterm()
        status = self._status()
        if not self._stop.is_set():
            if status.failed_by_itself:
                if self._leave is None:
                    _print("".join(traceback.format_exception(self._failure[0])))
                from torch.distributed.elastic.multiprocessing.errors import get_error_handler

                # torchrun names the first rank that failed by this file; without it, it goes by exit times.
                get_error_handler().record_exception(self._failure[0])
            self._end(status)
        return status

    def report_before_end(self) -> bool:
        """Report, before a signal ends this rank, if that is because another rank died, and end the process then.

        Return whether a program's main thread raises the conclusion instead.
        """
        board = self._board
        if board is None or self._stop.is_set():
            return self._fault is not None
        try:
            is_over = board.has("end") or any(board.is_lost(rank, board.process_of(rank)) for rank in self._here)
        except Exception:  # a store that is gone, maybe with rank 0: then nobody else can be asked
            is_over = self._host is not None and self._host.is_gone()
        if is_over:
            self._end(self._status())
        return self._fault is not None

    # The threads.

    def _watch_clock(self) -> None:
        while not self._stop.wait(self._tick):
            late = time.monotonic() - self._since
            if self._limited and late > self._timeout:
                self._end(self._status(), f"no progress for {late:.0f} s since: {self._mark}")

    def _watch_ranks(self) -> None:
        neighbour: Process | None = None
        next_rank = self._here[(self._here.index(self._rank) + 1) % len(self._here)]
        failures = 0
        while self._board is not None and not self._stop.wait(self._tick):
            try:
                self._board.beat(self._rank, "running", self._mark)
                if neighbour is None:
                    neighbour, self._host = self._board.process_of(next_rank), self._board.process_of(0)
                is_over = self._board.has("end") or self._board.is_lost(next_rank, neighbour)
                failures = 0
            except Exception as error:  # a store that is gone has many ways to say so
                failures += 1
                if failures == _FAILURES_OF_STORE:
                    self._board = None
                    _print(
                        f"rank {self._rank}: the launcher's store does not answer ({error}); hangs are found, dead "
                        "ranks are left to the launcher"
                    )
                continue
            if is_over:
                self._end(self._status())

    def _status(self) -> RankStatus:
        """Return what this rank was doing when its error was raised; without an error, what it is doing now."""
        state, text, cause, failed_at = DOING, "", "", 0.0
        if self._failure is None:
            doing = hang_report.current_activity((threading.get_ident(), *self._own_threads()), self._on_device)
        else:
            error, failed_at = self._failure
            state, text = FAILED, _short(f"{type(error).__name__}: {str(error).strip()}")
            cause = _short(error.cause) if isinstance(error, SharedError) else ""
            doing = hang_report.of_error(error)
        status = RankStatus(self._rank, state, self._mark, **vars(doing), text=text, cause=cause, failed_at=failed_at)
        if self._recorded is None or status.failed_by_itself:
            return status
        # Half of the time in which the others expect this rank's answer.
        groups, why_none = hang_report.within(self._settle / 2, self._recorded)
        return replace(status, groups=groups, without_groups=why_none)

    def _own_threads(self) -> tuple[int, ...]:
        return tuple(thread.ident or 0 for thread in self._threads)

    # The end.

    def _end(self, status: RankStatus, reason: str = "") -> None:
        """Answer, read the others' answers, conclude, and end this process with status 1, or the run. Once per run."""
        if not self._ending.acquire(blocking=False):
            if threading.current_thread() not in self._threads:
                self._concluded.wait(10 * self._settle)  # or until the thread that was first ends the process
            return
        if self._stop.is_set():
            self._ending.release()
            return
        text = f"rank {self._rank} is ended: {reason}; {status}"
        try:
            ignore_sigterm()  # the launcher's, when the first rank has left: the conclusion is not printed yet
            # A store which is stopped, or whose machine died, gives neither an answer nor an error. `_end_together`
            # waits for answers four times at most.
            patience = 5 * self._settle
            silence = TimeoutError(f"no answer for {patience:.0f} s")
            timer = threading.Timer(patience, self._end_without_store, (status, silence))
            timer.daemon = True
            timer.start()
            if self._board is None:
                self._write_stacks(status)
                if self._leave is None:
                    _print(f"{launched.name()}: {text}")
                    self.on_abort(f"failed: {text}", text)
            else:
                try:
                    text = self._end_together(self._board, status, reason) or text
                except Exception as error:  # whose kinds are torch's own
                    self._end_without_store(status, error)
            timer.cancel()
        finally:
            self._end_process_or_run(text)

    def _end_process_or_run(self, text: str) -> None:
        """End the process; in a program let the main thread raise the conclusion, and end the process if it cannot."""
        if self._leave is None:
            os._exit(BROKEN)
        if self._concluded.is_set():
            return
        self._fault = RunFault(text)
        self._stop.set()
        self._concluded.set()

        def last_words() -> None:
            doing = f"rank {self._rank} is ended, for it has not left the run: {self._mark}"
            _print(f"{launched.name()}: {doing}; {text}\n{self._stacks()}")
            self.on_abort(f"failed: {text}", text)

        self._leave(self._fault, last_words)

    def _end_together(self, board: RankBoard, status: RankStatus, reason: str) -> str:
        """Answer, and return what the ranks conclude; an empty text if that is not known in time."""
        # The status first: a rank that sees the request for the end can count on it.
        board.write(f"status/{self._rank}", status.to_json())
        board.write("end", str(self._rank))
        self._write_stacks(status)
        everyone = range(self._world)
        # Rank 0 concludes. Where it does not answer, all others wait for everyone, and the lowest one concludes.
        answers = self._answers(board, everyone if self._rank == 0 else {0, *self._here})
        if self._rank != 0 and 0 not in answers:
            answers = self._answers(board, everyone)
        if self._rank == min(answers):
            missing: dict[int, str] = {}
            marks: dict[int, str] = {}
            for rank in sorted(set(everyone) - answers.keys()):
                beat, process = board.beat_of(rank), board.process_of(rank)
                marks[rank], missing[rank] = beat.get("mark", "unknown"), SILENT
                if beat.get("state") == "done":
                    missing[rank] = LEFT
                elif process is not None:
                    missing[rank] = process.state()
            text = f"the job of {self._world} ranks is ended"
            if reason:
                text += f" ({reason})"
            text += f": {hang_report.diagnose(answers, missing, marks)}"
            where = ""
            if self.folder is not None:
                where = f"; stacks and this text are in {self.folder}"
            if self._leave is None and not launched.leave(launched.CONCLUSION, text + where):
                _print(f"{launched.name()}: {text}")
            self._write("verdict.txt", text + "\n")
            board.write("verdict", text)
            if self._leave is None:
                self.on_abort(f"failed: {text}", text)
        # A rank that is stopped is named before it is woken: it would answer then.
        deadline = time.monotonic() + self._settle
        while not board.has("verdict") and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        # End the processes left on this machine, which the launcher would wait for: a stopped one gets no SIGTERM.
        left: list[Process] = []
        for process in [board.process_of(rank) for rank in self._here if rank not in answers]:
            if process is not None and not process.is_gone():
                left.append(process)
                process.send(signal.SIGUSR2)  # its stacks, from C, whatever holds its interpreter
                process.send(signal.SIGCONT)
        deadline = time.monotonic() + self._settle
        while any(not process.is_gone() for process in left) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for process in left:
            process.send(signal.SIGKILL)
        if board.has("verdict"):
            return board.read("verdict")
        return ""

    def _end_without_store(self, status: RankStatus, error: Exception) -> None:
        """Report that the store ended or stopped with its process, the launcher or rank 0; end this one."""
        self._write_stacks(status)
        state = SILENT if self._host is None else self._host.state()
        holder = "its launcher, or the machine of rank 0, is gone or does not answer"
        if state == GONE:
            holder = f"rank 0 is gone, which held it: {GONE_WORDS}"
        elif state == STOPPED:
            holder = "rank 0 is stopped (SIGSTOP), which may hold it"
        text = (
            f"the job of {self._world} ranks is ended: the ranks' store does not answer ({_short(str(error), 80)}), "
            f"{holder}. rank {self._rank}: {status}"
        )
        if self._leave is None:
            _print(f"{launched.name()}: {text}")
        if state == STOPPED and self._host is not None:
            self._host.send(signal.SIGKILL)
        self._end_process_or_run(text)

    def _answers(self, board: RankBoard, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the status of the ranks that answer in time; do not wait for those that are gone from this machine."""
        answers: dict[int, RankStatus] = {}
        silent, deadline = set(ranks), time.monotonic() + self._settle
        while True:
            for rank in sorted(silent):
                status = board.status_of(rank)
                if status is not None:
                    answers[rank] = status
            silent -= set(answers)
            processes = map(board.process_of, silent)
            if all(process is not None and process.is_gone() for process in processes) or time.monotonic() > deadline:
                return answers
            time.sleep(_POLL_SECONDS)

    def _write_stacks(self, status: RankStatus) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        head = f"{now} rank {self._rank} on {socket.gethostname()}, process {os.getpid()}: {status}\n{status.text}"
        text = f"==== {head.rstrip()}\n{self._stacks()}"
        if self._leave is None and launched.folder() is None:
            _print(text)
        self._write(f"stacks_rank_{self._rank:05d}.txt", text)

    def _stacks(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        text = ""
        for ident, frame in hang_report.threads(self._own_threads()):
            stack = "".join(traceback.format_stack(frame)).rstrip()
            text += f"thread {names.get(ident, ident)}:\n{stack}\n"
        return text

    def _write(self, name: str, text: str) -> None:
        folder = self.folder or launched.folder()
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            _print(f"rank {self._rank}: cannot write {folder / name}: {error}")


def _print(text: str) -> None:
    """Print to standard error with one write, so that the lines of many ranks do not mix."""
    os.write(_STDERR, (text.rstrip("\n") + "\n").encode(errors="replace"))


def _short(text: str, limit: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
