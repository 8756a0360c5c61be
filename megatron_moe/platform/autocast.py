"""torch.autocast, which arithmetic whose dtype is part of a contract does not follow.

A surrounding autocast rounds every matrix product on its list to half precision, whatever dtype its operands were cast
to: the router's product, which decides for experts by differences of 1e-3, as well as the product of two fp32 numbers
in somebody's backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_autocast_on(device_type: str) -> bool:
    """Return whether operations on this type of device ("cpu", "cuda") are under autocast now; "meta" never is."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Run the block with autocast off for this type of device, and leave it afterwards as it was found."""
    if not is_autocast_on(device_type):
        yield
        return
    with torch.autocast(device_type, enabled=False):
        yield


def unaffected_by_autocast(function: _Function) -> _Function:
    """Decorate the forward or the backward of a `torch.autograd.Function`: it runs with autocast off.

    Both need it. A backward runs under the autocast of whoever calls `backward()`, not under that of its forward.
    Below `@staticmethod`; the first tensor among the arguments says which device it is.
    """

    @functools.wraps(function)
    def run(ctx: Any, *args: Any) -> Any:
        device_type = next(value.device.type for value in args if isinstance(value, Tensor))
        with without_autocast(device_type):
            return function(ctx, *args)

    return run  # type: ignore[return-value]
