"""SIGTERM saves and stops, Ctrl-C stops at once: on all ranks, and with no process left behind.

torchrun passes the signal it got on to every rank. A rank may be inside a collective at that moment, where Python runs
no signal handler; the wake-up pipe is written by the C handler all the same, and a thread that reads it ends the
process if the main thread has not done so in time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""

_PR_SET_PDEATHSIG = 1


class StopSignals:
    """What the operator asked for. Use as a context manager around a run.

    Args:
        save_on_sigterm: `--exit-signal-handler`: SIGTERM sets `stop_requested` instead of ending the process.
        grace_seconds: after Ctrl-C, how long the main thread may take to leave by itself.
    """

    def __init__(self, *, save_on_sigterm: bool, grace_seconds: float = 3.0) -> None:
        self.stop_requested = False
        self.interrupted = False
        self._save_on_sigterm = save_on_sigterm
        self._grace_seconds = grace_seconds
        self._previous: dict[int, object] = {}
        self._wakeup_in, self._wakeup_out = socket.socketpair()
        self._previous_fd = -1
        self._left = threading.Event()

    def __enter__(self) -> StopSignals:
        self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_interrupt)
        if self._save_on_sigterm:
            self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_terminate)
        self._wakeup_in.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._wakeup_in.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._wakeup_in.close()

    def _on_terminate(self, _number: int, _frame: FrameType | None) -> None:
        self.stop_requested = True

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        # A second one, from an impatient hand or from both terminal and launcher, must not disturb the way out.
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Wait for SIGINT; if the main thread is still here after the grace, end the process without it."""
        while True:
            numbers = self._wakeup_out.recv(64)
            if not numbers:  # the other end was closed: the run is over
                self._wakeup_out.close()
                return
            if signal.SIGINT in numbers and not self._left.wait(self._grace_seconds):
                os._exit(INTERRUPTED)


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
