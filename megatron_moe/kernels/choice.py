"""Which form of an operation computes: a Triton kernel on a GPU, C for some on a CPU, torch's operations elsewhere.

An operation is written in torch where it belongs, and decorated with `has_kernel`, which names its entry in `KERNELS`.
What is decorated is not differentiable by itself: autograd functions call it. Two environment variables choose one form
for all tensors, MEGATRON_MOE_KERNELS, and for a CPU's, MEGATRON_MOE_CPU_KERNELS (`platform/env_vars.py`).

`launch` runs a Triton kernel: not for an empty grid, and not for tensors without memory.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron_moe.kernels import compiled
from megatron_moe.platform import env_vars

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Kernels(NamedTuple):
    """The kernels of an operation, of its arguments.

    Attributes:
        triton: "module.function" of this room, which launches the Triton kernel.
        c: calls the kernel in C, for a CPU; None if there is none.
    """

    triton: str
    c: Callable[..., Any] | None = None


KERNELS = {
    "adam_update": Kernels("triton_adam.adam_update", compiled.adam_update),
    "add_grouped_product": Kernels("triton_products.add_grouped_product"),
    "add_statistics": Kernels("triton_loss.add_statistics"),
    "choose_experts": Kernels("triton_routing.choose_experts"),
    "count_tokens": Kernels("triton_routing.count_tokens"),
    "expert_weights": Kernels("triton_routing.expert_weights"),
    "expert_weights_backward": Kernels("triton_routing.expert_weights_backward"),
    "gather_rows": Kernels("triton_dispatch.gather_rows"),
    "gradient_of_tile": Kernels("triton_loss.gradient_of_tile"),
    "join_positions": Kernels("triton_rotary.join_positions"),
    "join_positions_backward": Kernels("triton_rotary.join_positions_backward"),
    "sort_by_expert": Kernels("triton_dispatch.sort_by_expert"),
    "sum_rows": Kernels("triton_dispatch.sum_rows"),
    "weighted_swiglu_backward": Kernels(
        "triton_activation.weighted_swiglu_backward", compiled.weighted_swiglu_backward
    ),
    "weighted_swiglu_forward": Kernels("triton_activation.weighted_swiglu_forward", compiled.weighted_swiglu_forward),
}
"""Operation -> its kernels. The norm's, in C alone, are called where it is (`model/norm.py`)."""


def has_kernel(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a kernel compute an operation: Triton's on a GPU, C's on a CPU.

    A kernel that does not cover the arguments returns NotImplemented, and torch computes. The form in torch alone stays
    as the attribute `eager`. The first argument decides, a tensor or a list of them.

    Args:
        name: the operation's entry of `KERNELS`.
    """
    kernels = KERNELS[name]

    def decorated(operation: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(operation)
        def chosen(*args: _P.args, **named: _P.kwargs) -> _R:
            tensor: Any = args[0][0] if isinstance(args[0], list) else args[0]
            result: Any = NotImplemented
            if takes_kernels(tensor):
                result = _triton(kernels.triton)(*args, **named)
            elif kernels.c is not None and compiled.computes(tensor):
                result = kernels.c(*args, **named)
            return operation(*args, **named) if result is NotImplemented else result

        chosen.eager = operation  # type: ignore[attr-defined]
        return chosen

    return decorated


def takes_kernels(tensor: Tensor) -> bool:
    """Return whether kernels compute with this tensor: on a GPU, unless the variable says otherwise.

    Never in fp64, which they do not have. A plan's imagined GPU has none: its figures would depend on whether the
    machine that plans has Triton.
    """
    way = env_vars.chosen[env_vars.KERNELS]
    if way == "torch" or tensor.dtype == torch.float64:
        return False
    return way == "triton" or (tensor.device.type not in ("cpu", "meta") and why_no_triton() is None)


@functools.cache
def why_no_triton() -> str | None:
    """Return why Triton cannot be used, None if it can be."""
    try:
        importlib.import_module("triton")
    except Exception as error:  # a build for another torch raises errors of its own
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _triton(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(".")
    return getattr(importlib.import_module(f"megatron_moe.kernels.{module}"), function)


# ---- launching Triton kernels

Seen = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Takes a kernel, its arguments and its constants."""

_seeing: list[Seen] = []


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on a grid. Nothing runs where the grid is empty, or on the meta device, where a run is planned."""
    if not min(grid):
        return
    for see in _seeing:
        see(kernel, arguments, constants)
    if not any(isinstance(one, Tensor) and one.is_meta for one in arguments):
        kernel[tuple(grid)](*arguments, **constants)


@contextmanager
def launches_seen_by(see: Seen) -> Iterator[None]:
    """Call `see` before each launch of the block, also of one that has no memory to work on."""
    _seeing.append(see)
    try:
        yield
    finally:
        _seeing.remove(see)
