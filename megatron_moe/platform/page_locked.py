"""Host memory that a CUDA device copies to: page-locked, of the size that was asked for.

torch's own allocator of page-locked memory takes the next power of two and never gives it back: 33 GiB would take 64.
Here pages are mapped, registered with CUDA as torch's distributed checkpoints do, and unmapped with the last tensor.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import torch

from megatron_moe.io.program import note
from megatron_moe.io.texts import size_text
from megatron_moe.platform.hardware import has_cuda, local_rank

_reported = False
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


def host_memory(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Return an uninitialized tensor in host memory; with `pinned`, page-locked where there is CUDA.

    Where CUDA refuses (a container's limits, or no memory to lock) the tensor is pageable, which is slower to copy to,
    and that is reported once per process.
    """
    size = math.prod(shape) * dtype.itemsize
    if not pinned or not has_cuda() or size == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    pages = mmap.mmap(-1, size)  # shared with forked processes, which would otherwise be given copies of locked pages
    tensor = torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
    refused = _page_lock(tensor.data_ptr(), size)
    if refused is None:
        weakref.finalize(pages, _unlock, tensor.data_ptr()).atexit = False
    else:
        _report(refused, size)
    return tensor


def page_locked_bytes(size: int) -> int:
    """Return the bytes that `host_memory` takes for a page-locked tensor of `size` bytes: whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _page_lock(address: int, size: int) -> str | None:
    """Register memory with CUDA; return why that is not possible, None where it is done."""
    try:
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
    except (RuntimeError, AttributeError, AssertionError) as refusal:  # torch without CUDA's runtime
        return f"{type(refusal).__name__}: {refusal}"
    return None if error == 0 else f"cudaHostRegister: error {error}"


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _report(refused: str, size: int) -> None:
    """Report the first refusal of this process."""
    global _reported
    if not _reported:
        _reported = True
        note(
            f"local rank {local_rank()}: {size_text(size)} of host memory cannot be page-locked ({refused}): copies "
            "from the device, for checkpoints, are slower; look at the memory that the node and the container have left"
        )
