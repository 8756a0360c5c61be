"""Keeps a surrounding torch.autocast out of a computation.

It rounds every matrix product on its list to half precision, whatever dtype its operands were cast to: the router's
product, which chooses experts by differences of 1e-3, as well as the product of two fp32 numbers in a backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_moe.platform.protocols import AutogradContext

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_autocast_on(device_type: str) -> bool:
    """Return whether operations on this type of device ("cpu", "cuda") are under autocast now; "meta" is not."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Run the block with autocast off for this type of device, and restore it afterwards."""
    if not is_autocast_on(device_type):
        yield
        return
    with torch.autocast(device_type, enabled=False):
        yield


def unaffected_by_autocast(function: _Function) -> _Function:
    """Decorate the forward or the backward of a `torch.autograd.Function`: it runs with autocast off.

    Both need it: a backward runs under the autocast of the code that calls `backward()`, not under that of its forward.
    The decorator is placed below `@staticmethod`; the device is that of the first tensor among the arguments.
    """

    @functools.wraps(function)
    def run(ctx: AutogradContext, *args: Any) -> Any:
        device_type = next(value.device.type for value in args if isinstance(value, Tensor))
        with without_autocast(device_type):
            return function(ctx, *args)

    return run  # type: ignore[return-value]
