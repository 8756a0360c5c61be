"""Processes of this machine by number and start time, so that a number that was given out again is no other's."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_moe.training.verdict import SILENT, STOPPED


@dataclass(frozen=True)
class Process:
    """host: name and boot of its machine. pid, and start: in clock ticks since boot, 0 where it is not known."""

    host: str
    pid: int
    start: int

    def is_gone(self) -> bool:
        """Whether it has ended, a zombie included; False where nobody can say. To be asked on its own machine."""
        if not Path("/proc/self/stat").exists():
            return False
        state, start = _stat(self.pid)
        return state in ("", "Z", "X") or (self.start > 0 and start != self.start)

    def state(self) -> str:
        """STOPPED or SILENT, of one that is there and does not answer."""
        return STOPPED if _stat(self.pid)[0] in ("T", "t") else SILENT

    def send(self, number: int) -> None:
        """Send a signal, unless it is gone."""
        if not self.is_gone():
            try:
                os.kill(self.pid, number)
            except OSError:
                pass


@cache
def this_process() -> Process:
    """The process that asks."""
    return Process(_machine(), os.getpid(), _stat(os.getpid())[1])


def _machine() -> str:
    """Tells apart machines of one name, and containers on one machine, whose process numbers mean nothing outside."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # not Linux: the name has to do
        pass
    return " ".join(parts)


def _stat(pid: int) -> tuple[str, int]:
    """(state letter, start time) of /proc; ("", 0) of a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return "", 0
    return fields[0], int(fields[19])
