"""What the audit knows of an operation: its kind, the operands whose dtypes must agree, and where it was asked for."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron_moe.precision.contract import declaration

LOW_PRECISION = (torch.bfloat16, torch.float16)

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
    """The properties of one overload of an operation, whatever its operands.

    Attributes:
        name: e.g. "aten.mul".
        base: the name without its namespace.
        statistics: positions of the arguments that are a kernel's own statistics.
        statistics_names: their names.
        written: positions of the arguments that are written to.
        written_names: their names.
        returns_view: whether the result is a view of an argument.
        listed: whether operands are lists whose n-th members belong together.
        matmul: whether it is a matrix product.
        cast: whether it is a cast or a copy.
        communicates: whether it is a collective.
    """

    name: str
    base: str
    statistics: frozenset[int]
    statistics_names: frozenset[str]
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    returns_view: bool
    listed: bool
    matmul: bool
    cast: bool
    communicates: bool


@functools.cache
def describe(func: Any) -> Operation:
    """Return the properties of an overload such as `torch.ops.aten.mul.Tensor`."""
    schema = func._schema
    namespace, base = schema.name.split("::")
    arguments = schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    statistics = [
        i
        for i, a in enumerate(arguments)
        if a.name in _OWN_STATISTICS
        and base.startswith(("native_", "_", "cudnn_", "batch_norm", "miopen_", "nll_loss"))
    ]
    return Operation(
        name=f"{namespace}.{base}",
        base=base,
        statistics=frozenset(statistics),
        statistics_names=frozenset(arguments[i].name for i in statistics),
        written=tuple(written),
        written_names=tuple(arguments[i].name for i in written),
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
        return [value] if value.layout == torch.strided else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def operand_groups(op: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> list[list[Tensor]]:
    """Return the floating-point operands that are combined with each other, without a kernel's own saved statistics."""
    if op.listed:
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
        members = [tensors_in(value) for value in lists]
        length = max((len(member) for member in members), default=0)
        return [
            [member[i] for member in members if len(member) == length and member[i].is_floating_point()]
            for i in range(length)
        ]
    values = [value for i, value in enumerate(args) if i not in op.statistics]
    values += [value for name, value in kwargs.items() if name not in op.statistics_names]
    return [[tensor for tensor in tensors_in(values) if tensor.is_floating_point()]]


def deciding_operands(operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the operands whose dtype decides the result's: those with dimensions, or all if none has any."""
    return [tensor for tensor in operands if tensor.dim() > 0] or list(operands)


def written_tensors(op: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that the operation writes to."""
    found = [args[i] for i in op.written if i < len(args)]
    found += [kwargs[name] for name in op.written_names if name in kwargs]
    return tensors_in(found)


def low_precision_reduction(
    op: Operation, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Sequence[Any]
) -> str:
    """Return how a reduction loses precision, e.g. "result rounded" or "may round every addition"; "" if it doesn't."""
    floats = [tensor for tensor in inputs if tensor.is_floating_point()]
    if not floats or floats[0].dtype not in LOW_PRECISION:
        return ""
    if op.communicates:
        return "summed over ranks" if op.base in _COLLECTIVES else ""
    if not any(tensor.dtype in LOW_PRECISION for tensor in outputs):
        return ""
    if op.base in _ROUNDED:
        return "result rounded"
    if op.base in _ACCUMULATED or (op.base in _INDEX_PUT and len(args) > 3 and args[3]):
        return "may round every addition"
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


def dtype_names(tensors: Sequence[Tensor]) -> str:
    """Return the names of the tensors' dtypes in order, each once."""
    return ", ".join(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors))


def width(dtype: torch.dtype) -> int:
    """Return the bytes of a floating-point dtype; the wider of two has more."""
    return dtype.itemsize


# ---- Where an operation was asked for: module, source line and declaration, from the Python frames above it.


_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_TRACER_FILES = frozenset(_HERE + name for name in ("tracer.py", "operations.py", "step.py"))
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
                if code not in self._declared:
                    self._declared[code] = declaration(code)
                reason = self._declared[code]
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
    for base in (*installed, Path(__file__).parents[2], Path.cwd()):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return filename
