"""Warm restarts (`--warm-restarts`): a rank's process imports everything once and forks the process that trains.

When the training of some rank ends by a fault, the parents, which have no threads, no groups and no device, agree over
the launcher's store that this attempt is over, end what is left of it, and fork again. No rank's start is repeated: a
new attempt builds its groups, its model and its data, and reads the newest step. A mistake in the flags, Ctrl-C, or a
signal that the launcher passes on ends the job as without the flag, and so do more attempts in a row without a newer
step than the flag allows, a parent that dies, and a node that is lost: then the launcher starts the ranks anew, or not.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_moe.checkpoint import folder
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.io import launched
from megatron_moe.io.program import DONE, FAILED, INTERRUPTED, USER_ERROR, note
from megatron_moe.training.signals import signal_name

GRACE_SECONDS = 10.0
"""So long the others' processes may take to say what they waited for, and end."""
AGREEMENT_SECONDS = 60.0
"""So long a parent waits for the others' word; then a node is lost, and the launcher has to see to it."""
_POLL_SECONDS = 0.02
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_ASKED, _KILLED = "asked to end", b"killed"


def supervised(run: Run, rank: int, world_size: int) -> int | None:
    """Fork the process that trains, again and again; return the rank's exit status, or None in a forked process.

    Raises:
        ConfigError: the launcher has no store that outlives a rank.
    """
    importlib.import_module("torch._dynamo")  # an optimizer imports it, which takes most of the start of a small run
    store = None
    if world_size > 1:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise ConfigError(
                f"--warm-restarts {run.faults.warm_restarts}: ranks meet in the launcher's store, and there is none "
                "here; start them with torchrun or megatron-moe train, or drop the flag"
            )
        store = _store()
    return _Parent(run, rank, world_size, store).supervise()


def _store() -> Any:
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=AGREEMENT_SECONDS)
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(f"warm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@dataclass
class _Parent:
    """The process that waits, of one rank."""

    run: Run
    rank: int
    world_size: int
    store: Any
    child: int = 0
    asked: int = 0
    """The first signal that was passed on."""

    def supervise(self) -> int | None:
        """Return the exit status when the job is over, None in a forked process."""
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        attempt, fruitless, newest = 0, 0, self._newest()
        while True:
            if not self._fork(attempt):
                return None
            status = self._wait(attempt)
            ended = time.monotonic()
            ends = self._agreed(attempt, status)
            if ends is None or self._is_over(ends):
                return self._left(status, ends)
            before, newest = newest, self._newest()
            fruitless = 0 if newest > before else fruitless + 1
            if not self._goes_on(attempt, fruitless <= (self.run.faults.warm_restarts or 0)):
                self._say(f"no warm restart: {fruitless} attempts in a row left no newer step", ends, newest)
                return self._left(status, ends)
            seconds = time.monotonic() - ended
            self._say(f"warm restart {attempt + 1}, {seconds:.1f} s after this rank's end", ends, newest)
            self._forget_words()
            attempt += 1

    def _fork(self, attempt: int) -> bool:
        """Return False in the forked process, which gets the signals of a process that nobody supervises."""
        sys.stdout.flush()
        sys.stderr.flush()
        assert threading.active_count() == 1, "a lock that a thread holds would be held in the forked process for ever"
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # one would be handled as the parent does
        self.child = os.fork()
        if not self.child:
            for number in _PASSED_ON:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ["TORCHELASTIC_RESTART_COUNT"] = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{attempt}"
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        return bool(self.child)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.asked = self.asked or number
        if self.child:
            os.kill(self.child, number)

    def _wait(self, attempt: int) -> int:
        """Return how the child ended: its exit status, or minus the signal. Where another rank failed it is made to."""
        deadline = None
        while True:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                self.child = 0
                return os.waitstatus_to_exitcode(status)
            if deadline is None and self.store is not None and self.store.check([f"{attempt}/over"]):
                # A rank that a signal has killed has nothing to say, and the others no more than that it is gone.
                was_killed = self.store.get(f"{attempt}/over") == _KILLED
                deadline = time.monotonic() + (0.0 if was_killed else GRACE_SECONDS)
            if deadline is not None and time.monotonic() > deadline:
                os.kill(self.child, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _agreed(self, attempt: int, status: int) -> list[str] | None:
        """Return how every rank's training ended; None where some rank does not say."""
        mine = _ASKED if self.asked else str(status)
        if self.store is None:
            return [mine]
        self.store.set(f"{attempt}/{self.rank}", mine)
        if mine != str(DONE):
            self.store.set(f"{attempt}/over", _KILLED.decode() if status < 0 and not self.asked else "failed")
        keys, deadline = [f"{attempt}/{rank}" for rank in range(self.world_size)], None
        while not self.store.check(keys):
            # Others may train on for as long as they like, unless something has ended the attempt.
            if deadline is None and self.store.check([f"{attempt}/over"]):
                deadline = time.monotonic() + AGREEMENT_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return [self.store.get(key).decode() for key in keys]

    @staticmethod
    def _is_over(ends: list[str]) -> bool:
        final = (_ASKED, str(USER_ERROR), str(INTERRUPTED))
        return all(end == str(DONE) for end in ends) or any(end in final for end in ends)

    def _goes_on(self, attempt: int, again: bool) -> bool:
        """Return whether there is another attempt, as rank 0 has decided."""
        if self.store is None:
            return again
        key = f"{attempt}/again"
        if self.rank == 0:
            self.store.set(key, str(again))
        try:
            return bool(self.store.get(key) == b"True")
        except Exception:  # the store's kinds are torch's own: rank 0's parent is gone
            return False

    def _say(self, what: str, ends: list[str], newest: int) -> None:
        if self.rank != 0:
            return
        where = launched.folder()
        if where is not None and (where / launched.CONCLUSION).exists():
            causes = [(where / launched.CONCLUSION).read_text(encoding="utf-8").strip()]
        else:
            causes = [_words(rank, int(end)) for rank, end in enumerate(ends) if int(end) not in (DONE, FAILED)]
        step = f"the newest step is {newest}" if newest else "there is no step yet"
        note(f"{launched.name()}: {what}: {'; '.join(causes) or 'ranks ended with status 1'}; {step}")

    @staticmethod
    def _forget_words() -> None:
        """Remove what ranks of the last attempt have left for the launcher to say, or it would say it of the next."""
        where, error_file = launched.folder(), os.environ.get("TORCHELASTIC_ERROR_FILE")
        if where is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            for name in (launched.REPORTED, launched.CONCLUSION):
                (where / name).unlink(missing_ok=True)
        if error_file:
            Path(error_file).unlink(missing_ok=True)

    def _newest(self) -> int:
        """Return the number of the newest step that rank 0 sees; a step in host memory counts, too."""
        options = self.run.checkpoint
        if self.rank != 0 or options.save is None:
            return 0
        roots = [Path(options.save)]
        if options.local_save is not None:
            roots += Path(options.local_save).glob("*/rank_*")
        return max((number for root in roots for number in folder.steps(root)), default=0)

    @staticmethod
    def _left(status: int, ends: list[str] | None) -> int:
        """Return the status to leave with: the child's; a signal that killed that kills this process, too."""
        if ends is not None and str(USER_ERROR) in ends:
            return USER_ERROR
        if status < 0:
            if -status != signal.SIGKILL:
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        return status


def _words(rank: int, status: int) -> str:
    if status < 0:
        return f"rank {rank} was killed by {signal_name(-status)}"
    return f"rank {rank} ended with status {status}"
