"""What a thread is doing, read from its stack: waiting in which collective, with which tensor, called from where.

Standard library only: it has to work while everything else hangs.
"""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_PACKAGE = str(Path(__file__).resolve().parents[1])
_WAITS = (".wait(", "synchronize(")
# Wrappers around a collective, which are no collectives themselves.
_WRAPPERS = ("wrapper", "_object_to_tensor", "_tensor_to_object")


@dataclass(frozen=True)
class Doing:
    """What a rank's thread does.

    waits_in: the collective it waits in, or None. tensor: dtype and shape of what it sends, number: how many
    collectives its group has begun on this rank; None where that is not known. at: file:line in function, of our own
    code where there is any on the stack.
    """

    waits_in: str | None
    tensor: str | None
    number: int | None
    at: str


Frames = list[tuple[FrameType, int]]
"""Innermost first: frame and line."""


def of_this_process(besides: tuple[int, ...] = ()) -> Doing:
    """What the main thread does; or what another one waits in, where backward passes run beside the main thread.

    Args:
        besides: identifiers of threads that do not count.
    """
    frames = sys._current_frames()
    main = threading.main_thread().ident
    ahead = sorted((ident for ident in frames if ident not in besides), key=lambda ident: ident != main)
    found = [_read(list(_outwards(frames[ident]))) for ident in ahead]
    return next((doing for doing in found if doing.waits_in is not None), found[0])


def of_error(error: BaseException) -> Doing:
    """What was being done when `error` was raised."""
    return _read(list(reversed(list(_inwards(error.__traceback__)))))


def stacks(besides: tuple[int, ...] = ()) -> str:
    """The stacks of all threads of this process, main thread first."""
    frames, named = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    texts = []
    for ident in sorted((i for i in frames if i not in besides), key=lambda i: (i != main, i)):
        lines = "".join(traceback.format_stack(frames[ident])).rstrip()
        texts.append(f"thread {named.get(ident, ident)}:\n{lines}")
    return "\n".join(texts)


def _outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _inwards(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _read(frames: Frames) -> Doing:
    collective, values = _collective(frames)
    ours = [entry for entry in frames if entry[0].f_code.co_filename.startswith(_PACKAGE)]
    outside = [entry for entry in frames if "/torch/" not in entry[0].f_code.co_filename]
    place = next(iter(ours or outside or frames), None)
    return Doing(collective, _tensor(values), _number(values), "nowhere" if place is None else _at(*place))


def _collective(frames: Frames) -> tuple[str | None, dict[str, Any]]:
    """The outermost function of torch.distributed on top of the stack with its variables, or the wait for one that was
    started before."""
    found = None
    for frame, _ in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/torch/distributed/" in file and name not in _WRAPPERS:
            found = frame
        elif found is not None and "/torch/" not in file:
            break
    if found is not None:
        return found.f_code.co_name, found.f_locals
    for frame, line in frames[:1]:
        text = linecache.getline(frame.f_code.co_filename, line)
        if any(wait in text for wait in _WAITS) and "threading" not in frame.f_code.co_filename:
            return f"a wait in {frame.f_code.co_name}", {}
    return None, {}


def _tensor(values: dict[str, Any]) -> str | None:
    """dtype and shape of what a collective was given."""
    for name in ("tensor", "input_tensor", "input", "output", "object_list", "obj"):
        value = values.get(name)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return None


def _number(values: dict[str, Any]) -> int | None:
    """How many collectives the group has begun, counted by torch."""
    if "group" not in values or "torch.distributed" not in sys.modules:
        return None
    try:
        return (values["group"] or sys.modules["torch.distributed"].group.WORLD)._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):  # a group of another kind, or one that is being taken down
        return None


def _at(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    short = str(Path(file).relative_to(Path(_PACKAGE).parent)) if file.startswith(_PACKAGE) else file
    return f"{short}:{line} in {frame.f_code.co_name}"
