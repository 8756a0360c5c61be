"""How this process adds and multiplies: the switches of torch, cuBLAS and NCCL that decide it beneath the dtypes.

Some are the process's, not a tensor's, and their defaults break what a tensor's dtype says: cuBLAS may add the parts
of a half-precision product in half precision, and a program may have allowed TF32 for fp32 products. A run, an
evaluation, generation, the doctor and the audit set them when they join their process groups (`parallel.groups`), and
put them back when they leave. A program that uses the layers by themselves keeps its own settings.

Guards keep TF32 and a surrounding autocast out of one computation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.deterministic
from torch import Tensor

from megatron_moe.platform import env_vars, hardware
from megatron_moe.platform.protocols import AutogradContext


@dataclass(frozen=True)
class Switch:
    """A process-wide setting that decides how numbers are added.

    Attributes:
        name: what a program sets to change it.
        wanted: its value in a run.
        read: returns the present value.
        write: sets a value that `read` has returned, or `wanted`.
    """

    name: str
    wanted: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]


class Departure(NamedTuple):
    """A switch that has another value than the run set."""

    name: str
    value: Any
    wanted: Any


def _attribute(module: Any, path: str, wanted: Any) -> Switch:
    """Return the switch that is an attribute of one of torch's modules."""
    *_, name = path.split(".")
    return Switch(path, wanted, lambda: getattr(module, name), lambda value: setattr(module, name, value))


def _reduction(dtype: str) -> Switch:
    """Return the switch that lets cuBLAS add the parts of a split product in half precision; a split stays allowed."""
    module, name = torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction"

    def write(value: bool) -> None:
        setattr(module, name, (value, getattr(module, f"{name}_split_k", True)))

    return Switch(f"torch.backends.cuda.matmul.{name}", False, lambda: getattr(module, name), write)


_backends: Any = torch.backends  # whose attributes are set up where type checkers do not see them

_FULL, _TF32 = ("ieee", "ieee"), ("tf32", "ieee")  # of a GPU and of a CPU


def _fp32_precision(name: str, first: Any, second: Any, write_older: Callable[[tuple[str, str]], None]) -> Switch:
    """Return the switch of TF32 in two of torch's backends.

    torch has an older and a newer interface to it, and getters of the older one that raise where the two disagree: the
    older one is set first, then what it leaves open.
    """

    def read() -> tuple[str, str]:
        return first.fp32_precision, second.fp32_precision

    def write(value: tuple[str, str]) -> None:
        write_older(value)
        if read() != value:
            first.fp32_precision, second.fp32_precision = value

    return Switch(f"torch.backends.{name}.fp32_precision (TF32)", _FULL, read, write)


def _write_older_products(value: tuple[str, str]) -> None:
    older = "medium" if "bf16" in value else "high" if "tf32" in value else "highest"
    torch.set_float32_matmul_precision(older)


_PRODUCTS = _fp32_precision(
    "{cuda,mkldnn}.matmul", _backends.cuda.matmul, _backends.mkldnn.matmul, _write_older_products
)

