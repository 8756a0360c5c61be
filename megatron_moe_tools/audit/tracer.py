"""The tracer: it observes every operation of a forward and backward pass below autograd and records its dtypes.

It is in torch's dispatcher, where type promotion happens, so it also sees operations that no Python code names. It is a
context: outside of it nothing is hooked and nothing is slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_moe import platform
from megatron_moe.platform import numerics
from megatron_moe.precision.contract import TensorDtype, declared_fp32_state
from megatron_moe_tools.audit.findings import Audit, ModuleDtypes
from megatron_moe_tools.audit.operations import (
    UNKNOWN,
    LocationFinder,
    Operation,
    OperationLocation,
    deciding_operands,
    describe,
    dtype_name,
    dtype_names,
    low_precision_reduction,
    operand_groups,
    tensors_in,
    width,
    written_tensors,
)
from megatron_moe_tools.audit.widening import Cause, Widening


class Tracer(TorchDispatchMode):
    """A dispatch mode that traces what runs in `with Tracer(model) as tracer:` and records it in `tracer.audit`.

    An exception of the traced code is recorded and passed on.

    Args:
        modules: the model, or the chunks of one; names are those of `named_modules`, wrappers left out.
        about: facts for the report's head (flags, versions).
        state: returns further tensors, whose dtypes are compared with the contract's before and after.
    """

    def __init__(
        self,
        modules: torch.nn.Module | Sequence[torch.nn.Module],
        about: dict[str, Any] | None = None,
        state: Callable[[], Iterable[TensorDtype]] = tuple,
    ) -> None:
        super().__init__()
        roots = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
        self.audit = Audit(about=dict(about or {}))
        self._roots, self._state = roots, state
        self._names = _names(roots)
        self._owners = owners = _owners(roots, self._names)
        self._locations = LocationFinder(
            lambda module: self._names.get(id(module)), lambda tensor: owners.get(id(tensor))
        )
        self._states: dict[int, str] = {}
        self._widening = Widening(self.audit)
        self._calls: list[tuple[int, int]] = []
        self._undo: list[Callable[[], None]] = []
        self._started = 0.0

    def __enter__(self) -> Tracer:
        """Register the hooks and record fp32 state and switches that are not right before the step."""
        self.audit.about["switches"] = numerics.present()
        self._check_switches("before the step")
        for root in self._roots:
            for name, tensor in declared_fp32_state(root):
                self._states[tensor.untyped_storage().data_ptr()] = _unwrapped(name)
        self._check_states("before the step")
        before = register_module_forward_pre_hook(
            lambda module, args: self._calls.append((id(module), self.audit.operations))
        )
        after = register_module_forward_hook(self._leave_module, with_kwargs=True, always_call=True)
        attention = _AttentionCheck(self)
        attention.__enter__()
        self._undo = [before.remove, after.remove, lambda: attention.__exit__(None, None, None)]
        self._started = time.perf_counter()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks; record state and switches that are not right after the step, and the error of the step."""
        super().__exit__(kind, error, trace)
        self.audit.wall_seconds += time.perf_counter() - self._started
        while self._undo:
            self._undo.pop()()
        self._check_states("after the step")
        self._check_switches("after the step")
        if error is not None:
            location = self._locations.error_location(trace)
            self.audit.error = {
                "type": type(error).__name__,
                "message": str(error),
                "module": location.module,
                "where": location.where,
            }

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; mixed dtypes are recorded before it runs, time and bytes afterwards."""
        kwargs = kwargs or {}
        op, location, audit = describe(func), self._locations.current(), self.audit
        audit.operations += 1
        order = audit.operations
        inputs = tensors_in((args, kwargs))
        dtypes = [tensor.dtype for tensor in inputs]
        if location.module == UNKNOWN:
            # The optimizer runs outside of every module: it is the module whose parameter is an input.
            owner = next((self._owners[id(tensor)] for tensor in inputs if id(tensor) in self._owners), None)
            location = location if owner is None else replace(location, module=owner)
        written = written_tensors(op, args, kwargs)
        groups = [deciding_operands(group) for group in operand_groups(op, args, kwargs)]
        mixed = [group for group in groups if len({tensor.dtype for tensor in group}) > 1]
        if op.matmul and mixed:
            self._record_matmul(op.name, mixed[0], location, order)
        on_device = any(tensor.device.type != "cpu" for tensor in inputs)
        if on_device:
            platform.synchronize()
        begin = time.perf_counter()
        result = func(*args, **kwargs)
        if on_device:
            platform.synchronize()
        seconds = time.perf_counter() - begin
        outputs = tensors_in(result)
        moved = 0 if op.returns_view else sum(_bytes(tensor) for tensor in (*inputs, *outputs))
        audit.kernel_seconds += seconds
        audit.kernel_bytes += moved
        cause = None
        if op.cast:
            cause = self._record_cast(op, inputs, outputs, location, order, seconds, moved)
        elif mixed and not op.matmul and not op.communicates:
            cause = self._record_promotions(op, mixed, written, outputs, location, order)
        self._record_reduction(op, inputs, outputs, args, location, order, dtypes)
        self._widening.follow(inputs, [*outputs, *written], cause)
        return result

    def _record_matmul(self, name: str, operands: Sequence[Tensor], location: OperationLocation, order: int) -> None:
        wide = self._widening.origin(operands)
        self.audit.mixed_matmuls.add(location, name, dtype_names(operands), "", order=order, detail=wide)

    def _record_cast(
        self,
        op: Operation,
        inputs: list[Tensor],
        outputs: list[Tensor],
        location: OperationLocation,
        order: int,
        seconds: float,
        moved: int,
    ) -> Cause | None:
        if op.base == "_to_copy":  # it has a source and a result; copy_ has a destination, its result, and a source
            pairs = list(zip(inputs, outputs))
        else:
            half = len(inputs) // 2
            pairs = list(zip(inputs[half:], inputs[:half]))
        cause = None
        for source, target in pairs:
            if source.dtype == target.dtype:
                continue
            direction = f"{dtype_name(source.dtype)}->{dtype_name(target.dtype)}"
            floating = source.is_floating_point() and target.is_floating_point()
            findings = self.audit.casts if floating else self.audit.other_conversions
            share = dict(order=order, seconds=seconds / len(pairs), bytes_=moved // len(pairs))
            findings.add(location, op.name, direction, dtype_name(target.dtype), **share)  # type: ignore[arg-type]
            if floating:
                self._check_state_cast(op, source, target, direction, location, order)
                if width(target.dtype) > width(source.dtype):
                    cause = Cause(order, False, op.name, location)
        return cause

    def _record_promotions(
        self,
        op: Operation,
        mixed: list[list[Tensor]],
        written: list[Tensor],
        outputs: list[Tensor],
        location: OperationLocation,
        order: int,
    ) -> Cause | None:
        cause = None
        for operands in mixed:
            widest = max(width(tensor.dtype) for tensor in operands)
            targets = [tensor for tensor in written if any(tensor is operand for operand in operands)]
            floating = [tensor for tensor in outputs if tensor.dtype.is_floating_point]
            result = dtype_name((targets or floating or outputs or operands)[0].dtype)
            if targets and all(width(tensor.dtype) == widest for tensor in targets):
                self.audit.accumulations.add(location, op.name, dtype_names(operands), result, order=order)
                for target in targets:
                    if (state := self._states.get(_storage(target))) is not None:
                        dtypes, what = dtype_names(operands), f"{state} is added to from a narrower tensor"
                        self._violation(location, op, dtypes, dtype_name(target.dtype), what, order)
                continue
            detail = "rounded back into the written tensor" if targets else self._widening.origin(operands)
            declared = location.reason is not None
            findings = self.audit.declared_promotions if declared else self.audit.unintended_promotions
            findings.add(location, op.name, dtype_names(operands), result, order=order, detail=detail)
            cause = Cause(order, True, op.name, location)
        return cause

    def _record_reduction(
        self,
        op: Operation,
        inputs: list[Tensor],
        outputs: list[Tensor],
        args: Sequence[Any],
        location: OperationLocation,
        order: int,
        dtypes: list[torch.dtype],
    ) -> None:
        how = low_precision_reduction(op, inputs, outputs, args)
        if not how and op.base in ("add", "add_") and self._locations.gradient_accumulation():
            low = all(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes)
            how = "every addition rounds" if low and len(dtypes) > 1 else ""
        if how:
            result = dtype_name(outputs[0].dtype) if outputs else ""
            self.audit.low_precision_reductions.add(
                location, op.name, dtype_name(dtypes[0]), result, order=order, detail=how
            )

    # Modules.

    def _leave_module(self, module: torch.nn.Module, *call: Any) -> None:
        """Record the dtypes of a module's call, given (args, kwargs, output); after an exception (args, None)."""
        # A call that a raising hook or a reentrant pass left open is closed with the one around it.
        while self._calls:
            owner, begin = self._calls.pop()
            if owner == id(module):
                break
        name = self._names.get(id(module))
        if name is None or len(call) < 3:
            return
        args, kwargs, output = call
        received = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        returned = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        entry = self.audit.modules.get(name)
        if entry is None:
            parameters = tuple(sorted({dtype_name(parameter.dtype) for parameter in module.parameters()}))
            entry = self.audit.modules[name] = ModuleDtypes(type(module).__qualname__, parameters)
        entry.calls += 1
        entry.inputs |= {dtype_name(tensor.dtype) for tensor in received}
        entry.outputs |= {dtype_name(tensor.dtype) for tensor in returned}
        self._widening.check(module, name, received, returned, begin)

    # fp32 state, and the switches beneath the dtypes.

    def _check_switches(self, when: str) -> None:
        """Record each process-wide switch that has another value than the run set; none in a program of its own."""
        for name, value, wanted in numerics.states():
            if value != wanted:
                location = OperationLocation("", when, "forward")
                self.audit.fp32_state_violations.add(
                    location, "switch", str(value), str(wanted), order=self.audit.operations, detail=name
                )

    def _check_states(self, when: str) -> None:
        """Record declared state that is not fp32, and the further tensors that have another dtype than they must."""
        for root in self._roots:
            for name, tensor in declared_fp32_state(root):
                self._check_held(_unwrapped(name), tensor.dtype, torch.float32, _unwrapped(name), when)
        for name, what, dtype, wanted in self._state():
            self._check_held(name, dtype, wanted, f"{name} ({what}), must be {dtype_name(wanted)}", when)

    def _check_held(self, name: str, dtype: torch.dtype, wanted: torch.dtype, detail: str, when: str) -> None:
        if dtype != wanted:
            location = OperationLocation(name.rpartition(".")[0], when, "forward")
            held = dtype_name(dtype)
            self.audit.fp32_state_violations.add(
                location, "held", held, held, order=self.audit.operations, detail=detail
            )

    def _check_state_cast(
        self, op: Operation, source: Tensor, target: Tensor, direction: str, location: OperationLocation, order: int
    ) -> None:
        """Record declared state that is read through a narrower copy, or written from one."""
        for held, other, what in (
            (source, target, "is read through a narrower copy"),
            (target, source, "is written from a narrower one"),
        ):
            state = self._states.get(_storage(held))
            if state is not None and width(other.dtype) < 4:
                self._violation(location, op, direction, dtype_name(target.dtype), f"{state} {what}", order)

    def _violation(
        self, location: OperationLocation, op: Operation, dtypes: str, result: str, detail: str, order: int
    ) -> None:
        self.audit.fp32_state_violations.add(location, op.name, dtypes, result, order=order, detail=detail)

    def attention(self, operands: Sequence[Tensor]) -> None:
        """Record an attention whose query, key and value differ in dtype, which torch refuses above the dispatcher."""
        location = self._locations.current()
        self._record_matmul("scaled_dot_product_attention", operands, location, self.audit.operations)


class _AttentionCheck(TorchFunctionMode):
    """A function mode that reports attention of mixed dtypes, which torch refuses before it reaches the dispatcher."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            operands = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
            if len({tensor.dtype for tensor in operands}) > 1:
                self._tracer.attention(operands)
        return func(*args, **kwargs)


def _names(roots: Sequence[torch.nn.Module]) -> dict[int, str]:
    """Return id -> qualified name; wrappers of a single `module` have their class name, so that layers keep theirs."""
    names: dict[int, str] = {}
    for index, root in enumerate(roots):
        core: Any = root
        while [name for name, _ in core.named_children()] == ["module"]:
            names[id(core)] = f"({type(core).__name__})"
            core = core.module
        prefix = f"chunk{index}." if len(roots) > 1 else ""
        for name, module in core.named_modules():
            names[id(module)] = prefix + name
    return names


def _owners(roots: Sequence[torch.nn.Module], names: dict[int, str]) -> dict[int, str]:
    return {
        id(parameter): names[id(module)]
        for root in roots
        for module in root.modules()
        for parameter in module.parameters(recurse=False)
    }


def _unwrapped(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a kernel touches: of an expanded tensor those of its storage."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
