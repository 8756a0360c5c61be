"""Processes of the stages and of their ranks: started anew on a GPU, forked in a dry run, which spares the imports."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1


class Child:
    """A process that calls a function of a module; all that it starts ends with it.

    Args:
        function: of a module, so that a new process can import it.
        arguments: plain values.
        log: the file that it prints to.
        environment: variables that it has beside this process's.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Sequence[Any], log: Path, dry: bool, environment: dict[str, str]
    ) -> None:
        self.log = log
        context = multiprocessing.get_context("fork" if dry else "spawn")
        self.process = context.Process(target=_call, args=(function, tuple(arguments), str(log), environment, dry))
        self.process.start()

    def wait(self, seconds: float) -> int | None:
        self.process.join(max(0.0, seconds))
        return self.process.exitcode

    def end(self) -> None:
        """Kill it and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)

    def last_output(self, characters: int = 2000) -> str:
        try:
            return self.log.read_text(errors="replace")[-characters:].strip()
        except OSError:
            return ""


def _call(function: Callable[..., Any], arguments: tuple, log: str, environment: dict[str, str], dry: bool) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # sessions of its own do not end with the one above
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (as long as the process)
    status = 1
    try:
        function(*arguments)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if dry:
        os._exit(status)  # a forked process has its parent's exit functions
    sys.exit(status)


class RanksFailed(Exception):
    """Some ranks raised, died or did not end; the message has their last output."""


def run_ranks(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    ranks: int,
    folder: Path,
    seconds: float,
    dry: bool,
    one_device: bool,
) -> None:
    """Call `function(rank, ranks, store, *arguments)` on so many ranks, and wait.

    Args:
        folder: a new one, for the ranks' logs and the file by which they meet.
        one_device: whether all ranks are on the first device.

    Raises:
        RanksFailed: not every rank ended well in time.
    """
    folder.mkdir(parents=True)
    children = []
    for rank in range(ranks):
        local = 0 if one_device else rank
        environment = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(local)}
        given = (rank, ranks, str(folder / "store"), *arguments)
        children.append(Child(function, given, folder / f"rank{rank}.log", dry, environment))
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and any(child.wait(0) is None for child in children):
            if any(child.wait(0) not in (None, 0) for child in children):
                end = min(end, time.monotonic() + 5)  # the others have lost a peer
            children[0].wait(0.02)
            time.sleep(0.02)
        bad = {rank: child for rank, child in enumerate(children) if child.wait(0) != 0}
        if bad:
            raise RanksFailed(
                "\n".join(
                    f"rank {rank} {'did not end' if child.wait(0) is None else f'ended with {child.wait(0)}'}: "
                    f"{child.last_output(1200)}"
                    for rank, child in bad.items()
                )
            )
    finally:
        for child in children:
            child.end()
