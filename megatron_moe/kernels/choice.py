"""Which form of an operation computes: a Triton kernel on a GPU, C for some on a CPU, torch's operations elsewhere.

An operation is written in torch where it belongs, and decorated with `has_kernel`, which names the module of this room
with a function of the same name and arguments that launches a kernel; `compiled.py` has one for some of them that calls
C. What is decorated is not differentiable by itself: autograd functions call it. Two environment variables choose one
form for all tensors, MEGATRON_MOE_KERNELS, and for a CPU's, MEGATRON_MOE_CPU_KERNELS (`platform/switches.py`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron_moe.kernels import compiled
from megatron_moe.platform import switches

_P = ParamSpec("_P")
_R = TypeVar("_R")


def has_kernel(module: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a kernel compute an operation: of a module of this room on a GPU, of `compiled.py` on a CPU.

    A kernel that does not cover the arguments returns NotImplemented, and torch computes. The form in torch alone stays
    as the attribute `eager`. The first argument decides, a tensor or a list of them.

    Args:
        module: the file of this room that has a function of the operation's name.
    """

    def decorated(operation: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(operation)
        def chosen(*args: _P.args, **named: _P.kwargs) -> _R:
            tensor: Any = args[0][0] if isinstance(args[0], list) else args[0]
            kernel: Callable[..., Any] | None
            if takes_kernels(tensor):
                kernel = _kernel(module, operation.__name__)
            else:
                kernel = compiled.operation(operation.__name__, tensor)
            result = NotImplemented if kernel is None else kernel(*args, **named)
            return operation(*args, **named) if result is NotImplemented else result

        chosen.eager = operation  # type: ignore[attr-defined]
        return chosen

    return decorated


def takes_kernels(tensor: Tensor) -> bool:
    """Return whether kernels compute with this tensor: on a GPU, unless the variable says otherwise.

    Never in fp64, which they do not have. A plan's imagined GPU has none: its figures would depend on whether the
    machine that plans has Triton.
    """
    way = switches.kernels()
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
def _kernel(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"megatron_moe.kernels.{module}"), name)
