"""Running a program's `main`: errors become one line on stderr and an exit status that says which kind it was."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from megatron_moe.config.errors import ConfigError, MachineError, RunFault
from megatron_moe.config.launch import rank_that_prints
from megatron_moe.io import launched

DONE, FAILED, USER_ERROR, INTERRUPTED, READER_GONE = 0, 1, 2, 130, 141
"""Exit statuses: INTERRUPTED is 128 + SIGINT, and READER_GONE 128 + SIGPIPE, as shells have it."""

SECONDS_FOR_RANK_0 = 20.0
"""So long other ranks wait with their end for rank 0, which may be slower, to say why the run ends."""


class StoppedEarly(SystemExit):
    """A run was asked to save and stop before its first step: the process ends with DONE, nothing is saved.

    reason: what asked, such as "by SIGTERM".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(DONE)
        self.reason = reason


def run_program(
    name: str,
    main: Callable[[list[str]], int],
    argv: list[str],
    *,
    interrupted: str = "interrupted",
    errors: tuple[type[Exception], ...] = (ConfigError,),
    rank: int | None = None,
) -> int:
    """Call `main` and return its exit status, or the one of the error that it raised.

    Args:
        name: of the program, before each line.
        interrupted: what is printed after Ctrl-C.
        errors: mistakes of the user's; OSError is one for programs that fail over files alone.
        rank: the caller's rank, the launcher's where None; rank 0 prints, for all ranks find the same error. One about
            a machine is printed by the first rank there, too.

    Returns:
        USER_ERROR for one of `errors`, FAILED for a RunFault, INTERRUPTED for Ctrl-C, READER_GONE where what read the
        output has ended, as in `... | head`. Other errors pass.
    """
    rank = rank_that_prints() if rank is None else rank

    is_first_here = os.environ.get("LOCAL_RANK") == "0"

    def report(text: str, of_machine: bool = False) -> bool:
        speaks = rank == 0 or (of_machine and is_first_here)
        if speaks:
            print(f"{name}: {text}", file=sys.stderr, flush=True)
            launched.leave(launched.REPORTED, text)
        return speaks

    try:
        with _flushing_output():
            return main(argv)
    except BrokenPipeError:
        with suppress(OSError):  # what is no file has no reader; Python would flush once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except errors as error:
        said = report(f"error: {error_text(error)}", isinstance(error, MachineError))
        if not said and "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun ends all ranks as soon as one has ended: the one that speaks may be slower.
            time.sleep(SECONDS_FOR_RANK_0)
        if not said and is_first_here:  # rank 0 may have no such mistake: it is this machine's alone
            report(f"error on {socket.gethostname()}: {error_text(error)}", of_machine=True)
        return USER_ERROR
    except RunFault as fault:
        report(f"stopped: {fault}")
        return FAILED
    except KeyboardInterrupt:
        report(interrupted)
        return INTERRUPTED


@contextmanager
def _flushing_output() -> Iterator[None]:
    """Write out what was printed when the block ends, also by SystemExit, as after `--help`."""
    try:
        yield
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def end_interrupted() -> NoReturn:
    """End a rank after Ctrl-C at once, with rank 0's word: leaving in good order would wait for ranks that are gone."""
    if rank_that_prints() == 0:
        note(f"{launched.name()}: interrupted")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        launched.leave(launched.REPORTED, "interrupted")
    else:  # the launcher's agent ends all ranks as soon as one has ended
        launched.wait_until_left(launched.REPORTED, SECONDS_FOR_RANK_0)
    sys.stdout.flush()
    os._exit(INTERRUPTED)


def error_text(error: Exception) -> str:
    """Return an error's message; for one of the system's the file and what was wrong with it, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def say(text: str) -> None:
    """Print one line of a program's result at once, also into a pipe."""
    print(text, flush=True)


def note(text: str) -> None:
    """Print one line for the person who waits, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def stage(text: str) -> None:
    """Say on rank 0 what a run is doing before the first line of its log."""
    if rank_that_prints() == 0:
        note(f"{launched.name()}: {text} ...")
