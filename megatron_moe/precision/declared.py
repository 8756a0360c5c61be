"""Where dtypes are mixed on purpose: the code says so itself, with a reason.

A declaration costs nothing when the code runs: the decorators write a name into a register and return what they got.
Only the audit reads the register.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

_CODE: dict[CodeType, str] = {}
_WIDER_OUTPUT: dict[type, str] = {}


def mixes_dtypes(reason: str) -> Callable[[_Function], _Function]:
    """Declare that the decorated function combines tensors of different dtypes on purpose.

    It covers the function's own operations, those of helpers it calls and their backward; not those of another
    `torch.nn.Module` that it calls. Below `@staticmethod`.

    Args:
        reason: why, in a phrase; the audit lists it beside what it excuses.
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
    """Why this code mixes dtypes; None if nobody said so."""
    return _CODE.get(code)


def wider_output(module: object) -> str | None:
    """Why this module's output is wider than what it got; None if its class does not say so."""
    return next((_WIDER_OUTPUT[cls] for cls in type(module).__mro__ if cls in _WIDER_OUTPUT), None)
