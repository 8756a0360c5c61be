"""What a rank and the launcher of `megatron-moe train` or `evaluate` agree on: a folder for what is to be said once.

The launcher makes the folder, names it to its ranks in the environment, and reads it when they have ended. Under
torchrun, or without a launcher, there is none.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

from megatron_moe.config.command_line import SCRIPT, program_name

FOLDER = "MEGATRON_MOE_LAUNCHER"
"""Environment variable: the launcher's folder on this machine."""
COMMAND = "MEGATRON_MOE_COMMAND"
"""Environment variable: the launcher's command line."""

REPORTED, CONCLUSION = "reported.txt", "conclusion.txt"
"""Files there: that a rank has printed why the run ended, and the watchdog's conclusion, which the launcher prints."""

LAUNCHER = "megatron-moe train"
"""The command that starts ranks, unless `COMMAND` begins with another one."""
FIRST_NOTE_SECONDS = 10.0


def name() -> str:
    """Return the program's name for messages: the launcher's if it started this process, else what the user started."""
    if FOLDER not in os.environ:
        return program_name(SCRIPT)
    return " ".join(os.environ.get(COMMAND, LAUNCHER).split()[:2])


def command() -> str:
    """Return the command line that started the run on this machine, quoted for a shell: the launcher's, if any."""
    return os.environ.get(COMMAND) or shlex.join(sys.orig_argv)


def folder() -> Path | None:
    """Return the launcher's folder, None without one."""
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else None


def not_met(where: str, error: BaseException) -> str:
    """Return one line on ranks that could not meet at an address, with what to change."""
    if "EADDRINUSE" in str(error):
        return f"{where}: another program listens there; choose another port, the same on every node"
    reason = str(error).partition("\n")[0].rstrip(".")
    return (
        f"{where}: the ranks could not meet there ({reason}); start the same command on every node, with the address "
        "and an open port of the first"
    )


def leave(file: str, text: str) -> bool:
    """Write a text for the launcher; return whether it will find it."""
    where = folder()
    if where is None:
        return False
    try:
        (where / file).write_text(text, encoding="utf-8")
    except OSError:  # the launcher is gone, and its folder with it
        return False
    return True


def wait_until_left(file: str, seconds: float) -> None:
    """Wait until another rank of this machine has written a file of the launcher's, at most so long; none: return."""
    where, deadline = folder(), time.monotonic() + seconds
    while where is not None and where.exists() and not (where / file).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


class Waiting:
    """Decides when to say that something is still waited for: after `FIRST_NOTE_SECONDS`, and then ever more rarely."""

    def __init__(self) -> None:
        self._began, self._next = time.monotonic(), FIRST_NOTE_SECONDS

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._began

    def is_due(self) -> bool:
        """Return whether it is time to say so; the next time is when it has taken twice as long."""
        if self.seconds < self._next:
            return False
        self._next = 2 * self.seconds
        return True
