# mypy: disable-error-code="method-assign,assignment"
"""Count what makes the host wait for the device, on the pretended CUDA machine of `tests/helpers/cuda_on_cpu.py`.

`write_counts` trains with given flags and prints what the last step met: kind, file, line and function, in the phases
of `PHASES`. The kinds:

    read      a number or an array is taken from the device: .item(), .tolist(), float(), if, .cpu(), .numpy()
    shape     the size of a result depends on data: nonzero, indexing by a mask, unique, bincount, repeat_interleave
    upload    host data goes to the device from memory that is not pinned, or not with non_blocking
    wait      a device, a stream or a barrier is waited for
    hidden    an event is waited for, while the device has work that was queued behind it; a `wait` if it has none
    object    a collective of Python objects, each several of the above

All tensors are in the CPU's memory. Which of them would be the host's is followed from where they are made: those made
without a device, read from files or copied from the device, and what is computed from nothing else.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from tests.helpers import cuda_on_cpu, ranks

PHASES = ("layer", "micro-batches", "finalize", "step", "logging", "loop")
"""The MoE layers, the rest of the schedule, finalize_model_grads, the rest of the step, metrics, and what is left."""

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"}
READS |= {"__contains__", "equal", "allclose", "is_nonzero"}
SHAPES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


class Wait(NamedTuple):
    """A place that makes the host wait. kind: see the module; what: the function; where: file:line and function."""

    phase: str
    kind: str
    what: str
    where: str


_PINNED = "pretended_pinned"
"""The attribute of a tensor in the host's memory: whether that is pinned."""


class HostSyncs:
    """The waits of the host in this process while it is on.

    It has to be made before `cuda_on_cpu.install()`, and `Mode` has to be that of this class: see `installed`.
    """

    def __init__(self) -> None:
        self.found: Counter[Wait] = Counter()
        self.on = False
        self.calls = 0  # of functions of torch
        self._arriving: list[torch.Tensor] = []  # pinned memory that a copy was queued to, and no event waited for

    def add(self, kind: str, what: str) -> None:
        """Count a wait of the code that runs now."""
        if self.on:
            self.found[_located(kind, what)] += 1

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor would be in the host's memory."""
        return _PINNED in tensor.__dict__

    def mark_host(self, tensor: torch.Tensor, pinned: bool = False) -> None:
        """Remember a tensor as one in the host's memory."""
        tensor.__dict__[_PINNED] = pinned

    def mark_device(self, tensor: torch.Tensor) -> None:
        """Remember a tensor as one on the device."""
        tensor.__dict__.pop(_PINNED, None)

    def copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """Count a copy between host and device."""
        if self.is_host(target) == self.is_host(source):
            return
        pinned = (target if self.is_host(target) else source).__dict__[_PINNED]
        if not (pinned and non_blocking):
            self.add("read" if self.is_host(target) else "upload", "copy_")
        elif self.is_host(target):
            self._arriving.append(target)

    def waited(self, event: Any) -> None:
        """Count the wait for an event, by which copies have arrived."""
        self.add("hidden" if self.calls > event.calls else "wait", "Event.synchronize")
        self._arriving.clear()

    def require_arrived(self, tensor: torch.Tensor) -> None:
        """Raise where pinned memory is read before anything waited for the copy into it."""
        memory = tensor.untyped_storage().data_ptr()
        if any(memory == target.untyped_storage().data_ptr() for target in self._arriving):
            raise AssertionError(f"pinned memory is read before its copy was waited for: {_located('', '').where}")


def _located(kind: str, what: str) -> Wait:
    """Return a wait of the code that runs now, at its innermost line of the package or the engine."""
    where, functions, files = "?", set(), set()
    frame = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        for root in ("/megatron_moe/", "/megatron/core/"):
            if root in path:
                file = root.removeprefix("/") + path.rsplit(root, 1)[1]
                where = f"{file}:{frame.f_lineno} {name}" if where == "?" else where
                functions.add(name)
                files.add((file, name))
        frame = frame.f_back
    return Wait(_phase(where, functions, files), kind, what, where)


def _phase(where: str, functions: set[str], files: set[tuple[str, str]]) -> str:
    if "finalize_model_grads" in functions:
        return "finalize"
    if "run_micro_batches" in functions:
        in_layer = ("megatron_moe/moe/layer.py", "_mixture") in files
        of_layer = where.startswith("megatron_moe/moe/") and not where.endswith(" counting_ahead")
        return "layer" if in_layer or of_layer else "micro-batches"
    if "train_step" in functions:
        return "step"
    reporting = ("megatron_moe/training/callbacks/reporting.py", "after_step") in files
    return "logging" if reporting else "loop"


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


# What a tensor on the pretended device says of its place. A tensor of the host says "cpu", without an index.
DEVICE = torch.device("cpu", 0)


def _on_device(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or _kind_of(device) == "cuda")


