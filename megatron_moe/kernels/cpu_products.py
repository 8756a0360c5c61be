"""Products of groups of rows on a CPU by the kernel in C, `cpu_products.c`.

Torch calls a library for each group: oneDNN for bf16, MKL for fp32, which leaves AVX-512 to Intel's processors. The
kernel computes all groups at once, where the processor has AVX-512 and no library is faster. Its bits are not always
torch's, so that it computes also while something watches torch's operations.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_moe.kernels.choice import in_memory, library, why_no_c
from megatron_moe.platform.cpu_half_gemm import multiply_in_fp32

_NAMES = {torch.float32: "grouped_product_fp32", torch.bfloat16: "grouped_product_bf16"}
_MULTIPLICATIONS_PER_THREAD = 2**20


class _Product(ctypes.Structure):
    """The argument of the functions in C, whose struct `Product` says what the fields are."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("left", "right", "result", "ends", "room")),
        *((name, ctypes.c_longlong) for name in ("groups", "rows", "height", "width", "depth")),
        *((name, ctypes.c_longlong) for name in ("left_stride", "right_stride", "right_group", "columns", "next")),
        *((name, ctypes.c_int) for name in ("over_rows", "transposed", "adds", "rounds", "threads")),
    )


def takes_products(left: Tensor, right: Tensor) -> bool:
    """Return whether the kernel multiplies these operands of `grouped_product`."""
    name = _NAMES.get(left.dtype)
    if name is None or not in_memory(left) or right.dtype != left.dtype or multiply_in_fp32(left):
        return False
    if why_no_c() is not None or not hasattr(library(), name) or (left.shape[-1] % 2 and right.dim() == 3):
        return False
    return left.dtype != torch.float32 or _library_leaves_avx512()


@functools.cache
def _library_leaves_avx512() -> bool:
    """Return whether torch multiplies fp32 by MKL, and the processor is not Intel's."""
    with suppress(OSError):
        return torch.backends.mkl.is_available() and "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    return False


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor, result: Tensor) -> None:
    """Write what `torch.nn.functional.grouped_mm` returns into `result`, of operands that `takes_products` takes.

    Args:
        left, right: [R, K] and [e, K, N], a matrix for each group of rows; or [N, R] and [R, K], a sum over the rows of
            each group.
        offsets: [e] int32, the end of each group's rows.
        result: [R, N] or [e, N, K], contiguous, in the operands' dtype.

    Raises:
        ValueError: the offsets decrease, or are beyond the rows.
    """
    _multiply(left.t() if right.dim() == 2 else left, right, offsets, result)


def add_sums(total: Tensor, left: Tensor, right: Tensor, offsets: Tensor, rounds: bool) -> None:
    """Add left_e^T right_e to the sum of each expert e, in place.

    Args:
        total: [e, N, K] fp32, contiguous.
        left, right: [R, N] and [R, K], which `takes_products` takes as left^T and right.
        offsets: [e] int32, the end of each expert's rows.
        rounds: whether to round each product to the operands' dtype before it is added.
    """
    _multiply(left, right, offsets, total, adds=True, rounds=rounds)


def _multiply(
    left: Tensor, right: Tensor, offsets: Tensor, result: Tensor, adds: bool = False, rounds: bool = False
) -> None:
    """Call the kernel. left: [R, ...], also for sums over rows; see `grouped_product` for the rest."""
    over_rows = right.dim() == 2
    transposed = not over_rows and right.stride(-2) == 1
    if left.stride(-1) != 1:
        left = left.contiguous()
    if right.stride(-1) != 1 and not transposed:
        right = right.contiguous()
    multiplications = left.numel() * right.shape[-1]
    threads = max(1, min(torch.get_num_threads(), multiplications // _MULTIPLICATIONS_PER_THREAD))
    room = np.empty(threads * ctypes.c_longlong.in_dll(library(), "product_room").value + 64, np.uint8)
    task = _Product(
        left=left.data_ptr(),
        right=right.data_ptr(),
        result=result.data_ptr(),
        ends=offsets.data_ptr(),
        room=-(-room.ctypes.data // 64) * 64,
        groups=offsets.shape[0],
        rows=left.shape[0],
        height=left.shape[1] if over_rows else 0,
        width=right.shape[-1],
        depth=0 if over_rows else right.shape[1],
        left_stride=left.stride(0),
        right_stride=right.stride(-1) if transposed else right.stride(-2),
        right_group=0 if over_rows else right.stride(0),
        over_rows=over_rows,
        transposed=transposed,
        adds=adds,
        rounds=rounds,
        threads=threads,
    )
    if not getattr(library(), _NAMES[left.dtype])(ctypes.byref(task)):
        raise ValueError(
            f"offsets {offsets.tolist()[:8]}...: must not decrease, nor be beyond the {left.shape[0]} rows"
        )
