"""Copies between the host and the device that neither waits for: through pinned memory, with an event."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_moe.platform.hardware import device, has_cuda


class HostCopy:
    """A copy of a tensor that is on its way to the host.

    Work that is queued between the construction and `result` keeps the device busy while the host waits.

    Args:
        tensor: on this process's device; without CUDA, or on the meta device, it is taken as it is.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._copy = tensor
        if has_cuda() and not tensor.is_meta:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def result(self) -> Tensor:
        """Return the copy in the host's memory; waits for what was queued before the construction, and no longer."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._copy


def on_device(values: Sequence[float], dtype: torch.dtype, to: torch.device | None = None) -> Tensor:
    """Return these numbers of the host as a tensor on the device, or on another, without waiting for it."""
    return torch.tensor(values, dtype=dtype, pin_memory=has_cuda()).to(to or device(), non_blocking=True)
