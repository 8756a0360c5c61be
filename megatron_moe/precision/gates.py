"""Gates, which report a mismatch of dtypes where it arises, with the module that produced it and the flag to change.

Without them a tensor of the wrong dtype is passed on until some kernel refuses it ("mat1 and mat2 must have the same
dtype"), modules away from the cause, or until one silently promotes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_moe.platform.numerics import is_autocast_on
from megatron_moe.precision.contract import PrecisionError


def require_dtype(tensor: Tensor, wanted: torch.dtype, *, what: str, producer: str, remedy: str) -> None:
    """Refuse a tensor of another dtype than `wanted`.

    Args:
        what: the tensor, in words ("the experts' output").
        producer: the module or function that made it.
        remedy: the change that works: a flag, or a cast in the producer.

    Raises:
        PrecisionError: naming producer, tensor, both dtypes and the remedy.
    """
    if tensor.dtype != wanted:
        raise PrecisionError(f"{what} from {producer} is {tensor.dtype}, must be {wanted}; {remedy}")


class _Trail:
    """The name of the module that returned last, which is the likely producer of the next tensor."""

    def __init__(self) -> None:
        self.last = "the model's input"


class _Note:
    """A forward hook that records that a module without submodules has returned."""

    def __init__(self, name: str, trail: _Trail) -> None:
        self._name, self._trail = name, trail

    def __call__(self, module: torch.nn.Module, args: object, output: object) -> None:
        self._trail.last = self._name


class _Gate:
    """A forward pre-hook that checks the input of a module that multiplies it by its weights."""

    def __init__(self, name: str, trail: _Trail) -> None:
        self._name, self._trail = name, trail

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = getattr(args[0], "rows", args[0]) if args else None  # the experts get their rows in a record
        given = kwargs.get("weight")  # tied tables are passed in
        weights = [given] if isinstance(given, Tensor) else list(module.parameters(recurse=False))
        if not isinstance(rows, Tensor):
            return
        for weight in weights:
            if weight.dim() <= 1 or weight.dtype == rows.dtype:
                continue
            made_by = f" (last operation {rows.grad_fn.name()})" if rows.grad_fn is not None else ""
            autocast = " (torch.autocast is on: call the model without it)" if is_autocast_on(rows.device.type) else ""
            raise PrecisionError(
                f"{self._name} ({type(module).__name__}) got {rows.dtype} input {list(rows.shape)}, its weight is "
                f"{weight.dtype}; the input came from {self._trail.last}{made_by}, which has to return {weight.dtype}. "
                f"megatron-moe audit, or --audit-precision, names the line that changed it; --keep-fp32 {self._name} "
                f"makes this module compute in fp32{autocast}"
            )


def install_gates(model: torch.nn.Module, multiplies: Callable[[torch.nn.Module], bool]) -> int:
    """Install a gate before every module of `model` that multiplies, and hooks that record which module returned.

    They cost a Python call per module and pass, and no arithmetic.

    Args:
        multiplies: whether a module is a product of its first argument with its own weights, of one dtype.

    Returns:
        The number of gates.
    """
    trail, count = _Trail(), 0
    for name, module in _named(model):
        if multiplies(module):
            module.register_forward_pre_hook(_Gate(name, trail), with_kwargs=True)
            count += 1
        if next(module.children(), None) is None:
            module.register_forward_hook(_Note(name, trail))
    return count


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((name or type(model).__name__, module) for name, module in model.named_modules())
