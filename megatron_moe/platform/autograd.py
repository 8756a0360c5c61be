"""Functions of the graph that cost the host less than torch's own.

A layer's pass on a GPU is over some twenty of them, and waits for the host where its kernels are small.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch

from megatron_moe.platform.protocols import AutogradContext

_Backward = TypeVar("_Backward", bound=Any)


class Function(torch.autograd.Function):
    """torch's, of which functorch's transforms know nothing: torch looks for them and their tensors at each call."""

    apply: Any = vars(torch._C._FunctionBase)["apply"]


def once_differentiable(backward: _Backward) -> _Backward:
    """Decorate a backward whose gradients have none, with torch's decorator where somebody asks for a graph of them."""
    guarded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: AutogradContext, *grads: Any) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run  # type: ignore[return-value]
