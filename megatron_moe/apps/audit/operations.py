"""Classify torch's operations for the audit: products, casts, reductions, and the operands whose dtypes must agree."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """Return all tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
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
