"""Host memory that a CUDA device copies to, and storages of the device that are kept there for a while.

torch's own allocator of pinned memory takes the next power of two and never gives it back: 33 GiB would take 64. Here
pages are mapped, registered with CUDA as torch's distributed checkpoints do, and unmapped with the last tensor.

An offloaded storage is copied to host memory, freed, and brought back under the same tensors. It keeps its identity: it
is resized to nothing and, later, to its size again. All tensors that use it are right as long as none of them is read
in between. Copies have a stream for each direction; events say which copy waits for which, so that a copy and what is
computed run at the same time.
"""

from __future__ import annotations

import bisect
import math
import mmap
import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_moe.io.program import note
from megatron_moe.io.texts import size_text
from megatron_moe.platform.hardware import has_cuda, has_streams, kernel, local_rank

_reported = False
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


def host_memory(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Return an uninitialized tensor in host memory; with `pinned`, page-locked where there is CUDA.

    Where CUDA refuses (a container's limits, or no memory to lock) the tensor is pageable, which is slower to copy to,
    and that is reported once per process.
    """
    global _reported
    size = math.prod(shape) * dtype.itemsize
    if not pinned or not has_cuda() or size == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    pages = mmap.mmap(-1, size)  # shared with forked processes, which would otherwise be given copies of locked pages
    tensor = torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
    address, refused = tensor.data_ptr(), None
    try:
        if error := int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)):
            refused = f"cudaHostRegister: error {error}"
    except (RuntimeError, AttributeError, AssertionError) as refusal:  # torch without CUDA's runtime
        refused = f"{type(refusal).__name__}: {refusal}"
    if refused is None:
        weakref.finalize(pages, lambda: torch.cuda.cudart().cudaHostUnregister(address)).atexit = False
    elif not _reported:
        _reported = True
        note(
            f"local rank {local_rank()}: {size_text(size)} of host memory cannot be page-locked ({refused}): copies "
            "from the device, for checkpoints, are slower; look at the memory that the node and the container have left"
        )
    return tensor


# ---- Storages that are kept in host memory for a while.

Event = torch.cuda.Event


class OffloadedStorage:
    """A storage that is copied from the device to host memory, and back."""

    def __init__(self, tensor: Tensor, pool: PinnedPool, lane: CopyStream) -> None:
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self._device, self._pool, self._lane = tensor.device, pool, lane
        self._storage = weakref.ref(storage)
        self._held: torch.UntypedStorage | None = storage  # until it is freed
        self._buffer: _Buffer | None = pool.take(self.size)
        self._copied = lane.copy(self._buffer.memory[: self.size], self._bytes(storage), self._buffer.free_after)

    @property
    def is_leaving(self) -> bool:
        """Whether it is on the device and will be freed in the next layer or pass."""
        return self._held is not None

    def free(self) -> None:
        """Free the device's memory when the copy is made."""
        if self._held is not None:
            self._lane.make_current_wait(self._copied)
            self._held.resize_(0)
            self._held = None

    @torch.no_grad()
    def return_to_device(self, lane: CopyStream) -> Event | None:
        """Start copying it back, and return when it has arrived; None if it never left, or nobody holds it."""
        storage = self._storage()
        if self._held is not None or storage is None or self._buffer is None:
            self._held = None
            self._give_back(self._copied)
            return None
        storage.resize_(self.size)
        arrived = lane.copy(self._bytes(storage), self._buffer.memory[: self.size], self._copied)
        self._give_back(arrived)
        return arrived

    def _bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _give_back(self, after: Event | None) -> None:
        if self._buffer is not None:
            self._pool.give(self._buffer, after)
            self._buffer = None

    def __del__(self) -> None:
        """Give the host memory back where the graph is dropped without a backward pass."""
        self._give_back(self._copied)


class CopyStream:
    """A CUDA stream for copies in one direction; without streams a copy is made when it is asked for."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def copy(self, target: Tensor, source: Tensor, after: Event | None) -> Event | None:
        """Copy when the current stream is done with both, after an event of another lane; return when it is made."""
        if not has_streams():
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def make_current_wait(self, event: Event | None) -> None:
        """Let what is queued on the current stream from now on wait for a copy."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class _Buffer:
    """Page-locked bytes on the host. free_after: what has to have happened before they are written again."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.size = memory, memory.numel()
        self.free_after: Event | None = None


class PinnedPool:
    """Host memory that is used again, since locking pages takes longer than a copy.

    Rows of experts differ from step to step, so that a buffer may be larger than what is in it.
    """

    def __init__(self) -> None:
        self._free: list[_Buffer] = []
        self.in_use = 0

    def take(self, size: int) -> _Buffer:
        """Return the smallest free buffer that has room; a new one takes the place of the smallest."""
        index = bisect.bisect_left(self._free, size, key=_SIZE)
        if index < len(self._free):
            buffer = self._free.pop(index)
        else:
            dropped = self._free.pop(0) if self._free else None
            if dropped is not None and dropped.free_after is not None:
                dropped.free_after.synchronize()  # its last copy
            allocate = kernel(host_memory)
            step = 1 << max(size.bit_length() - 4, 12)  # room for a few rows more: up to an eighth
            buffer = _Buffer(allocate((-(-size // step) * step,), torch.uint8, pinned=True))
        self.in_use += buffer.size
        return buffer

    def give(self, buffer: _Buffer, after: Event | None) -> None:
        """Take a buffer back, to be written again after an event."""
        buffer.free_after = after
        self.in_use -= buffer.size
        bisect.insort(self._free, buffer, key=_SIZE)


_SIZE = operator.attrgetter("size")
