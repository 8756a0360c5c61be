"""The precision contract on tensors: declared mixing of dtypes, fp32 islands, and the checks of a run.

Code that mixes dtypes on purpose declares it with a reason. The decorators write a name into a register, which the
audit reads, and return the function or class unchanged, so that a declaration costs nothing when the code runs.

An fp32 island is a module that stores and computes fp32 inside a model of another dtype: its tensors keep their fp32
bits under every cast, its floating inputs are widened on entry, and its outputs leave in the dtype of the model around
it. The caller says which modules become islands, and what they emit.

The checks cover declared fp32 state, and the tensors of a run at each boundary where a dtype could change, together
with the process-wide switches that decide how they are multiplied and added (`platform.numerics`). Gates check the
input of every product in a forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_moe.engine.modules import fp32_parameters, keep_fp32_bits
from megatron_moe.platform import numerics
from megatron_moe.precision.fp32_state import Fp32State

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

_CODE: dict[CodeType, str] = {}
_WIDER_OUTPUT: dict[type, str] = {}


def mixes_dtypes(reason: str) -> Callable[[_Function], _Function]:
    """Declare that the decorated function combines tensors of different dtypes on purpose.

    It covers the function's own operations, those of helpers it calls and their backward; not those of another
    `torch.nn.Module` that it calls. The decorator goes below `@staticmethod`.

    Args:
        reason: why, in a phrase; the audit lists it next to the operations that it excuses.
    """

    def register(function: _Function) -> _Function:
        _CODE[function.__code__] = reason  # type: ignore[attr-defined]
        return function

    return register


def returns_wider(reason: str) -> Callable[[_Class], _Class]:
    """Declare that a module's output is on purpose wider than its input and its parameters.

    Args:
        reason: why, in a phrase.
    """

    def register(cls: _Class) -> _Class:
        _WIDER_OUTPUT[cls] = reason
        return cls

    return register


def declaration(code: CodeType) -> str | None:
    """Return the declared reason why this code mixes dtypes; None if there is no declaration."""
    return _CODE.get(code)


def wider_output(module: object) -> str | None:
    """Return the declared reason why this module's output is wider than its input; None without a declaration."""
    return next((_WIDER_OUTPUT[cls] for cls in type(module).__mro__ if cls in _WIDER_OUTPUT), None)


_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Emits:
    """The dtype of an island's floating outputs.

    dtype: called at every pass; None: that of the first floating input. as_computed: the outputs stay in fp32.
    """

    dtype: Callable[[], torch.dtype] | None = None
    as_computed: bool = False


def make_island(module: torch.nn.Module, emits: Emits | None) -> None:
    """Turn a module and all that it contains into an fp32 island, in place, before its weights are drawn.

    Its parameters become fp32 and stay the same objects, with their attributes. A module inside an island needs no
    call of its own: it is protected with the island, and gets fp32 inputs.

    Args:
        module: has parameters in any floating dtype. It is not yet wrapped, and their gradients have no hooks.
        emits: the dtype of the outputs; None for a module that casts itself and needs protection alone.
    """
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            parameter.data = parameter.data.float()
        keep_fp32_bits(part)
    if emits is not None:
        crossing = _Crossing(emits)
        module.register_forward_pre_hook(crossing.enter, with_kwargs=True)
        module.register_forward_hook(crossing.leave)


class _Crossing:
    """The forward hooks of one island. A module does not call itself, so one stored dtype is enough."""

    def __init__(self, emits: Emits) -> None:
        self.emits = emits
        self.entered: torch.dtype | None = None

    def enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self.entered = None

        def widened(tensor: Tensor) -> Tensor:
            self.entered = self.entered or tensor.dtype  # the first one's
            return tensor.float() if tensor.dtype in _NARROW else tensor

        return _mapped(args, widened), _mapped(kwargs, widened)

    def leave(self, module: torch.nn.Module, args: object, output: Any) -> Any:
        if self.emits.as_computed:
            return output
        dtype = self.entered if self.emits.dtype is None else self.emits.dtype()
        return output if dtype is None else _mapped(output, lambda tensor: tensor.to(dtype))


