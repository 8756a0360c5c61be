"""Audit one pass: forward and backward of any torch module, or a training step of a run.

The tracer observes every operation below autograd and records its dtypes. It is in torch's dispatcher, where type
promotion happens, so it also sees operations that no Python code names. It is a context: outside of it nothing is
hooked and nothing is slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_moe import platform
from megatron_moe.config.schema import Run, flatten
from megatron_moe.data.batches import batch_iterators
from megatron_moe.data.datasets import build_datasets, build_named
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.files import replace_text
from megatron_moe.model.build import build_model
from megatron_moe.optim.optimizer import build_optimizer, build_scheduler
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.platform import numerics
from megatron_moe.precision.contract import TensorDtype, declared_fp32_state
from megatron_moe.report.run_info import versions
from megatron_moe.training.batch_size import batch_schedule
from megatron_moe.training.state_checks import optimizer_dtypes
from megatron_moe.training.step import connect, train_step
from megatron_moe_tools.audit.findings import (
    FINDING_LISTS,
    LISTS,
    Audit,
    Cause,
    ModuleDtypes,
    Widening,
    html_report,
    json_report,
    summary_line,
    text_report,
)
from megatron_moe_tools.audit.operations import (
    UNKNOWN,
    LocationFinder,
    Operation,
    OperationLocation,
    describe,
    dtype_name,
    dtype_names,
    dtypes_of,
    floating,
    low_precision_reduction,
    mixed_operands,
    tensors_in,
    widest,
    written_tensors,
)

# What torch hands over for the output of a call that raised: nothing.
_RAISED = object()


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
        self._names, self._owners = _names(roots)
        self._locations = LocationFinder(self._names, self._owners)
        self._states: dict[int, str] = {}
        self._widening = Widening(self.audit)
        self._calls: list[tuple[int, int]] = []
        self._hooks = ExitStack()
        self._started = 0.0

    def __enter__(self) -> Tracer:
        """Register the hooks and record fp32 state and switches that are not right before the step."""
        self.audit.about["switches"] = numerics.present()
        self._check_switches("before the step")
        for root in self._roots:
            for name, tensor in declared_fp32_state(root):
                self._states[_storage(tensor)] = _unwrapped(name)
        self._check_states("before the step")
        before = register_module_forward_pre_hook(
            lambda module, args: self._calls.append((id(module), self.audit.operations))
        )
        after = register_module_forward_hook(self._leave_module, with_kwargs=True, always_call=True)
        for handle in (before, after):
            self._hooks.callback(handle.remove)
        self._hooks.enter_context(_AttentionCheck(self._record_matmul))
        self._started = time.perf_counter()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks; record state and switches that are not right after the step, and the error of the step."""
        super().__exit__(kind, error, trace)
        self.audit.wall_seconds += time.perf_counter() - self._started
        self._hooks.close()
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

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run one operation; mixed dtypes are recorded before it runs, time and bytes afterwards."""
        kwargs = kwargs or {}
        op, location, audit = describe(func), self._locations.current(), self.audit
        audit.operations += 1
        inputs = tensors_in((args, kwargs))
        if location.module == UNKNOWN:
            # The optimizer runs outside of every module: it is the module whose parameter is an input.
            owned = filter(self._owners.__contains__, map(id, inputs))
            location = replace(location, module=self._owners.get(next(owned, 0), UNKNOWN))
        written = written_tensors(op, args, kwargs)
        mixed = mixed_operands(op, args, kwargs)
        if op.matmul and mixed:
            self._record_matmul(op.name, mixed[0], location)
        on_device = any(tensor.device.type != "cpu" for tensor in inputs)
        if on_device:
            platform.synchronize()
        begin = time.perf_counter()
        result = func(*args, **kwargs)
        if on_device:
            platform.synchronize()
        seconds, moved = time.perf_counter() - begin, 0
        outputs = tensors_in(result)
        if not op.returns_view:
            moved = sum(map(_bytes, (*inputs, *outputs)))
        audit.kernel_seconds += seconds
        audit.kernel_bytes += moved
        cause = None
        if op.cast:
            half = len(inputs) // 2
            pairs = list(zip(inputs[half:], inputs[:half]))
            if op.base == "_to_copy":  # it has a source and a result; copy_ has a destination, its result, and a source
                pairs = list(zip(inputs, outputs))
            cause = self._record_cast(op, pairs, location, seconds, moved)
        elif not op.matmul and not op.communicates:
            for operands in mixed:
                cause = self._record_promotion(op, operands, written, outputs, location) or cause
        how = low_precision_reduction(op, inputs, outputs, args)
        if how:
            added, rounded = dtype_names(inputs[:1]), dtype_names(outputs[:1])
            audit.low_precision_reductions.add(location, op.name, added, rounded, order=audit.operations, detail=how)
        self._widening.follow(inputs, [*outputs, *written], cause)
        return result

    def _record_matmul(self, name: str, operands: Sequence[Tensor], location: OperationLocation | None = None) -> None:
        location = location or self._locations.current()
        wide, order = self._widening.origin(operands), self.audit.operations
        self.audit.mixed_matmuls.add(location, name, dtype_names(operands), "", order=order, detail=wide)

    def _record_cast(
        self,
        op: Operation,
        pairs: list[tuple[Tensor, Tensor]],
        location: OperationLocation,
        seconds: float,
        moved: int,
    ) -> Cause | None:
        """Record the pairs of source and target of different dtypes, and return the cause of those that widen."""
        cause, order = None, self.audit.operations
        for source, target in pairs:
            if source.dtype == target.dtype:
                continue
            result = dtype_name(target.dtype)
            direction, findings = f"{dtype_name(source.dtype)}->{result}", self.audit.other_conversions
            if len(floating((source, target))) == 2:
                findings = self.audit.casts
                for held, other, what in (
                    (source, target, "is read through a narrower copy"),
                    (target, source, "is written from a narrower one"),
                ):
                    state = self._states.get(_storage(held))
                    if state is not None and other.itemsize < 4:
                        self._violation(location, op.name, direction, result, f"{state} {what}")
                if target.itemsize > source.itemsize:
                    cause = Cause(order, False, op.name, location)
            share, bytes_ = seconds / len(pairs), moved // len(pairs)
            findings.add(location, op.name, direction, result, order=order, seconds=share, bytes_=bytes_)
        return cause

    def _record_promotion(
        self,
        op: Operation,
        operands: list[Tensor],
        written: list[Tensor],
        outputs: list[Tensor],
        location: OperationLocation,
    ) -> Cause | None:
        """Record operands of different dtypes, and return the cause if their result is wider than one of them."""
        dtypes, order, ids = dtype_names(operands), self.audit.operations, set(map(id, operands))
        targets = [tensor for tensor in written if id(tensor) in ids]
        result = dtype_name((targets or floating(outputs) or outputs or operands)[0].dtype)
        if targets and {widest(operands)} == {target.itemsize for target in targets}:
            self.audit.accumulations.add(location, op.name, dtypes, result, order=order)
            for target in targets:
                if (state := self._states.get(_storage(target))) is not None:
                    what = f"{state} is added to from a narrower tensor"
                    self._violation(location, op.name, dtypes, dtype_name(target.dtype), what)
            return None
        detail, findings = self._widening.origin(operands), self.audit.unintended_promotions
        if targets:
            detail = "rounded back into the written tensor"
        if location.reason is not None:
            findings = self.audit.declared_promotions
        findings.add(location, op.name, dtypes, result, order=order, detail=detail)
        return Cause(order, True, op.name, location)

    def _violation(self, location: OperationLocation, name: str, dtypes: str, result: str, detail: str) -> None:
        order = self.audit.operations
        self.audit.fp32_state_violations.add(location, name, dtypes, result, order=order, detail=detail)

    # Modules.

    def _leave_module(
        self, module: torch.nn.Module, args: object, kwargs: object = None, output: object = _RAISED
    ) -> None:
        """Record the dtypes of a module's call; after an exception torch hands over less than all of it."""
        # A call that a raising hook or a reentrant pass left open is closed with the one around it.
        while self._calls:
            owner, begin = self._calls.pop()
            if owner == id(module):
                break
        name = self._names.get(id(module))
        if name is None or output is _RAISED:
            return
        received, returned = _tensor_leaves((args, kwargs)), _tensor_leaves(output)
        entry = self.audit.modules.get(name)
        if entry is None:
            parameters = tuple(sorted(map(dtype_name, dtypes_of(module.parameters()))))
            entry = self.audit.modules[name] = ModuleDtypes(type(module).__qualname__, parameters)
        entry.calls += 1
        entry.inputs |= set(map(dtype_name, dtypes_of(received)))
        entry.outputs |= set(map(dtype_name, dtypes_of(returned)))
        self._widening.check(module, name, received, returned, begin)

    # fp32 state, and the switches beneath the dtypes.

    def _check_switches(self, when: str) -> None:
        """Record each process-wide switch that has another value than the run set; none in a program of its own."""
        for name, value, wanted in numerics.states():
            if value != wanted:
                self._violation(OperationLocation("", when, "forward"), "switch", str(value), str(wanted), name)

    def _check_states(self, when: str) -> None:
        """Record declared state that is not fp32, and the further tensors that have another dtype than they must."""
        for root in self._roots:
            for name, tensor in declared_fp32_state(root):
                self._check_held(_unwrapped(name), tensor.dtype, torch.float32, _unwrapped(name), when)
        for name, what, dtype, wanted in self._state():
            self._check_held(name, dtype, wanted, f"{name} ({what}), must be {dtype_name(wanted)}", when)

    def _check_held(self, name: str, dtype: torch.dtype, wanted: torch.dtype, detail: str, when: str) -> None:
        if dtype != wanted:
            location, held = OperationLocation(name.rpartition(".")[0], when, "forward"), dtype_name(dtype)
            self._violation(location, "held", held, held, detail)


