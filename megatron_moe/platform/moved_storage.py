"""Storages of the device that are copied to host memory, freed, and brought back under the same tensors.

A storage keeps its identity: it is resized to nothing and, later, to its size again. All tensors that use it are right
as long as none of them is read in between. Copies have a stream for each direction; events say which copy waits for
which, so that a copy and what is computed run at the same time.
"""

from __future__ import annotations

import bisect
import operator
import weakref

import torch
from torch import Tensor

from megatron_moe.platform.hardware import has_streams, kernel
from megatron_moe.platform.page_locked import host_memory

Event = torch.cuda.Event


class MovedStorage:
    """A storage that is copied from the device to host memory, and back."""

    def __init__(self, tensor: Tensor, pool: HostPool, lane: Lane) -> None:
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
    def return_to_device(self, lane: Lane) -> Event | None:
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


class Lane:
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


class HostPool:
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
            if self._free:
                _wait(self._free.pop(0))
            allocate = kernel(host_memory)
            buffer = _Buffer(allocate((_rounded(size),), torch.uint8, pinned=True))
        self.in_use += buffer.size
        return buffer

    def give(self, buffer: _Buffer, after: Event | None) -> None:
        """Take a buffer back, to be written again after an event."""
        buffer.free_after = after
        self.in_use -= buffer.size
        bisect.insort(self._free, buffer, key=_SIZE)


_SIZE = operator.attrgetter("size")


def _rounded(size: int) -> int:
    """Return a size with room for a few rows more: up to an eighth above."""
    step = 1 << max(size.bit_length() - 4, 12)
    return -(-size // step) * step


def _wait(buffer: _Buffer) -> None:
    """Wait for the last copy of a buffer that is dropped."""
    if buffer.free_after is not None:
        buffer.free_after.synchronize()