def _kind_of(device: Any) -> str:
    device = torch.device(device)
    return "cuda" if device.type == "cuda" or device == DEVICE else device.type


def mode_of(syncs: HostSyncs) -> type[cuda_on_cpu.Mode]:
    """Return the class of the context in which device "cuda" means the CPU's memory, and waits are counted."""

    class Counting(cuda_on_cpu.Mode):
        def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            options = kwargs or {}
            if function is torch.device:
                return DEVICE if _on_device(args[0]) else super().__torch_function__(function, types, args, kwargs)
            if function == torch.Tensor.device.__get__:
                return function(*args) if syncs.is_host(args[0]) or args[0].is_meta else DEVICE
            syncs.calls += 1
            inputs = list(_tensors((*args, *options.values())))
            _count(syncs, function, args, options, inputs)
            result = super().__torch_function__(function, types, args, kwargs)
            return _marked(syncs, function, args, options, inputs, result)

    return Counting


def _count(syncs: HostSyncs, function: Any, args: tuple, options: dict, inputs: list[torch.Tensor]) -> None:
    """Count what a call of torch's waits for."""
    name = getattr(function, "__name__", "")
    on_device = [tensor for tensor in inputs if not syncs.is_host(tensor)]
    if name in ("tensor", "as_tensor", "asarray", "new_tensor"):
        goes_there = name == "new_tensor" or _on_device(options.get("device"))
        from_host = not args or not isinstance(args[0], torch.Tensor) or syncs.is_host(args[0])
        for _ in () if args and isinstance(args[0], torch.Tensor) else on_device:
            syncs.add("read", f"{name} of a list")
        if goes_there and from_host and not (name == "new_tensor" and not on_device):
            syncs.add("upload", name)
    elif name in ("copy_", "__setitem__") and isinstance(args[-1], torch.Tensor):
        non_blocking = bool(options.get("non_blocking")) if name == "copy_" else False
        if args[-1].dim() or name == "copy_":
            syncs.copied(args[0], args[1] if name == "copy_" else args[-1], non_blocking)
    elif name in READS:
        if on_device:
            syncs.add("read", name)
        for tensor in inputs:
            syncs.require_arrived(tensor)
    elif name in ("to", "type"):
        _count_move(syncs, args, options)
    if on_device and _has_shape_of_data(name, args, options):
        syncs.add("shape", name)
    if name in ("__getitem__", "__setitem__") and on_device:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(part, (list, range)) for part in index):
            syncs.add("upload", f"{name} by a list")


def _count_move(syncs: HostSyncs, args: tuple, options: dict) -> None:
    target = _target(args, options)
    if target is None or syncs.is_host(args[0]) == (target == "cpu"):
        return
    if target == "cpu":
        syncs.add("read", "to")
    elif not (options.get("non_blocking") and args[0].__dict__[_PINNED]):
        syncs.add("upload", "to")


def _target(args: tuple, options: dict) -> str | None:
    """Return the kind of device that `.to` names, or None."""
    for value in (*args[1:], options.get("device")):
        if isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
            return "cuda" if isinstance(value, int) else _kind_of(value)
    return None


def _has_shape_of_data(name: str, args: tuple, options: dict) -> bool:
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else options.get("repeats")
        return isinstance(repeats, torch.Tensor) and options.get("output_size") is None
    if name == "where":
        return len(args) == 1
    if name in ("__getitem__", "__setitem__", "index_put_"):
        index = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
        masks = any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
        fills = name == "__setitem__" and not (isinstance(args[2], torch.Tensor) and args[2].numel() > 1)
        return masks and not fills
    return name in SHAPES


def _marked(
    syncs: HostSyncs, function: Any, args: tuple, options: dict, inputs: list[torch.Tensor], result: Any
) -> Any:
    """Return the result of a call, remembered as the host's or the device's."""
    name = getattr(function, "__name__", "")
    if name in ("to", "type") and isinstance(result, torch.Tensor) and args:
        return _moved(syncs, args, options, result)
    if name in ("tensor", "asarray") and not _on_device(options.get("device")):
        syncs.mark_host(result, pinned=bool(options.get("pin_memory")))
        return result
    if name == "cpu":
        result = result.detach() if result is args[0] and not result.requires_grad else result
        syncs.mark_host(result)
        return result
    made_here = [tensor for tensor in _tensors([result]) if all(tensor is not one for one in inputs)]
    host = bool(inputs) and all(syncs.is_host(tensor) for tensor in inputs)
    host = host or (not inputs and not _on_device(options.get("device")))
    host = (host or name == "pin_memory") and not _on_device(options.get("device"))
    for tensor in made_here if host else ():
        syncs.mark_host(tensor, pinned=bool(options.get("pin_memory")) or name == "pin_memory")
    return result


