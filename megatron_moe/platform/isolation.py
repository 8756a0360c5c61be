"""Keeps what surrounds a computation out of it: torch.autocast, and the engine's scale of auxiliary losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_moe.platform.protocols import AutogradContext

# ---- torch.autocast.
#
# A surrounding autocast rounds every matrix product on its list to half precision, whatever dtype its operands were
# cast to: the router's product, which chooses experts by differences of 1e-3, as well as the product of two fp32
# numbers in a backward pass.


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


# ---- The engine's scale of auxiliary losses, a class attribute that outlives models and process groups.


@contextmanager
def without_loss_scale() -> Iterator[None]:
    """Run the block as if no step had set a scale yet, and restore the scale afterwards."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale
