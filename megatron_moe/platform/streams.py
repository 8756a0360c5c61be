"""A CUDA stream next to the current one, and copies between host and device that neither waits for.

The side stream is for work that needs few results of others, and hides behind their messages.

A tensor that one stream wrote and another reads needs two things, in forward and again, the other way round, in
backward: the reader waits for the writer, and the allocator has to know of the reader, since it would otherwise hand
the memory out again while the reader is still at work. `fork` and `join` do both, on the way to the side stream and
back.
Autograd runs the backward of an operation on the stream of its forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron_moe.platform.hardware import device, has_cuda
from megatron_moe.platform.protocols import AutogradContext


@functools.cache
def _side(device: int) -> torch.cuda.Stream:
    """Return the side stream of a device, the same one for all layers: they do not run at the same time."""
    return torch.cuda.Stream(device)


def side() -> torch.cuda.Stream:
    """Return the side stream of the current device."""
    return _side(torch.cuda.current_device())


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, origin: torch.cuda.Stream, target: torch.cuda.Stream) -> Tensor:
        ctx.streams = origin, target
        target.wait_stream(origin)
        tensor.record_stream(target)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        origin, target = ctx.streams
        origin.wait_stream(target)
        grad.record_stream(origin)
        return grad, None, None


def fork(tensor: Tensor) -> Tensor:
    """Return a tensor of the current stream for the side stream, which waits for what is queued on this one so far.

    What is queued on the current stream after this call runs next to the side stream's work. Backward: the current
    stream waits for the gradient.
    """
    return _Crossing.apply(tensor, torch.cuda.current_stream(), side())


def join(tensor: Tensor) -> Tensor:
    """Return a tensor of the side stream for the current one, which waits for it. Backward: the other way round."""
    return _Crossing.apply(tensor, side(), torch.cuda.current_stream())


def keep(value: Any) -> None:
    """Keep the memory of tensors for the current stream, which reads what others have written.

    value: a tensor, or a tuple, list or dataclass of such; all else in it is passed over.
    """
    if isinstance(value, Tensor):
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream())
    elif isinstance(value, (tuple, list)):
        for part in value:
            keep(part)
    elif dataclasses.is_dataclass(value):
        keep(list(vars(value).values()))


def on_side() -> AbstractContextManager[Any]:
    """Return a context in which work is queued on the side stream."""
    return torch.cuda.stream(side())


# ---- Copies through pinned memory, with an event.


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
