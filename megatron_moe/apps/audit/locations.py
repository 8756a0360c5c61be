"""Locate an operation in the traced program: module, source line and declaration, from the Python frames above it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from megatron_moe.precision.contract import declaration

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_TRACER_FILES = frozenset(_HERE + name for name in ("tracer.py", "locations.py", "step.py"))
_ENGINE_RUN = "_engine_run_backward"
_MODULE_CALL = ("_call_impl", "_wrapped_call_impl")
UNKNOWN = "?"


@dataclass(frozen=True)
class OperationLocation:
    """The location in the traced program that an operation comes from.

    Attributes:
        module: qualified name, "" for the root, "?" if unknown.
        where: "file:line", "?" if no Python frame is known.
        phase: "forward" or "backward".
        reason: the declaration that covers it, None without one.
    """

    module: str
    where: str
    phase: str
    reason: str | None = None


class LocationFinder:
    """A finder of the locations of operations.

    Backward operations that C++ runs have no Python frame of their own. They get the module and line of the forward
    operation that made their autograd node, identified by its sequence number.

    Args:
        name_of: returns the qualified name of a module, None for a module that is not part of the traced model.
        owner_of: returns the name of the module that holds a parameter, None for another tensor.
    """

    def __init__(
        self,
        name_of: Callable[[torch.nn.Module], str | None],
        owner_of: Callable[[torch.Tensor], str | None],
    ) -> None:
        self._name_of = name_of
        self._owner_of = owner_of
        self._nodes: dict[tuple[int, int], OperationLocation] = {}
        self._main_thread = threading.get_ident()
        self._declared: dict[CodeType, str | None] = {}
        self._skipped: dict[CodeType, bool] = {}

    def current(self) -> OperationLocation:
        """Return the location of the operation that is being dispatched."""
        backward = torch._C._current_graph_task_id() != -1
        location = self._from_frames(sys._getframe(2), "backward" if backward else "forward")
        if backward and UNKNOWN in (location.module, location.where):
            location = self._from_node(location)
        thread = threading.get_ident()
        # The node of an operation is made just before it is dispatched; a later operation without a node of its own
        # finds the entry taken.
        self._nodes.setdefault((thread, torch.autograd._get_sequence_nr() - 1), location)
        return location

    def gradient_accumulation(self) -> bool:
        """Return whether the current operation adds to a parameter's `.grad`."""
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        return node is not None and node.name().endswith("AccumulateGrad")

    def error_location(self, trace: TracebackType | None) -> OperationLocation:
        """Return the location of an exception: its innermost frame outside torch, and the innermost module."""
        module, where = UNKNOWN, UNKNOWN
        while trace is not None:
            frame = trace.tb_frame
            if not self._is_internal(frame.f_code):
                where = source_line(frame.f_code.co_filename, trace.tb_lineno)
            module = next((name for name in [self._module_of(frame)] if name is not None), module)
            trace = trace.tb_next
        return OperationLocation(module, where, "forward")

    def _from_frames(self, frame: FrameType | None, phase: str) -> OperationLocation:
        where, reason, module, open_scope = UNKNOWN, None, None, True
        while frame is not None:
            code = frame.f_code
            if code.co_name == _ENGINE_RUN:
                break
            if where == UNKNOWN and not self._is_internal(code):
                where = source_line(code.co_filename, frame.f_lineno)
            if code.co_name in _MODULE_CALL:
                open_scope = False  # a declaration of the caller does not cover the module that it calls
            if open_scope and reason is None:
                reason = self._declaration(code)
            if module is None:
                module = self._module_of(frame)
            if module is not None and where != UNKNOWN and not open_scope:
                break
            frame = frame.f_back
        return OperationLocation(UNKNOWN if module is None else module, where, phase, reason)

    def _from_node(self, location: OperationLocation) -> OperationLocation:
        """Return `location` with what frames do not say taken from the current autograd node's forward operation."""
        node = torch._C._current_autograd_node()
        if node is None:
            return location
        variable = getattr(node, "variable", None)
        if variable is not None:
            owner = self._owner_of(variable)
            made = OperationLocation(UNKNOWN if owner is None else owner, "gradient accumulation", "backward")
        else:
            number = node._sequence_nr()
            # Recomputation on a device thread counts its nodes anew; candidates that disagree are not used.
            threads = {self._main_thread, threading.get_ident()}
            found = {self._nodes[thread, number] for thread in threads if (thread, number) in self._nodes}
            if len({(one.module, one.where) for one in found}) != 1:
                return location
            made = found.pop()
        if location.where != UNKNOWN:  # Python code of a backward: its own line and declaration, its forward's module
            return replace(location, module=made.module if location.module == UNKNOWN else location.module)
        return replace(made, phase="backward")

    def _module_of(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if not code.co_argcount or code.co_varnames[0] != "self":
            return None
        owner = frame.f_locals.get("self")
        return self._name_of(owner) if isinstance(owner, torch.nn.Module) else None

    def _declaration(self, code: CodeType) -> str | None:
        if code not in self._declared:
            self._declared[code] = declaration(code)
        return self._declared[code]

    def _is_internal(self, code: CodeType) -> bool:
        """Return whether the code is torch's or the tracer's own, which is not where an operation was asked for."""
        if code not in self._skipped:
            name = code.co_filename
            self._skipped[code] = (
                name.startswith((_TORCH, "<"))
                or name in _TRACER_FILES
                or name == contextlib.__file__
                or code.co_name in ("__torch_dispatch__", "__torch_function__")  # other modes pass operations on
            )
        return self._skipped[code]


def source_line(filename: str, line: int) -> str:
    """Return "file:line", with the file relative to the installed packages, to this one or to the working directory."""
    return f"{_relative_path(filename)}:{line}"


@functools.cache
def _relative_path(filename: str) -> str:
    path = Path(filename)
    installed = (Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    for base in (*installed, Path(__file__).parents[3], Path.cwd()):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return filename
