"""Where width comes from: the first promotion on a wide tensor's way, and the modules that let it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_moe.apps.audit.findings import Audit, Widened
from megatron_moe.apps.audit.operations import joined, short, width
from megatron_moe.apps.audit.places import OperationPlace
from megatron_moe.precision.contract import wider_output

_WIDE = 4


@dataclass(frozen=True)
class Cause:
    """Why a tensor is wider than what it was made from: a promotion, or a cast; `order` is that of the step."""

    order: int
    promotion: bool
    operation: str
    place: OperationPlace


@dataclass(frozen=True)
class _Returned:
    """A module returned something wide, after `at` operations."""

    at: int
    module: str
    cause: Cause | None


class Widening:
    """Follows wide tensors from the operation that widened them to the modules that return them.

    Args:
        audit: where widened modules are written down.
    """

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._causes = WeakTensorKeyDictionary()
        self._declared = WeakTensorKeyDictionary()
        self._widened: list[_Returned] = []
        self._parameters: dict[int, list[Tensor]] = {}

    def follow(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], own: Cause | None) -> None:
        """A wide result has the first promotion on its way here, or else the first cast; rounding it ends that.

        Args:
            inputs: operands. outputs: what was returned or written. own: this operation's, if it widened something.
        """
        inherited = [self._causes[tensor] for tensor in inputs if tensor in self._causes] if self._causes else []
        candidates = [cause for cause in inherited if cause.promotion] or ([own] if own is not None else inherited)
        if not candidates:
            return
        cause = min(candidates, key=lambda one: one.order)
        for tensor in outputs:
            if tensor.is_floating_point() and width(tensor.dtype) >= _WIDE:
                self._causes[tensor] = cause

    def origin(self, operands: Sequence[Tensor]) -> str:
        """Since where the widest operand has been wide, if an operation of this step made it so; else ""."""
        widest = max(operands, key=lambda tensor: width(tensor.dtype))
        cause: Cause | None = self._causes.get(widest)
        if cause is None:
            return ""
        what = "promoted" if cause.promotion else "cast"
        module = cause.place.module or "(the model)"
        return f"{short(widest.dtype)} since {cause.place.where} ({what} there, module {module})"

    def check(
        self, module: torch.nn.Module, name: str, got: Sequence[Tensor], gave: Sequence[Tensor], begin: int
    ) -> None:
        """Write down a module whose floating output is wider than every floating input and parameter.

        Args:
            got, gave: tensors into and out of its forward. begin: operations that had run when it was called.
        """
        inputs, parameters = [tensor for tensor in got if tensor.is_floating_point()], self._held_by(module)
        known = [width(tensor.dtype) for tensor in (*inputs, *parameters)]
        wide = [tensor for tensor in gave if tensor.is_floating_point() and known and width(tensor.dtype) > max(known)]
        if not wide:
            return
        reason = wider_output(module)
        if reason is None and all(tensor in self._declared for tensor in wide):
            reason = "hands on what a module gave that declares it"
        if reason is not None:
            self._audit.declared_wider[name] = reason
            self._declared.update(dict.fromkeys(wide, True))
            return
        since = [one for one in self._widened if one.at > begin]
        causes: list[Cause] = [self._causes[tensor] for tensor in wide if tensor in self._causes]
        if not (inputs or since or causes):
            return  # made here of numbers that never were narrow: a table of positions
        candidates = [cause for cause in causes if cause.promotion] or causes
        cause = min(candidates, key=lambda one: one.order) if candidates else None
        entry = Widened(
            module=name,
            kind=type(module).__qualname__,
            input=joined(inputs),
            parameters=joined(parameters),
            output=short(wide[0].dtype),
            caused_by="?" if cause is None else "promotion" if cause.promotion else "cast",
            operation="?" if cause is None else cause.operation,
            where="?" if cause is None else cause.place.where,
            taken_over_from=next((one.module for one in since if one.cause is cause), None),
        )
        known_entry = self._audit.widened_modules.setdefault((name, entry.output, entry.where), entry)
        known_entry.count += known_entry is not entry
        self._widened.append(_Returned(self._audit.operations, name, cause))

    def _held_by(self, module: torch.nn.Module) -> list[Tensor]:
        if id(module) not in self._parameters:
            self._parameters[id(module)] = [one for one in module.parameters() if one.is_floating_point()]
        return self._parameters[id(module)]
