"""Places in the code as texts: file:line in function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGE = str(Path(__file__).resolve().parents[1])  # and of the tools, whose folder begins alike


def place_of(error: BaseException) -> str:
    """Return where an error was raised, as the innermost line of this package where its traceback has any."""
    return place_in((frame, line) for frame, line, _ in reversed(list(inwards(error.__traceback__))))


def place_in(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of this package, else of a file that is not torch's, else of all; "nowhere" of none.

    Args:
        frames: (frame, line) from the innermost on.
    """
    known = list(frames)
    ours = [entry for entry in known if entry[0].f_code.co_filename.startswith(_PACKAGE)]
    outside = [entry for entry in known if "/torch/" not in entry[0].f_code.co_filename]
    shown = next(iter(ours or outside or known), None)
    return "nowhere" if shown is None else _text(*shown)


def inwards(trace: TracebackType | None) -> Iterator[tuple[FrameType, int, int]]:
    """Yield (frame, line, index of the instruction) of a traceback, from the outermost on."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno, trace.tb_lasti
        trace = trace.tb_next


def _text(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    short = str(Path(file).relative_to(Path(_PACKAGE).parent)) if file.startswith(_PACKAGE) else file
    return f"{short}:{line} in {frame.f_code.co_name}"
