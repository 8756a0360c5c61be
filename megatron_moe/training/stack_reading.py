"""Which call the innermost frame of a thread is in, where that call is C's and has no frame of its own.

`x.item()` waits for the device in C: the thread's stack ends with the frame of the line that calls it. A line may have
several calls; the frame's instruction says which of them is running.
"""

from __future__ import annotations

import ast
import dis
import linecache
import re
from types import FrameType

Frames = list[tuple[FrameType, int, int]]
"""Innermost first: frame, line, index of the instruction."""

_WAIT = "wait"
_SYNCHRONIZE = ("synchronize", "_cuda_synchronize")
# Methods and functions that copy from the device to the host, or need a number that is there.
_READS = (
    *("item", "tolist", "cpu", "numpy", "to", "nonzero", "is_nonzero", "equal", "allclose", "masked_select"),
    *("unique", "unique_consecutive", "bincount", "copy_", "_local_scalar_dense"),
)
_CONVERSIONS = ("bool", "float", "int", "complex", "str", "repr", "format", "print", "list", "tuple")


def waiting_call(entry: tuple[FrameType, int, int], on_device: bool) -> str | None:
    """Return the call in which the innermost frame waits: wait, synchronize, item and so on; None for others.

    With `on_device`, calls that read from a CUDA device count, and so does a condition on a tensor.
    """
    frame, line, instruction = entry
    if "threading" in frame.f_code.co_filename:
        return None
    text = linecache.getline(frame.f_code.co_filename, line)
    if _is_condition(frame, instruction):
        return "a condition" if on_device and _has_tensor(text, frame) else None
    call = _call(frame, instruction)
    if call is None:
        names = [name for name in (_WAIT, *_SYNCHRONIZE, *(_READS if on_device else ())) if f".{name}(" in text]
        return _shown(names[0]) if names else None
    name, of_object = call
    if of_object:
        return _shown(name) if name in (_WAIT, *_SYNCHRONIZE) or (on_device and name in _READS) else None
    return name if on_device and name in _CONVERSIONS and _has_tensor(text, frame) else None


def _shown(name: str) -> str:
    return "synchronize" if name in _SYNCHRONIZE else name


def _call(frame: FrameType, instruction: int) -> tuple[str, bool] | None:
    """Return the name that is being called, and whether it is an attribute of something; "" for what is no such call.

    None where the source is not there, or spread over lines.
    """
    positions = getattr(frame.f_code, "co_positions", None)  # of Python 3.11
    if instruction < 0 or positions is None:
        return None
    places = list(positions())
    line, last_line, first, last = places[instruction // 2] if instruction // 2 < len(places) else (None,) * 4
    if line is None or line != last_line:
        return None
    text = linecache.getline(frame.f_code.co_filename, line).encode()[first:last].decode(errors="replace")
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    called = expression.func if isinstance(expression, ast.Call) else None
    if isinstance(called, ast.Attribute):
        return called.attr, True
    return (called.id if isinstance(called, ast.Name) else ""), False


def _is_condition(frame: FrameType, instruction: int) -> bool:
    name = dis.opname[frame.f_code.co_code[instruction]] if instruction >= 0 else ""
    return ("JUMP" in name and "_IF_" in name) or name in ("UNARY_NOT", "TO_BOOL")


def _has_tensor(line: str, frame: FrameType) -> bool:
    """Return whether a variable that the line names is a tensor."""
    values = [frame.f_locals.get(name, frame.f_globals.get(name)) for name in re.findall(r"[^\W\d]\w*", line)]
    return any(hasattr(value, "shape") and hasattr(value, "dtype") for value in values)