def _mapped(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `fn` applied to each floating tensor in it: in tuples, lists, dicts, dataclasses, nested."""
    if isinstance(value, Tensor):
        return fn(value) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, fn) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, fn) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, fn) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **_mapped(fields, fn))
    return value


class PrecisionError(RuntimeError):
    """An error for a tensor that breaks the precision contract, with its name, its dtype and the right one."""


def declared_fp32_state(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that a submodule declares as fp32 state or that is in an island, with its qualified name."""
    for path, submodule in module.named_modules():
        if isinstance(submodule, Fp32State):
            for name in submodule.fp32_state:
                tensor = getattr(submodule, name)
                if tensor is not None:
                    yield (f"{path}.{name}" if path else name), tensor
    for path, part in module.named_modules():
        for name in fp32_parameters(part) or ():
            yield (f"{path}.{name}" if path else name), part._parameters[name]  # type: ignore[misc]


_MOST_NAMED = 10


class TensorDtype(NamedTuple):
    """An entry of the dtype inventory.

    It has a tensor's name, its kind ("weight", "exp_avg"), its dtype, and the dtype of the contract.
    """

    name: str
    what: str
    dtype: torch.dtype
    wanted: torch.dtype


class PrecisionGuard:
    """A check of tensors and switches against the contract that remembers where each was still right.

    So the error names the part of the run in which a violation came about: between the last boundary at which the
    tensor or switch was right (or first seen) and the one at which it was wrong.
    """

    def __init__(self) -> None:
        self._right_at: dict[tuple[str, str], str] = {}

    def check(self, boundary: str, tensors: Iterable[TensorDtype]) -> int:
        """Compare the dtype of each tensor with the contract, and the switches with what the run has set.

        Args:
            boundary: the point of the run, for messages ("wrapping", "iteration 200").

        Returns:
            The number of tensors checked.

        Raises:
            PrecisionError: naming each tensor and switch that broke the contract (the first ten), what it is, its dtype
                or value and the right one, and the boundaries between which it changed.
        """
        broken, checked = [], 0
        for name, value, wanted in numerics.states():
            if not self._is_right(name, "switch", value == wanted, boundary):
                broken.append(self._broken(name, "switch", value, wanted, boundary))
        for tensor in tensors:
            checked += 1
            if not self._is_right(tensor.name, tensor.what, tensor.dtype == tensor.wanted, boundary):
                broken.append(self._broken(*tensor, boundary))
        if broken:
            rest = [f"and {len(broken) - _MOST_NAMED} more"] if len(broken) > _MOST_NAMED else []
            named = "; ".join([*broken[:_MOST_NAMED], *rest])
            raise PrecisionError(f"precision contract broken at {boundary}: {named}")
        return checked

    def _is_right(self, name: str, what: str, right: bool, boundary: str) -> bool:
        if right:
            self._right_at[name, what] = boundary
        return right

    def _broken(self, name: str, what: str, value: object, wanted: object, boundary: str) -> str:
        right_at = self._right_at.get((name, what))
        since = f"changed between {right_at} and {boundary}" if right_at else f"so from the start, {boundary}"
        return f"{name} ({what}) is {value}, must be {wanted}: {since}"


# ---- Gates, which report a mismatch of dtypes where it arises, with its producer and the flag to change.
#
# Without them a tensor of the wrong dtype is passed on until some kernel refuses it ("mat1 and mat2 must have the same
# dtype"), modules away from the cause, or until one silently promotes it.


def _note_return(name: str, trail: list[str], module: torch.nn.Module, args: object, output: object) -> None:
    """Record, as a forward hook, that a module without submodules has returned."""
    trail[0] = name


def _check_input(
    name: str, trail: list[str], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Check, as a forward pre-hook, the input of a module that multiplies it by its weights."""
    rows = getattr(args[0], "rows", args[0]) if args else None  # the experts get their rows in a record
    given = kwargs.get("weight")  # tied tables are passed in
    weights = [given] if isinstance(given, Tensor) else list(module.parameters(recurse=False))
    if not isinstance(rows, Tensor):
        return
    for weight in weights:
        if weight.dim() <= 1 or weight.dtype == rows.dtype:
            continue
        made_by = f" (last operation {rows.grad_fn.name()})" if rows.grad_fn is not None else ""
        autocast = ""
        if numerics.is_autocast_on(rows.device.type):
            autocast = " (torch.autocast is on: call the model without it)"
        raise PrecisionError(
            f"{name} ({type(module).__name__}) got {rows.dtype} input {list(rows.shape)}, its weight is "
            f"{weight.dtype}; the input came from {trail[0]}{made_by}, which has to return {weight.dtype}. "
            f"megatron-moe audit, or --audit-precision, names the line that changed it; --keep-fp32 {name} "
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
    trail, count = ["the model's input"], 0  # the module that returned last, which likely made the next tensor
    for path, module in model.named_modules():
        name = path or type(model).__name__
        if multiplies(module):
            module.register_forward_pre_hook(partial(_check_input, name, trail), with_kwargs=True)
            count += 1
        if next(module.children(), None) is None:
            module.register_forward_hook(partial(_note_return, name, trail))
    return count
