"""What the audit knows of an operation: its kind, the operands whose dtypes must agree, and where it was asked for."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron_moe.precision.contract import declaration

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})

_MATMULS = frozenset(
    "mm addmm _addmm_activation bmm baddbmm addbmm addr mv addmv dot vdot matmul linear _grouped_mm convolution "
    "convolution_backward convolution_overrideable _convolution mkldnn_linear _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable".split()
)
_CASTS = frozenset("_to_copy copy_ copy _foreach_copy_ _foreach_copy".split())

# Rounds its result to the low precision; inside the one kernel torch adds in fp32.
_ROUNDED = frozenset(
    "sum mean nansum cumsum prod cumprod norm linalg_vector_norm _softmax _log_softmax logsumexp _logcumsumexp "
    "logcumsumexp var var_mean std std_mean _safe_softmax _foreach_norm".split()
)
# Adds into a low-precision tensor. Kernels differ: on CPU embedding_dense_backward and index_put round every addition
# (4,096 times 0.01 in bf16 is 4.0, not 41) and index_add does not; on CUDA index_add's atomics do.
_ACCUMULATED = frozenset(
    "index_add index_add_ scatter_add scatter_add_ index_reduce_ scatter_reduce scatter_reduce_ "
    "embedding_dense_backward _embedding_bag_backward".split()
)
_INDEX_PUT = frozenset("index_put index_put_ _index_put_impl_ _unsafe_index_put".split())
_COLLECTIVES = frozenset(
    "allreduce_ allreduce_coalesced_ reduce_ reduce_scatter_ _reduce_scatter_base_ "
    "reduce_scatter_tensor_coalesced_ all_reduce all_reduce_ reduce_scatter_tensor all_reduce_coalesced".split()
)
# Statistics that a kernel saved for its own backward pass are fp32 whatever the data is: they are no promotion.
_OWN_STATISTICS = frozenset(
    "mean rstd save_mean save_invstd save_rstd save_var running_mean running_var logsumexp L total_weight "
    "mean_dy mean_dy_xmu invstd".split()
)


@dataclass(frozen=True)
class Operation:
    """The properties of one overload of an operation, whatever its operands."""

    name: str  # e.g. "aten.mul"
    base: str  # the name without its namespace
    statistics: dict[int, str]  # the arguments that are a kernel's own statistics, position -> name
    written: dict[int, str]  # the arguments that are written to, position -> name
    returns_view: bool  # of an argument
    listed: bool  # whether operands are lists whose n-th members belong together
    matmul: bool
    cast: bool  # or a copy
    communicates: bool  # whether it is a collective


@functools.cache
def describe(func: Any) -> Operation:
    """Return the properties of an overload such as `torch.ops.aten.mul.Tensor`."""
    schema = func._schema
    namespace, base = schema.name.split("::")
    arguments = schema.arguments
    saves = base.startswith(("native_", "_", "cudnn_", "batch_norm", "miopen_", "nll_loss"))
    written, statistics = {}, {}
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written[position] = argument.name
        if saves and argument.name in _OWN_STATISTICS:
            statistics[position] = argument.name
    return Operation(
        name=f"{namespace}.{base}",
        base=base,
        statistics=statistics,
        written=written,
        returns_view=not written and any(r.alias_info is not None for r in schema.returns),
        listed=base.startswith(("_foreach_", "_fused_", "_amp_foreach")),
        matmul=namespace == "aten" and base in _MATMULS,
        cast=namespace == "aten" and base in _CASTS,
        communicates=namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"),
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors with memory of their own in nested lists, tuples and dicts, in order.

    Tensors of a sparse layout are left out: here they are the zeros that stand for an added gradient.
    """
    if isinstance(value, Tensor):
        return [value] * (value.layout == torch.strided)
    if isinstance(value, dict):
        value = list(value.values())
    found: list[Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            found += tensors_in(item)
    return found


def floating(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors of a floating-point dtype."""
    return list(filter(Tensor.is_floating_point, tensors))


def dtypes_of(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    """Return the tensors' dtypes."""
    return {tensor.dtype for tensor in tensors}


def widest(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the widest of the tensors' dtypes; 0 without a tensor."""
    return max((tensor.itemsize for tensor in tensors), default=0)


def mixed_operands(op: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> list[list[Tensor]]:
    """Return the floating-point operands of different dtypes that are combined with each other.

    The dtype of the result is decided by operands with dimensions; those without count if there are no others. A
    kernel's own saved statistics do not count.
    """
    groups: list[Sequence[Tensor]] = []
    if op.listed:
        members = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, (list, tuple)):
                members.append(tensors_in(value))
        length = max(map(len, members), default=0)
        groups += zip(*(member for member in members if len(member) == length))
    else:
        values = []
        for position, value in enumerate(args):
            if position not in op.statistics:
                values.append(value)
        for name, value in kwargs.items():
            if name not in op.statistics.values():
                values.append(value)
        groups.append(tensors_in(values))
    mixed = []
    for operands in map(floating, groups):
        deciding = list(filter(Tensor.dim, operands)) or operands
        if len(dtypes_of(deciding)) > 1:
            mixed.append(deciding)
    return mixed


def written_tensors(op: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that the operation writes to."""
    found = []
    for position, name in op.written.items():
        if position < len(args):
            found.append(args[position])
        elif name in kwargs:
            found.append(kwargs[name])
    return tensors_in(found)


def low_precision_reduction(
    op: Operation, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Sequence[Any]
) -> str:
    """Return how a reduction loses precision, e.g. "result rounded" or "may round every addition"; "" if it doesn't."""
    floats = floating(inputs)
    if not floats or floats[0].dtype not in LOW_PRECISION:
        return ""
    if op.communicates and op.base in _COLLECTIVES:
        return "summed over ranks"
    if op.communicates or dtypes_of(outputs).isdisjoint(LOW_PRECISION):
        return ""
    if op.base in _ROUNDED:
        return "result rounded"
    if op.base in _ACCUMULATED or (op.base in _INDEX_PUT and len(args) > 3 and args[3]):
        return "may round every addition"
    is_low = len(inputs) > 1 and dtypes_of(inputs) <= LOW_PRECISION
    if is_low and op.base in ("add", "add_") and _phase() == "backward":
        node = torch._C._current_autograd_node()
        if node is not None and node.name().endswith("AccumulateGrad"):  # it adds to a parameter's `.grad`
            return "every addition rounds"
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


def dtype_names(tensors: Sequence[Tensor]) -> str:
    """Return the names of the tensors' dtypes in order, each once."""
    return ", ".join(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors))


# ---- Where an operation was asked for: module, source line and declaration, from the Python frames above it.


_TORCH = os.path.dirname(torch.__file__) + os.sep
_TRACER_FILES = (__file__, os.path.join(os.path.dirname(__file__), "step.py"))
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
        names: id of a module of the traced model -> its qualified name.
        owners: id of a parameter -> name of the module that holds it.
    """

    def __init__(self, names: dict[int, str], owners: dict[int, str]) -> None:
        self._names, self._owners = names, owners
        self._nodes: dict[tuple[int, int], OperationLocation] = {}
        self._main_thread = threading.get_ident()
        self._declared: dict[CodeType, str | None] = {}
        self._skipped: dict[CodeType, bool] = {}

    def current(self) -> OperationLocation:
        """Return the location of the operation that is being dispatched."""
        phase, where, reason, module, open_scope = _phase(), UNKNOWN, None, UNKNOWN, True
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_name == _ENGINE_RUN:
                break
            if where == UNKNOWN and not self._is_internal(code):
                where = source_line(code.co_filename, frame.f_lineno)
            if code.co_name in _MODULE_CALL:
                open_scope = False  # a declaration of the caller does not cover the module that it calls
            if open_scope and reason is None:
                if code not in self._declared:
                    self._declared[code] = declaration(code)
                reason = self._declared[code]
            if module == UNKNOWN:
                module = self._module_of(frame)
            if module != UNKNOWN and where != UNKNOWN and not open_scope:
                break
            frame = frame.f_back
        location = OperationLocation(module, where, phase, reason)
        if phase == "backward" and UNKNOWN in (module, where):
            location = self._from_node(location)
        thread = threading.get_ident()
        # The node of an operation is made just before it is dispatched; a later operation without a node of its own
        # finds the entry taken.
        self._nodes.setdefault((thread, torch.autograd._get_sequence_nr() - 1), location)
        return location

    def error_location(self, trace: TracebackType | None) -> OperationLocation:
        """Return the location of an exception: its innermost frame outside torch, and the innermost module."""
        module, where = UNKNOWN, UNKNOWN
        while trace is not None:
            frame = trace.tb_frame
            if not self._is_internal(frame.f_code):
                where = source_line(frame.f_code.co_filename, trace.tb_lineno)
            inner = self._module_of(frame)
            if inner != UNKNOWN:
                module = inner
            trace = trace.tb_next
        return OperationLocation(module, where, "forward")

    def _from_node(self, location: OperationLocation) -> OperationLocation:
        """Return `location` with what frames do not say taken from the current autograd node's forward operation."""
        node = torch._C._current_autograd_node()
        if node is None:
            return location
        variable = getattr(node, "variable", None)
        if variable is not None:
            owner = self._owners.get(id(variable), UNKNOWN)
            made = OperationLocation(owner, "gradient accumulation", "backward")
        else:
            number, found = node._sequence_nr(), {}
            # Recomputation on a device thread counts its nodes anew; candidates that disagree are not used.
            for thread in (self._main_thread, threading.get_ident()):
                if (thread, number) in self._nodes:
                    candidate = self._nodes[thread, number]
                    found[candidate.module, candidate.where] = candidate
            if len(found) != 1:
                return location
            (made,) = found.values()
        if location.where == UNKNOWN:
            return replace(made, phase="backward")
        # Python code of a backward: its own line and declaration, its forward's module
        if location.module == UNKNOWN:
            return replace(location, module=made.module)
        return location

    def _module_of(self, frame: FrameType) -> str:
        code = frame.f_code
        if not code.co_argcount or code.co_varnames[0] != "self":
            return UNKNOWN
        owner = frame.f_locals.get("self")
        if not isinstance(owner, torch.nn.Module):
            return UNKNOWN
        return self._names.get(id(owner), UNKNOWN)

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


@functools.cache
def source_line(filename: str, line: int) -> str:
    """Return "file:line", with the file relative to the installed packages, to this one or to the working directory."""
    path = Path(filename)
    installed = (Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    for base in (*installed, Path(__file__).parents[2], Path.cwd()):
        if path.is_relative_to(base):
            return f"{path.relative_to(base)}:{line}"
    return f"{filename}:{line}"


def _phase() -> str:
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    return "backward"