def _moved(syncs: HostSyncs, args: tuple, options: dict, result: torch.Tensor) -> torch.Tensor:
    target, source = _target(args, options), args[0]
    host = syncs.is_host(source) if target is None else target == "cpu"
    if host == syncs.is_host(source) and result is source:
        return result
    # The pretended copy is the tensor itself: what stays on the other side keeps its place.
    if result is source and not result.requires_grad:
        result = result.detach()
    (syncs.mark_host if host else syncs.mark_device)(result)
    return result


def installed() -> HostSyncs:
    """Make this process a pretended CUDA machine whose waits are counted; `cuda_on_cpu.Mode` is needed as well."""
    syncs = HostSyncs()
    cuda_on_cpu.Mode = mode_of(syncs)  # type: ignore[misc]
    cuda_on_cpu.install()
    loader: Any = torch.utils.data.DataLoader
    torch.cuda.synchronize = lambda *_: syncs.add("wait", "cuda.synchronize")
    cuda_on_cpu._Stream.synchronize = lambda *_: syncs.add("wait", "Stream.synchronize")
    cuda_on_cpu._Event.record = lambda event, *_: setattr(event, "calls", syncs.calls)
    cuda_on_cpu._Event.synchronize = lambda event: syncs.waited(event)
    for name, kind in (*((name, "object") for name in OBJECTS), ("barrier", "wait")):
        setattr(dist, name, _counted(getattr(dist, name), syncs, kind, name))
    loader.__iter__ = _pinning(loader.__iter__, syncs)
    pin = torch.Tensor.pin_memory
    for name in ("from_numpy", "get_rng_state"):  # of a CUDA generator too
        setattr(torch, name, _of_host(getattr(torch, name), syncs))

    def pinned(self: torch.Tensor, *_: Any) -> torch.Tensor:
        tensor = pin(self).detach()
        syncs.mark_host(tensor, pinned=True)
        return tensor

    def tensor_cuda(self: torch.Tensor, *_: Any, non_blocking: bool = False, **__: Any) -> torch.Tensor:
        return self.to("cuda", non_blocking=non_blocking)

    def module_cuda(self: torch.nn.Module, *_: Any) -> torch.nn.Module:
        for tensor in (*self.parameters(), *self.buffers()):
            syncs.mark_device(tensor)
        return self

    torch.Tensor.pin_memory, torch.Tensor.cuda, torch.nn.Module.cuda = pinned, tensor_cuda, module_cuda
    return syncs


def _of_host(stock: Callable[..., torch.Tensor], syncs: HostSyncs) -> Callable[..., torch.Tensor]:
    """Return a function of torch whose result is in the host's memory."""

    def marked(*args: Any) -> torch.Tensor:
        tensor = stock(*args)
        syncs.mark_host(tensor)
        return tensor

    return marked


def _pinning(stock: Callable[..., Any], syncs: HostSyncs) -> Callable[..., Any]:
    """Return a data loader's `__iter__` that pins what it reads where it is asked to: it would see no device."""

    def pinned_batches(self: Any) -> Any:
        for batch in stock(self):
            for tensor in _tensors([batch]):
                syncs.mark_host(tensor, pinned=self.pin_memory)
            yield batch

    return pinned_batches


def _counted(stock: Callable[..., Any], syncs: HostSyncs, kind: str, name: str) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        syncs.add(kind, name)
        switched = torch._C.DisableTorchFunction  # what it is made of is not counted again
        with switched():
            return stock(*args, **options)

    return counted


DEFAULTS = (
    "--preset tiny --mock-data --vocab-size 512 --seq-length 32 --max-position-embeddings 32 --eval-iters 0 "
    "--micro-batch-size 1 --global-batch-size 4 --lr-decay-iters 2 --exit-interval 2"
).split()


SYNCS: HostSyncs


def serve_ranks() -> None:
    """Make this process such a machine, and fork ranks that are (see `tests/helpers/ranks.py`)."""
    global SYNCS
    SYNCS = installed()
    ranks.serve()


def write_counts(argv: list[str]) -> None:
    """Train as a forked rank; rank 0 writes for each phase of the last step the waits, and those that are hidden."""
    from megatron_moe.config import cli
    from megatron_moe.training import loop
    from megatron_moe.training.run import pretrain

    stock = loop.run_step

    def run_step(*args: Any) -> None:
        SYNCS.found.clear()
        SYNCS.on = True
        stock(*args)
        SYNCS.on = False

    with mock.patch.object(loop, "run_step", run_step), cuda_on_cpu.Mode():
        pretrain(cli.parse([*DEFAULTS, *argv]))
    by_phase: dict[str, list[int]] = {phase: [0, 0] for phase in PHASES}
    for wait, count in SYNCS.found.items():
        print(count, wait)
        by_phase[wait.phase][wait.kind == "hidden"] += count
    if os.environ["RANK"] == "0":
        Path("counts.json").write_text(json.dumps(by_phase))
