"""Trace wide tensors back to the promotion or cast that widened them, and forward to the modules that return them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_moe.precision.contract import wider_output
from megatron_moe_tools.audit.findings import Audit, Widened
from megatron_moe_tools.audit.operations import OperationLocation, dtype_name, dtype_names, width

_WIDE = 4


@dataclass(frozen=True)
class Cause:
    """The promotion or cast that made a tensor wider than its operands; `order` counts the step's operations."""

    order: int
    promotion: bool
    operation: str
    location: OperationLocation


@dataclass(frozen=True)
class _WideReturn:
    """The return of something wide by a module, after `at` operations."""

    at: int
    module: str
    cause: Cause | None


class Widening:
    """A record of wide tensors, from the operation that widened them to the modules that return them.

    Args:
        audit: the audit that gets the widened modules.
    """

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._causes = WeakTensorKeyDictionary()
        self._declared = WeakTensorKeyDictionary()
        self._widened: list[_WideReturn] = []
        self._parameters: dict[int, list[Tensor]] = {}

    def follow(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], own: Cause | None) -> None:
        """Record the cause of a wide result: the first promotion on its way here, or else the first cast.

        A result that is rounded has none any more.

        Args:
            inputs: operands of an operation.
            outputs: tensors that it returned or wrote.
            own: the operation itself as a cause, if it widened something.
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
        """Return words on where the widest operand was widened, if an operation of this step did it; else ""."""
        widest = max(operands, key=lambda tensor: width(tensor.dtype))
        cause: Cause | None = self._causes.get(widest)
        if cause is None:
            return ""
        verb = "promoted" if cause.promotion else "cast"
        module = cause.location.module or "(the model)"
        return f"{dtype_name(widest.dtype)} since {cause.location.where} ({verb} there, module {module})"

    def check(
        self, module: torch.nn.Module, name: str, received: Sequence[Tensor], returned: Sequence[Tensor], begin: int
    ) -> None:
        """Record a module whose floating output is wider than every floating input and parameter.

        Args:
            module: the module.
            name: its qualified name.
            received: tensors that its forward got.
            returned: tensors that its forward returned.
            begin: number of operations that had run when it was called.
        """
        inputs = [tensor for tensor in received if tensor.is_floating_point()]
        parameters = self._parameters.get(id(module))
        if parameters is None:
            parameters = [one for one in module.parameters() if one.is_floating_point()]
            self._parameters[id(module)] = parameters
        known = [width(tensor.dtype) for tensor in (*inputs, *parameters)]
        wide = [
            tensor for tensor in returned if tensor.is_floating_point() and known and width(tensor.dtype) > max(known)
        ]
        if not wide:
            return
        reason = wider_output(module)
        if reason is None and all(tensor in self._declared for tensor in wide):
            reason = "passes on the output of a module that declares it"
        if reason is not None:
            self._audit.declared_wider[name] = reason
            self._declared.update(dict.fromkeys(wide, True))
            return
        since = [one for one in self._widened if one.at > begin]
        causes: list[Cause] = [self._causes[tensor] for tensor in wide if tensor in self._causes]
        if not (inputs or since or causes):
            return  # made here of numbers that were not narrow before, such as a table of positions
        candidates = [cause for cause in causes if cause.promotion] or causes
        cause = min(candidates, key=lambda one: one.order) if candidates else None
        entry = Widened(
            module=name,
            kind=type(module).__qualname__,
            input=dtype_names(inputs),
            parameters=dtype_names(parameters),
            output=dtype_name(wide[0].dtype),
            caused_by=_kind(cause),
            operation="?" if cause is None else cause.operation,
            where="?" if cause is None else cause.location.where,
            taken_over_from=next((one.module for one in since if one.cause is cause), None),
        )
        known_entry = self._audit.widened_modules.setdefault((name, entry.output, entry.where), entry)
        known_entry.count += known_entry is not entry
        self._widened.append(_WideReturn(self._audit.operations, name, cause))


def _kind(cause: Cause | None) -> str:
    if cause is None:
        return "?"
    return "promotion" if cause.promotion else "cast"
