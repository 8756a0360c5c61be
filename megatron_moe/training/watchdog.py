"""The watchdog: threads in every rank that end all ranks when one dies or hangs, and report which one it was.

The ranks communicate through a key-value store, not through collectives, which would hang as well. Each rank writes a
heartbeat there, and watches its own progress and whether the next rank on the same machine still exists. The rank that
notices something first asks for the end; all answer with their stacks and what they wait for; one of them draws the
conclusion (`hang_report.py`), and every process ends with status 1. Processes that are stopped or do not answer are
ended by SIGKILL from a rank on their machine.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from megatron_moe.checkpoint.errors import SharedError
from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.io import launched
from megatron_moe.training import flight_recorder, hang_report
from megatron_moe.training.hang_report import (
    DOING,
    FAILED,
    GONE,
    GONE_WORDS,
    LEFT,
    SILENT,
    STOPPED,
    Process,
    RankStatus,
    this_process,
)

BROKEN = 1
"""Exit status of every rank of a run that the watchdog ended."""

_SHARED = (ConfigError, RunFault, KeyboardInterrupt, SystemExit)
_STDERR = 2  # not sys.stderr, which a notebook or a test may have replaced
_RANKS_PER_BEAT_SECOND = 500
_FAILURES_OF_STORE = 3


class Store(Protocol):
    """The methods used of torch.distributed's stores; `get` waits, so `check` is called before it."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Watchdog:
    """The watchdog of this rank, a context manager around the run; every rank of the run has one.

    Args:
        store: a connection of its own, shared with nobody in this process; None for a run of one rank.
        rank, world_size: of this process.
        timeout: seconds without progress after which all ranks are ended.
        folder: where the stacks, a file per rank, and the conclusion are written, besides standard error. May be set
            later.
        settle: seconds that ranks have to answer.
        prefix: of this incarnation's keys: a launcher's store outlives the ranks that it starts again.
        on_device: whether tensors are on a CUDA device, so that this rank waits where it reads from it.
        recorded: returns the dump of NCCL's flight recorder (`flight_recorder.py`); None without NCCL.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        timeout: float,
        folder: Path | None = None,
        settle: float = 4.0,
        prefix: str = "watchdog",
        *,
        on_device: bool = False,
        recorded: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._store, self._rank, self._world, self._timeout = store, rank, world_size, timeout
        self._tick = max(min(1.0, timeout / 10), world_size / _RANKS_PER_BEAT_SECOND)
        self.folder, self._settle, self._prefix = folder, max(settle, 3 * self._tick), prefix
        self._on_device, self._recorded = on_device, recorded
        self._here = _ranks_here(rank, world_size)
        self._mark, self._limited, self._since = "start", False, time.monotonic()
        self._stop, self._ending, self._alone = threading.Event(), threading.Lock(), store is None
        # Two: a store whose machine died may never answer, and the clock is watched all the same.
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._watch, "watchdog"), (self._listen, "watchdog's store"))
        ]
        self._failure: tuple[BaseException, float] | None = None
        self._neighbour: Process | None = None
        self._host: Process | None = None
        self._failures = 0
        self.last_words: Callable[[str, str], None] | None = None
        """Called where this rank concludes why the run ends, with "failed: " and the reason, and the reason."""

    # Called by the run.

    def __enter__(self) -> Watchdog:
        if hasattr(signal, "SIGUSR2"):
            faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True)
        self._send_beat("running")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the watch. An error of a kind that all ranks raise is an end of the run; any other is this rank's own."""
        if error is not None:
            self.notice(kind, error, trace)
            self._report_failure()
        with self._ending:  # which another thread may be about, and then ends the process
            self._stop.set()
            self._send_beat("done")

    def at(self, mark: str, limited: bool = True) -> None:
        """Record that the run has come to `mark`. Not limited: what begins may take longer than the timeout."""
        self._mark, self._limited, self._since = mark, limited, time.monotonic()

    def notice(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Take note of the error that the run ends with; the process goes on.

        It is called before files are closed and locks released, which takes time: a thread that is asked for this
        rank's status meanwhile answers with the error, not with what is being closed.
        """
        if error is not None and not isinstance(error, _SHARED) and self._failure is None:
            self._failure = (error, time.time())

    def _report_failure(self) -> None:
        """Report the error that this rank's main thread raised and the others do not know of; end the process.

        Without such an error, and in a run of one rank, it returns, and what was raised is raised further.
        """
        if self._failure is None or self._alone or self._stop.is_set():
            return
        error, _ = self._failure
        _ignore_sigterm()
        status = self._status()
        if status.waits_in is None:  # a collective that fails is the fault of another rank
            _print("".join(traceback.format_exception(error)))
            _report_to_launcher(error)
        self._end(status)

    def report_before_end(self) -> None:
        """Report, before a signal ends this rank, if that is because another rank died; end the process then."""
        if not self._alone and not self._stop.is_set() and self._something_is_wrong():
            self._end(self._status())

    # The threads.

    def _watch(self) -> None:
        while not self._stop.wait(self._tick):
            late = time.monotonic() - self._since
            if self._limited and late > self._timeout:
                self._end(self._status(), f"no progress for {late:.0f} s since: {self._mark}")

    def _listen(self) -> None:
        while not self._alone and not self._stop.wait(self._tick):
            try:
                self._send_beat("running")
                called = self._end_requested()
                if not called and self._neighbour_is_gone():
                    called = "a process is gone"
                self._failures = 0
            except Exception as error:  # a store that is gone has many ways to say so
                self._failures += 1
                if self._failures == _FAILURES_OF_STORE:
                    self._alone = True
                    _print(
                        f"rank {self._rank}: the launcher's store does not answer ({error}); hangs are found, dead "
                        "ranks are left to the launcher"
                    )
                continue
            if called:
                self._end(self._status())

    def _end_requested(self) -> bool | str:
        assert self._store is not None
        return self._store.check([self._key("end")])

    def _status(self) -> RankStatus:
        """Return what this rank was doing when its error was raised; without an error, what it is doing now."""
        if self._failure is None:
            state, text, cause, failed_at = DOING, "", "", 0.0
            own = (threading.get_ident(), *self._own_threads())
            doing = hang_report.current_activity(own, self._on_device)
        else:
            error, failed_at = self._failure
            state, text = FAILED, _short(f"{type(error).__name__}: {str(error).strip()}")
            cause = _short(error.cause) if isinstance(error, SharedError) else ""
            doing = hang_report.of_error(error)
        known = (doing.at, doing.waits_in, doing.tensor, doing.number)
        groups: tuple[flight_recorder.GroupProgress, ...] = ()
        why_none = ""
        if self._recorded is not None and (state == DOING or doing.waits_in is not None):
            # Half of the time in which the others expect this rank's answer.
            groups, why_none = flight_recorder.within(self._settle / 2, self._recorded)
        return RankStatus(self._rank, state, self._mark, *known, text, cause, failed_at, groups, why_none)

    def _own_threads(self) -> tuple[int, ...]:
        return tuple(thread.ident or 0 for thread in self._threads)

    def _neighbour_is_gone(self) -> bool:
        """Return whether the next rank on this machine has ended without having reported that it is done."""
        rank = self._here[(self._here.index(self._rank) + 1) % len(self._here)]
        if self._neighbour is None:
            self._neighbour, self._host = self._process_of(rank), self._process_of(0)
        return self._neighbour is not None and self._neighbour.is_gone() and self._state_of(rank) != "done"

    def _something_is_wrong(self) -> bool:
        """Return whether a rank asks for the end, or one on this machine is gone without reporting that it is done."""
        try:
            if self._end_requested():
                return True
            processes = {rank: self._process_of(rank) for rank in self._here}
            return any(p is not None and p.is_gone() and self._state_of(r) != "done" for r, p in processes.items())
        except Exception:  # a store that is gone, maybe with rank 0: then nobody else can be asked
            return self._host is not None and self._host.is_gone()

    # The end.

    def _end(self, status: RankStatus, reason: str = "") -> None:
        """Answer, read the others' answers, conclude, and end this process with status 1. Once per process."""
        if not self._ending.acquire(blocking=False):
            if threading.current_thread() not in self._threads:
                time.sleep(10 * self._settle)  # the thread that was first ends the process
            return
        if self._stop.is_set():
            self._ending.release()
            return
        try:
            _ignore_sigterm()  # the launcher's, when the first rank has left: the conclusion is not printed yet
            self._end_in_any_case(status)
            if self._alone:
                self._write_stacks(status)
                text = f"rank {self._rank} is ended: {reason}; {status}"
                _print(f"{launched.name()}: {text}")
                self._record(text)
            else:
                try:
                    self._end_together(status, reason)
                except Exception as error:  # whose kinds are torch's own
                    self._end_without_store(status, error)
        finally:
            os._exit(BROKEN)

    def _end_together(self, status: RankStatus, reason: str) -> None:
        assert self._store is not None
        # The status first: a rank that sees the request for the end can count on it.
        self._store.set(self._key(f"status/{self._rank}"), status.to_json())
        self._store.set(self._key("end"), str(self._rank))
        self._write_stacks(status)
        # Rank 0 concludes. Where it does not answer, all others wait for everyone, and the lowest one concludes.
        answers = self._answers(range(self._world) if self._rank == 0 else {0, *self._here})
        if self._rank != 0 and 0 not in answers:
            answers = self._answers(range(self._world))
        if self._rank == min(answers):
            missing = self._missing(set(range(self._world)) - set(answers))
            marks = {rank: self._beat_of(rank).get("mark", "unknown") for rank in missing}
            text = hang_report.conclusion(answers, missing, marks)
            text = f"the job of {self._world} ranks is ended{f' ({reason})' if reason else ''}: {text}"
            where = f"; stacks and this text are in {self.folder}" if self.folder is not None else ""
            if not launched.leave(launched.CONCLUSION, text + where):
                _print(f"{launched.name()}: {text}")
            self._write("verdict.txt", text + "\n")
            self._store.set(self._key("verdict"), text)
            self._record(text)
        # A rank that is stopped is named before it is woken: it would answer then.
        deadline = time.monotonic() + self._settle
        while not self._store.check([self._key("verdict")]) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._end_missing([rank for rank in self._here if rank not in answers])

    def _record(self, text: str) -> None:
        if self.last_words is not None:
            self.last_words(f"failed: {text}", text)

    def _end_in_any_case(self, status: RankStatus) -> None:
        """Start a timer that ends this process where the store gives neither an answer nor an error.

        That is a store which is stopped, or whose machine died. `_end_together` waits for answers four times at most.
        """
        patience = 5 * self._settle

        def give_up() -> None:
            self._end_without_store(status, TimeoutError(f"no answer for {patience:.0f} s"))
            os._exit(BROKEN)

        timer = threading.Timer(patience, give_up)
        timer.daemon = True
        timer.start()

    def _end_without_store(self, status: RankStatus, error: Exception) -> None:
        """Report that the store ended or stopped with the process that runs it: the launcher, or rank 0 without one."""
        self._write_stacks(status)
        holder = "its launcher, or the machine of rank 0, is gone or does not answer"
        stopped = False
        if self._host is not None and self._host.is_gone():
            holder = f"rank 0 is gone, which held it: {GONE_WORDS}"
        elif self._host is not None and (stopped := self._host.state() == STOPPED):
            holder = "rank 0 is stopped (SIGSTOP), which may hold it"
        _print(
            f"{launched.name()}: the job of {self._world} ranks is ended: the ranks' store does not answer "
            f"({_short(str(error), 80)}), {holder}. rank {self._rank}: {status}"
        )
        if stopped and self._host is not None:
            self._host.send(signal.SIGKILL)

    def _answers(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the status of the ranks that answer in time; do not wait for those that are gone from this machine."""
        assert self._store is not None
        answers: dict[int, RankStatus] = {}
        silent, deadline = set(ranks), time.monotonic() + self._settle
        while silent:
            for rank in sorted(silent):
                if self._store.check([self._key(f"status/{rank}")]):
                    answers[rank] = RankStatus.of_json(self._store.get(self._key(f"status/{rank}")))
            silent -= set(answers)
            over = time.monotonic() > deadline
            if over or all((p := self._process_of(rank)) is not None and p.is_gone() for rank in silent):
                break
            time.sleep(0.05)
        return answers

    def _missing(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return GONE, STOPPED, SILENT or LEFT for each of these ranks, which did not answer."""
        missing = {}
        for rank in sorted(ranks):
            process = self._process_of(rank)
            if self._state_of(rank) == "done":
                missing[rank] = LEFT
            elif process is None:
                missing[rank] = SILENT
            elif process.is_gone():
                missing[rank] = GONE
            else:
                missing[rank] = process.state()
        return missing

    def _end_missing(self, ranks: Iterable[int]) -> None:
        """End the processes left on this machine, which the launcher would wait for: a stopped one gets no SIGTERM."""
        processes = [self._process_of(rank) for rank in ranks]
        left = [process for process in processes if process is not None and not process.is_gone()]
        for process in left:
            process.send(signal.SIGUSR2)  # its stacks, from C, whatever holds its interpreter
            process.send(signal.SIGCONT)
        deadline = time.monotonic() + self._settle
        while any(not process.is_gone() for process in left) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            process.send(signal.SIGKILL)

    def _write_stacks(self, status: RankStatus) -> None:
        text = hang_report.stacks(self._own_threads())
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        head = f"{now} rank {self._rank} on {socket.gethostname()}, process {os.getpid()}: {status}\n{status.text}"
        text = f"==== {head.rstrip()}\n{text}\n"
        if launched.folder() is None:
            _print(text)
        self._write(f"stacks_rank_{self._rank:05d}.txt", text)

    def _write(self, name: str, text: str) -> None:
        folder = self.folder or launched.folder()
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            _print(f"rank {self._rank}: cannot write {folder / name}: {error}")

    # The store.

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _send_beat(self, state: str) -> None:
        if self._alone:
            return
        assert self._store is not None
        beat = {"state": state, "mark": self._mark, "process": asdict(this_process())}
        self._store.set(self._key(f"beat/{self._rank}"), json.dumps(beat))

    def _beat_of(self, rank: int) -> dict[str, Any]:
        assert self._store is not None
        key = self._key(f"beat/{rank}")
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}

    def _state_of(self, rank: int) -> str:
        return self._beat_of(rank).get("state", "")

    def _process_of(self, rank: int) -> Process | None:
        """Return the process of a rank, where it is on this machine."""
        beat = self._beat_of(rank)
        process = Process(**beat["process"]) if beat else None
        return process if process is not None and process.host == this_process().host else None


def _ranks_here(rank: int, world_size: int) -> list[int]:
    """Return the ranks on this machine by the launcher's environment variables; all ranks without them."""
    number = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    first = rank - int(os.environ.get("LOCAL_RANK", rank)) if number < world_size else 0
    return list(range(first, min(first + number, world_size)))


def _ignore_sigterm() -> None:
    """Ignore SIGTERM from now on; callable from any thread, which Python's own `signal` is not."""
    ctypes.pythonapi.PyOS_setsig.restype = ctypes.c_void_p
    ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, ctypes.c_void_p(1))  # SIG_IGN


def _report_to_launcher(error: BaseException) -> None:
    """Write the file by which torchrun names the first rank that failed; without it, torchrun goes by exit times."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.record_exception(error)


def _print(text: str) -> None:
    """Print to standard error with one write, so that the lines of many ranks do not mix."""
    os.write(_STDERR, (text.rstrip("\n") + "\n").encode(errors="replace"))


def _short(text: str, limit: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
