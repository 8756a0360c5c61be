"""A command's time and memory, where its own peak is what is told."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A process starts with the peak of its parent on record, so a small interpreter is put between, which has hardly any.
_BETWEEN = """
import json, resource, subprocess, sys
status = subprocess.call(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([status, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024], file)
"""


@dataclass(frozen=True)
class Measured:
    """status: of its exit, negative for a signal. peak_bytes: of resident memory, of it or a child that had more."""

    status: int
    seconds: float
    processor_seconds: float
    peak_bytes: int
    stderr: str


def measured(command: Sequence[str], folder: Path, *, limit: int | None = None, quiet: bool = True) -> Measured:
    """Run a command to its end.

    Args:
        folder: to run it in. limit: bytes of address space it may have. quiet: keep what it says instead of showing it.
    """

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    with tempfile.TemporaryDirectory() as own:
        told, said = Path(own) / "used", Path(own) / "stderr"
        between = [sys.executable, "-I", "-S", "-c", _BETWEEN, str(told), *command]
        started = time.monotonic()
        with open(said, "w") as stderr:
            subprocess.run(between, cwd=folder, stderr=stderr if quiet else None, preexec_fn=limited, check=True)
        seconds = time.monotonic() - started
        status, processor_seconds, peak = json.loads(told.read_text())
        return Measured(status, seconds, processor_seconds, peak, said.read_text())