ARITHMETIC = (
    _reduction("bf16"),
    _reduction("fp16"),
    _attribute(torch.backends.cuda.matmul, "torch.backends.cuda.matmul.allow_fp16_accumulation", False),
    _PRODUCTS,
    _fp32_precision(
        "cudnn.{conv,rnn}",
        _backends.cudnn.conv,
        _backends.cudnn.rnn,
        lambda value: setattr(_backends.cudnn, "allow_tf32", "tf32" in value),
    ),
    Switch(
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        False,
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
)
"""The switches of every run: half-precision products add in fp32, fp32 products multiply fp32 numbers. With
`--allow-tf32` alone a GPU multiplies in TF32."""


DETERMINISTIC = (
    Switch(
        "torch.use_deterministic_algorithms",
        (True, False),
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    _attribute(torch.backends.cudnn, "torch.backends.cudnn.deterministic", True),
    _attribute(torch.backends.cudnn, "torch.backends.cudnn.benchmark", False),
    # It makes no operation deterministic: it writes NaN into memory that is allocated, to show who reads it unwritten.
    _attribute(torch.utils.deterministic, "torch.utils.deterministic.fill_uninitialized_memory", False),
)
"""The switches of `--deterministic-mode`, in addition."""


_before: list[tuple[Switch, Any]] = []
_environment_before: dict[str, str | None] = {}
"""What was there before a run has set its own."""


def apply(deterministic: bool, allow_tf32: bool = False) -> None:
    """Set the switches for a run, before CUDA, cuBLAS or NCCL start; a second call replaces the first.

    Args:
        deterministic: whether to set those of `--deterministic-mode` too, with its environment variables.
        allow_tf32: whether a GPU multiplies fp32 numbers in TF32; see `full_products`.

    Raises:
        ConfigError: see `env_vars.deterministic_environment`.
    """
    restore()
    environment = env_vars.deterministic_environment() if deterministic else {}
    _environment_before.update((name, os.environ.get(name)) for name in environment)
    os.environ.update(environment)
    for switch in (*ARITHMETIC, *(DETERMINISTIC if deterministic else ())):
        if switch is _PRODUCTS and allow_tf32:
            switch = replace(switch, wanted=_TF32)
        _before.append((switch, switch.read()))
        switch.write(switch.wanted)


def restore() -> None:
    """Put back what `apply` found; do nothing where it was not called."""
    while _before:
        switch, value = _before.pop()
        switch.write(value)
    for name, earlier in _environment_before.items():
        if earlier is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = earlier
    _environment_before.clear()


def states() -> Iterator[Departure]:
    """Yield each switch that `apply` has set, with its present value; none where a program keeps its own settings."""
    for switch, _ in _before:
        yield Departure(switch.name, switch.read(), switch.wanted)


def present() -> dict[str, Any]:
    """Return the present value of every switch by its name, whoever set it."""
    return {switch.name: switch.read() for switch in (*ARITHMETIC, *DETERMINISTIC)}


def differing(switches: dict[str, Any]) -> list[str]:
    """Return the names of the switches of every run that have another value in `switches`, as `present` returns it."""
    return [switch.name for switch in ARITHMETIC if switches[switch.name] != switch.wanted]


def facts(deterministic: bool) -> dict[str, str]:
    """Return what the bits of a run depend on besides its flags, ranks and versions; nothing without CUDA."""
    if not hardware.has_cuda():
        return {}
    return {
        "device": torch.cuda.get_device_name(hardware.device()),
        **(env_vars.deterministic_environment() if deterministic else {}),
    }


# ---- Guards of a computation.
#
# A surrounding torch.autocast rounds every matrix product on its list to half precision, whatever dtype its operands
# were cast to: the router's product, which chooses experts by differences of 1e-3, as well as the product of two fp32
# numbers in a backward pass.

_Function = TypeVar("_Function", bound=Callable[..., Any])


# The layers ask at every pass: what these functions return, torch.backends' attributes return in several times as long.
_precision_of = torch._C._get_fp32_precision_getter
_is_any_autocast_on = torch._C._is_any_autocast_enabled
_NOT_ROUNDED = ("ieee", "none")  # "none": not set, nor anything that it inherits


def full_products() -> AbstractContextManager[None]:
    """Return a block in which fp32 numbers are multiplied as they are, also in a run with `--allow-tf32`."""
    if _precision_of("cuda", "matmul") in _NOT_ROUNDED and _precision_of("mkldnn", "matmul") in _NOT_ROUNDED:
        return nullcontext()
    return _products_without_tf32()


@contextmanager
def _products_without_tf32() -> Iterator[None]:
    value = _PRODUCTS.read()
    _PRODUCTS.write(_FULL)
    try:
        yield
    finally:
        _PRODUCTS.write(value)


_has_autocast = functools.cache(torch.amp.is_autocast_available)


def is_autocast_on(device_type: str) -> bool:
    """Return whether operations on this type of device ("cpu", "cuda") are under autocast now; "meta" is not."""
    return _is_any_autocast_on() and _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a block with autocast off for this type of device."""
    return torch.autocast(device_type, enabled=False) if is_autocast_on(device_type) else nullcontext()


def unaffected_by_autocast(function: _Function) -> _Function:
    """Decorate the forward or the backward of a `torch.autograd.Function`: it runs with autocast off.

    Both need it: a backward runs under the autocast of the code that calls `backward()`, not under that of its forward.
    The decorator is placed below `@staticmethod`; the device is that of the first tensor among the arguments.
    """

    @functools.wraps(function)
    def run(ctx: AutogradContext, *args: Any) -> Any:
        if not _is_any_autocast_on():
            return function(ctx, *args)
        for value in args:
            if isinstance(value, Tensor):
                break
        device_type = value.device.type
        if not is_autocast_on(device_type):
            return function(ctx, *args)
        with without_autocast(device_type):
            return function(ctx, *args)

    return run  # type: ignore[return-value]