class _AttentionCheck(TorchFunctionMode):
    """A function mode that reports attention of mixed dtypes, which torch refuses before it reaches the dispatcher."""

    def __init__(self, record: Callable[[str, Sequence[Tensor]], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            operands = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
            if len(dtypes_of(operands)) > 1:
                self._record("scaled_dot_product_attention", operands)
        return func(*args, **kwargs)


def _names(roots: Sequence[torch.nn.Module]) -> tuple[dict[int, str], dict[int, str]]:
    """Return id of a module -> its qualified name, and id of a parameter -> the name of its module.

    Wrappers of a single `module` have their class name, so that layers keep theirs.
    """
    names: dict[int, str] = {}
    owners: dict[int, str] = {}
    for index, root in enumerate(roots):
        core: Any = root
        while list(dict(core.named_children())) == ["module"]:
            names[id(core)] = f"({type(core).__name__})"
            core = core.module
        prefix = f"chunk{index}." if len(roots) > 1 else ""
        for name, module in core.named_modules():
            names[id(module)] = prefix + name
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = names[id(module)]
    return names, owners


def _tensor_leaves(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _unwrapped(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a kernel touches: of an expanded tensor those of its storage."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def audit_module(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    about: dict[str, Any] | None = None,
) -> Audit:
    """Trace one forward and backward pass of `module(*args, **kwargs)` and return the audit.

    The backward pass starts from the output's `loss` if it has one, else from the sum, in fp32, of all outputs that
    have a graph. What the module raises is in the audit's `error`; KeyboardInterrupt and the like are passed on.

    Args:
        module: any torch module.
        args: positional arguments of its forward pass.
        kwargs: keyword arguments of its forward pass.
        about: facts for the report's head, such as `subject` and `dtype`.
    """
    tracer = Tracer(module, about)
    try:
        with tracer:
            output = module(*args, **(kwargs or {}))
            loss = getattr(output, "loss", None)
            if loss is not None:
                output = loss
            total = [value.float().sum() for value in _tensor_leaves(output) if value.requires_grad]
            if total:
                torch.stack(total).sum().backward()
    except Exception:  # recorded by the tracer: the report says what was raised, and where
        assert tracer.audit.error is not None
    return tracer.audit


# ---- A run: one training step, by itself or inside a training process.


def audit_run(run: Run, tokenizer: Tokenizer, report: Callable[[str], None]) -> Audit:
    """Build the run's model in this process and trace one training step of it.

    Args:
        run: a run that has passed `config.rules.check` for one rank.
        report: called with lines of progress.

    Returns:
        The audit; an exception of the step is in its `error`.
    """
    schedule = batch_schedule(run, 1)
    vocab_size = run.model.vocab_size or tokenizer.vocab_size
    vocabulary = run.derived.padded_vocab_size(vocab_size)
    clean = False
    try:
        pg_collection = groups.initialize(run)
        seed_everything(run)
        report(f"building {run.derived.parameter_count(vocabulary):,} parameters in {run.derived.params_dtype_name}")
        model = build_model(run, pg_collection, vocab_size)
        optimizer = build_optimizer(run, model, pg_collection)
        scheduler = build_scheduler(run, optimizer)
        build = build_datasets if run.data.data_config is None else build_named
        built = build(run, tokenizer, 2 * schedule.final, 0, 0, pg_collection=pg_collection)
        batches = batch_iterators(built[0], run, consumed_samples=0, pg_collection=pg_collection)
        connect(model, optimizer)
        micro_batches = schedule.num_micro_batches(0)
        report(
            f"tracing the second of two steps: {micro_batches} micro-batches of {run.training.micro_batch_size} x "
            f"{run.model.seq_length} tokens"
        )
        step = partial(
            train_step,
            model,
            optimizer,
            scheduler,
            batches,
            num_micro_batches=micro_batches,
            micro_batch_size=run.training.micro_batch_size,
            seq_length=run.model.seq_length,
            pg_collection=pg_collection,
        )
        # The first step pays for what a process does once, which would count as the cost of the operation that comes
        # first. If this step fails, the traced one fails in the same way and is reported.
        with suppress(Exception):
            step()
        tracer = Tracer(model, facts(run), lambda: optimizer_dtypes(run, model, optimizer))
        try:
            with tracer:
                result = step()
            tracer.audit.about["step_committed"] = result.committed
        except Exception:  # recorded by the tracer
            assert tracer.audit.error is not None
        clean = tracer.audit.error is None
        return tracer.audit
    finally:
        groups.destroy(abort=not clean)


@contextmanager
def auditing(run: Run, model: list[torch.nn.Module], report: Callable[[str], None]) -> Iterator[None]:
    """Trace the step in this context and write the report of all ranks to `--audit-precision-output`.

    Every rank traces. Counts are summed and findings gathered over ranks; modules, cast list and shares are rank 0's.
    A rank whose step fails writes its own report, since the others may not answer any more, and raises the error.

    Args:
        run: the run that is trained.
        model: its model chunks on this rank.
        report: called with a line about the files that were written.
    """
    tracer = Tracer(model, facts(run))
    prefix = run.precision.audit_precision_output
    try:
        with tracer:
            yield
    except Exception:
        rank = dist.get_rank()
        if rank:
            prefix = f"{prefix}.rank{rank}"
        report(f"wrote {write(tracer.audit.as_dict(), prefix)}: the traced step failed")
        raise
    merged = merge(tracer.audit)
    if dist.get_rank() == 0:
        report(f"wrote {write(merged, prefix)}: {merged['verdict']}")


def merge(audit: Audit) -> dict[str, Any]:
    """Return, on every rank, this rank's report with the counts and findings of all ranks."""
    merged = audit.as_dict()
    reports: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(reports, {name: merged[name] for name in ("counts", "failed", *FINDING_LISTS)})
    merged |= {"ranks": len(reports), **{name: [] for name in FINDING_LISTS}}
    for name, key in LISTS.items():
        merged["counts"][name] = sum(report["counts"][name] for report in reports)
        if key != name:
            merged[name] = merged["counts"][name]
    for rank, report in enumerate(reports):
        merged["failed"] |= report["failed"]
        for name in FINDING_LISTS:
            for entry in report[name]:
                merged[name].append({**entry, "rank": rank})
    return {**merged, "verdict": summary_line(merged)}


def write(report: dict[str, Any], prefix: str) -> str:
    """Write PREFIX.txt, PREFIX.json and PREFIX.html, each in one atomic step, and return their names."""
    paths = []
    for suffix, make in ((".txt", text_report), (".json", json_report), (".html", html_report)):
        path = Path(prefix + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, make(report))
        paths.append(str(path))
    return ", ".join(paths)


def facts(run: Run) -> dict[str, Any]:
    """Return the report's head: what was traced, with which flags and versions."""
    flags, defaults = flatten(run), flatten(Run())
    return {
        "subject": "one training step of megatron_moe",
        "dtype": run.derived.params_dtype_name,
        "device": str(platform.device()),
        "flags": {name: value for name, value in flags.items() if value != defaults[name]},
        "versions": versions(),
    }
