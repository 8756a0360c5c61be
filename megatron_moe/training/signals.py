"""Signals: SIGTERM and SIGUSR1 save and stop, Ctrl-C stops at once, on all ranks and with no process left behind.

Before the first step there is nothing to save, and SIGTERM, SIGUSR1 and the time limit stop at once as well.

torchrun passes the signal it got on to every rank. A rank may be inside a collective at that moment, where Python runs
no signal handler; the wake-up pipe is written by the C handler all the same, and a thread that reads it ends the
process if the main thread has not done so in time.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_moe.io.program import DONE, FAILED, StoppedEarly, end_interrupted

LEAVE_SECONDS = 30.0
"""A program's main thread has so long to leave the run with an exception, see `StopSignals.leave`."""

_SECONDS_TO_LEAVE = 10.0
_PR_SET_PDEATHSIG = 1


SAVING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that ask for a checkpoint and the end; a launcher or Slurm sends them when time is up."""


def time_limit(minutes: float) -> str:
    """Return the reason of an end by `--exit-duration-in-mins`."""
    return f"(--exit-duration-in-mins {minutes:g})"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM for 15."""
    return signal.Signals(number).name


class StopSignals:
    """The signals that this process got, and the time since it began to listen; a context manager around a run.

    Attributes:
        started: when the run began, by `time.monotonic`.
        stop_signal: the number of the signal that asked for a checkpoint and the end; 0: none did.
        interrupted: whether Ctrl-C was pressed.
        loop_looks: set on all ranks at the same time: the training loop sees to signals that save.
        before_end: called with the reason, such as "by SIGTERM", from a thread, before this process is ended at once.

    Args:
        save: `--exit-signal-handler`: after `loop_looks` is set SIGTERM and SIGUSR1 set `stop_signal`; before, they
            raise StoppedEarly in the main thread.
        grace_seconds: how long the main thread may take to leave by itself, after Ctrl-C or StoppedEarly.
        limit_minutes: `--exit-duration-in-mins`: StoppedEarly is raised where it passes before `loop_looks` is set,
            and the loop looks at it from then on.
    """

    def __init__(self, *, save: bool, grace_seconds: float = 2.0, limit_minutes: float | None = None) -> None:
        self.started = time.monotonic()
        self.stop_signal, self.interrupted = 0, False
        self.before_end: Callable[[str], None] = lambda _: None
        self._save, self._grace_seconds, self._limit_minutes = save, grace_seconds, limit_minutes
        self._time_is_up = False
        self.loop_looks = self._leaving = False
        self._previous: dict[int, object] = {}
        self._wakeup_in, self._wakeup_out = socket.socketpair()
        self._previous_fd = -1
        self._left, self._leave_lock = threading.Event(), threading.Lock()
        self._fault: Exception | None = None
        self._last_words: Callable[[], None] = lambda: None
        self._handled_outside: BaseException | None = None
        self._outlasts_launcher = False
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)

    def __enter__(self) -> StopSignals:
        self._handled_outside = sys.exc_info()[1]
        self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_interrupt)
        for number in SAVING:
            self._previous[number] = signal.signal(number, self._on_stop)
        self._wakeup_in.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._wakeup_in.fileno(), warn_on_full_buffer=False)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving = True
        with self._leave_lock:
            self._left.set()
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            # None: a handler that was not installed from Python, which cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        if self._outlasts_launcher:
            ignore_sigterm()
        self._wakeup_in.close()
        # It holds this object, and by `before_end` the whole run. Were it the last to let go of its tensors, when the
        # interpreter has ended, torch's C++ would abort the process.
        self._watcher.join(_SECONDS_TO_LEAVE)
        self.before_end = lambda _: None

    def leave(self, fault: Exception, last_words: Callable[[], None]) -> None:
        """Raise `fault` in the main thread, unless it handles another error; callable from any thread.

        If the main thread is still in the run after LEAVE_SECONDS, `last_words` is called and the process is ended.
        """
        with self._leave_lock:
            if not self._left.is_set():
                self._fault, self._last_words = fault, last_words
                # A signal, for it ends a sleep or a read, too; the watcher counts the time from it.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    @contextmanager
    def outlasting_launcher(self) -> Iterator[None]:
        """After an error in the block, ignore SIGTERM until the next run: a program's own `finally` has to follow.

        The launcher sends it to all ranks when the first one has ended, and SIGKILL some time later.
        """
        try:
            yield
        except Exception:
            ignore_sigterm()
            self._outlasts_launcher = True
            raise

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self._fault is not None:
            if not self._leaving and sys.exc_info()[1] is self._handled_outside:
                self._leaving = True
                raise self._fault
            return
        # The first one counts: a second changes nothing, and does not disturb the checkpoint or the way out.
        if self._leaving or not (self._save or self._time_is_up):
            return
        if not self.loop_looks:
            self._leaving = True
            raise StoppedEarly(self._reason(number))
        if not self._time_is_up:
            self.stop_signal = self.stop_signal or number

    def _reason(self, number: int) -> str:
        if self._time_is_up:
            return time_limit(self._limit_minutes or 0.0)
        return f"by {signal_name(number)}"

    def _wait(self) -> bytes:
        """Return the numbers of the signals that came, none when the run is over; send one where the time is up."""
        if self._limit_minutes is not None and not self._time_is_up:
            left = self.started + 60 * self._limit_minutes - time.monotonic()
            if left <= 0 or not select.select([self._wakeup_out], [], [], left)[0]:
                with self._leave_lock:
                    self._time_is_up = not (self._left.is_set() or self.loop_looks)
                    if self._time_is_up:
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                    else:
                        self._limit_minutes = None  # the loop looks at the clock
        return self._wakeup_out.recv(64)

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        # A second one, from an impatient hand or from both terminal and launcher, must not disturb the way out.
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Wait for signals and end the process where they ask for it.

        After SIGINT, and after a signal that would save before the first step, that is where the main thread is still
        running when the grace is over. One that does not save ends the process as it would without a handler.
        `before_end` is called before each.
        """
        while True:
            numbers = self._wait()
            if not numbers:  # the other end was closed: the run is over
                self._wakeup_out.close()
                return
            if signal.SIGINT in numbers and not self._left.wait(self._grace_seconds):
                self.before_end(self._reason(signal.SIGINT))
                end_interrupted()
            if self._fault is not None and not self._left.wait(LEAVE_SECONDS):
                self._last_words()
                os._exit(FAILED)
            for number in SAVING:
                looks_later = self.loop_looks and (self._save or self._time_is_up)
                if number not in numbers or self._fault is not None or looks_later:
                    continue
                if not (self._save or self._time_is_up):
                    self.before_end(self._reason(number))
                    if self._fault is not None:  # another rank's end, which the main thread raises
                        break
                    _set_c_handler(number, signal.SIG_DFL)
                    os.kill(os.getpid(), number)
                elif not self._left.wait(self._grace_seconds) and not self.loop_looks:
                    self.before_end(self._reason(number))
                    os._exit(DONE)


def ignore_sigterm() -> None:
    """Ignore SIGTERM from now on; callable from any thread."""
    _set_c_handler(signal.SIGTERM, signal.SIG_IGN)


def _set_c_handler(number: int, handler: int) -> None:
    """Set what the system does on a signal; Python's own `signal` works in the main thread only."""
    set_handler = ctypes.pythonapi.PyOS_setsig
    set_handler.restype = ctypes.c_void_p
    set_handler(number, ctypes.c_void_p(handler))


def die_with_launcher() -> None:
    """Under torchrun on Linux, ask the kernel to kill this rank when torchrun dies, however it dies.

    Without this, a torchrun that was killed with SIGKILL leaves ranks behind that train on and write checkpoints into
    the folder of the run that replaced them.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not hasattr(signal, "SIGKILL"):
        return
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux: no such call, and nothing else to use
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
