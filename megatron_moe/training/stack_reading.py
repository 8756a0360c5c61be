"""What a thread is doing, read from its stack: whether it waits in a collective, or for the device.

Under gloo a rank waits in a collective. Under NCCL it goes on while the device waits, up to the next line that reads
from the device: `x.item()` waits in C, and the thread's stack ends with the frame of the line that calls it. A line may
have several calls; the frame's instruction says which of them is running.

The standard library is enough: it has to work while everything else hangs.
"""

from __future__ import annotations

import ast
import dis
import linecache
import re
import sys
import threading
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatron_moe.io.texts import inwards, place_in

Frames = list[tuple[FrameType, int, int]]
"""Innermost first: frame, line, index of the instruction."""

FOR_DEVICE = ", for the device"
# Wrappers around a collective, which are no collectives themselves.
_WRAPPERS = ("wrapper", "_object_to_tensor", "_tensor_to_object")
_WAIT = "wait"
_SYNCHRONIZE = ("synchronize", "_cuda_synchronize")
# Methods and functions that copy from the device to the host, or need a number that is there.
_READS = (
    *("item", "tolist", "cpu", "numpy", "to", "nonzero", "is_nonzero", "equal", "allclose", "masked_select"),
    *("unique", "unique_consecutive", "bincount", "copy_", "_local_scalar_dense"),
)
_CONVERSIONS = ("bool", "float", "int", "complex", "str", "repr", "format", "print", "list", "tuple")


@dataclass(frozen=True)
class ThreadActivity:
    """What a thread is doing."""

    waits_in: str | None
    """The collective that it waits in."""
    tensor: str | None
    """Dtype and shape of what it sends, where that is known."""
    number: int | None
    """How many collectives its group has begun on this rank, where that is known."""
    at: str
    """file:line in function, of this package where there is any on the stack."""


def current_activity(ignored: tuple[int, ...] = (), on_device: bool = False) -> ThreadActivity:
    """Return what this process is doing: the main thread, unless another thread waits in a collective.

    Backward passes run in threads of their own.

    Args:
        ignored: identifiers of threads that do not count.
        on_device: whether tensors are on a CUDA device, so that reading one waits for everything that is queued there.
    """
    found = []
    for _, frame in _threads(ignored):
        doing = activity_of(outwards(frame), on_device)
        if doing.waits_in is not None:
            return doing
        found.append(doing)
    return found[0]


def of_error(error: BaseException) -> ThreadActivity:
    """Return what was being done when `error` was raised.

    A line that reads from the device is no wait here: an error of a kernel before it is raised there.
    """
    return activity_of(list(reversed(list(inwards(error.__traceback__)))), on_device=False)


def stacks(ignored: tuple[int, ...] = ()) -> str:
    """Return the stacks of all threads of this process, main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in _threads(ignored):
        lines = "".join(traceback.format_stack(frame)).rstrip()
        texts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(texts)


def _threads(ignored: tuple[int, ...]) -> list[tuple[int, FrameType]]:
    """Return (identifier, innermost frame) of this process's threads, the main thread first."""
    main = threading.main_thread().ident
    return sorted(
        (entry for entry in sys._current_frames().items() if entry[0] not in ignored),
        key=lambda entry: (entry[0] != main, entry[0]),
    )


def outwards(frame: FrameType | None) -> Frames:
    """Return a frame and those that called it."""
    frames: Frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return frames


def activity_of(frames: Frames, on_device: bool) -> ThreadActivity:
    """Return what a thread with this stack is doing."""
    at = place_in((frame, line) for frame, line, _ in frames)
    collective = _collective(frames)
    if collective is not None:
        values = collective.f_locals
        return ThreadActivity(collective.f_code.co_name, _tensor(values), _number(values), at)
    call = _waiting_call(*frames[0], on_device) if frames else None
    if call is None:
        return ThreadActivity(None, None, None, at)
    if call == _WAIT:  # for a collective that was started before
        return ThreadActivity(f"a wait in {frames[0][0].f_code.co_name}", None, None, at)
    return ThreadActivity(f"{call}{FOR_DEVICE}", None, None, at)


def _collective(frames: Frames) -> FrameType | None:
    """Return the outermost function of torch.distributed on top of the stack."""
    found = None
    for frame, _, _ in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/torch/distributed/" in file and name not in _WRAPPERS:
            found = frame
        elif found is not None and "/torch/" not in file:
            break
    return found


def _tensor(values: dict[str, Any]) -> str | None:
    """Return dtype and shape of the tensor that a collective was given."""
    for name in ("tensor", "input_tensor", "input", "output", "object_list", "obj"):
        value = values.get(name)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return None


def _number(values: dict[str, Any]) -> int | None:
    """Return how many collectives the group has begun, counted by torch."""
    if "group" not in values or "torch.distributed" not in sys.modules:
        return None
    try:
        return (values["group"] or sys.modules["torch.distributed"].group.WORLD)._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):  # a group of another kind, or one that is being taken down
        return None


def _waiting_call(frame: FrameType, line: int, instruction: int, on_device: bool) -> str | None:
    """Return the call in which the innermost frame waits: wait, synchronize, item and so on; None for others.

    With `on_device`, calls that read from a CUDA device count, and so does a condition on a tensor.
    """
    if "threading" in frame.f_code.co_filename:
        return None
    text = linecache.getline(frame.f_code.co_filename, line)
    if _is_condition(frame, instruction):
        return "a condition" if on_device and _has_tensor(text, frame) else None
    waits: tuple[str, ...] = (_WAIT, *_SYNCHRONIZE)
    if on_device:
        waits += _READS
    call = _call(frame, instruction)
    if isinstance(call, ast.Name):
        return call.id if on_device and call.id in _CONVERSIONS and _has_tensor(text, frame) else None
    if isinstance(call, ast.Attribute):
        return _shown(call.attr) if call.attr in waits else None
    if call is None:
        for name in waits:
            if f".{name}(" in text:
                return _shown(name)
    return None


def _shown(name: str) -> str:
    return "synchronize" if name in _SYNCHRONIZE else name


def _call(frame: FrameType, instruction: int) -> ast.expr | None:
    """Return what is being called, by the instruction, a constant for what is no call.

    None where the source is not there, or spread over lines.
    """
    positions = getattr(frame.f_code, "co_positions", None)  # of Python 3.11
    if instruction < 0 or positions is None:
        return None
    places = list(positions())
    if instruction // 2 >= len(places):
        return None
    line, last_line, first, last = places[instruction // 2]
    if line is None or line != last_line:
        return None
    text = linecache.getline(frame.f_code.co_filename, line).encode()[first:last].decode(errors="replace")
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return expression.func if isinstance(expression, ast.Call) else ast.Constant(None)


def _is_condition(frame: FrameType, instruction: int) -> bool:
    if instruction < 0:
        return False
    name = dis.opname[frame.f_code.co_code[instruction]]
    return ("JUMP" in name and "_IF_" in name) or name in ("UNARY_NOT", "TO_BOOL")


def _has_tensor(line: str, frame: FrameType) -> bool:
    """Return whether a variable that the line names is a tensor."""
    for name in re.findall(r"[^\W\d]\w*", line):
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return True
    return False
