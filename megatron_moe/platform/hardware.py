"""What this machine is: CUDA or CPU, its memory, and which optional libraries can be used.

Answers are computed at every call; cached are those that cannot change within a process.

A run refuses to start where the CUDA devices that a user may expect cannot be used, or do not suffice for the ranks:
otherwise a node with a driver that is too old would train on its CPU, and ranks that a launcher did not number would
share one device.

megatron-core imports Transformer Engine and apex where they are installed, and expects no other failure than that they
are missing. A build for another torch or CUDA fails with an ImportError, OSError, AssertionError or RuntimeError of its
own, and with it `import megatron.core`, also for a run that uses neither library: one that cannot be used is hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import resource
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.errors import ConfigError, MachineError
from megatron_moe.platform import host
from megatron_moe.platform.protocols import AutogradContext


@dataclasses.dataclass(frozen=True)
class _FakeMachine:
    """A machine that is not there. kind: one of DEVICE_KINDS. kernels: torch's functions, each with its replacement."""

    kind: str
    kernels: Mapping[Callable, Callable]


_fake_machine: ContextVar[_FakeMachine | None] = ContextVar("fake_machine", default=None)


@contextlib.contextmanager
def fake_device(kind: str, kernels: Mapping[Callable, Callable]) -> Iterator[None]:
    """Run the block as if on a machine of another kind, "cuda" or "cpu", to plan a run without allocating anything.

    What the block builds is built as it would be on that machine, but on torch's meta device. `kernels` replace fused
    kernels, which torch would decompose there.
    """
    token = _fake_machine.set(_FakeMachine(kind, kernels))
    try:
        yield
    finally:
        _fake_machine.reset(token)


def kernel(function: Callable) -> Callable:
    """Return a fused kernel's function, or its replacement where the machine is faked."""
    fake = _fake_machine.get()
    return function if fake is None else fake.kernels.get(function, function)


def has_cuda() -> bool:
    """Return whether torch sees a CUDA device, or one is faked."""
    fake = _fake_machine.get()
    return torch.cuda.is_available() if fake is None else fake.kind == "cuda"


def has_streams() -> bool:
    """Return whether work can be queued on CUDA streams: there is a device, and it is not faked."""
    return _fake_machine.get() is None and torch.cuda.is_available()


def on_cpu(tensor: Tensor) -> bool:
    """Return whether a CPU works on this tensor: it is there, or on the meta device without a CUDA device."""
    return tensor.is_cpu or (tensor.is_meta and not has_cuda())


def local_rank() -> int:
    """Return this process's rank on its machine: torchrun's LOCAL_RANK, 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    """Return the device of this process: cuda:LOCAL_RANK, cpu without CUDA, meta where the machine is faked.

    Raises:
        MachineError: this machine's CUDA devices cannot be used, or do not suffice for its ranks; see `check_devices`.
    """
    if _fake_machine.get() is not None:
        return torch.device("meta")
    check_devices()
    return torch.device("cuda", local_rank()) if has_cuda() else torch.device("cpu")


_ON_THE_CPU = f"set {host.VISIBLE}= (empty) to run on the CPU"


def check_devices() -> None:
    """Refuse, by a MachineError, NVIDIA devices that torch cannot use and that are not hidden, and too many ranks."""
    if torch.cuda.is_available():
        _check_ranks(os.environ, torch.cuda.device_count())
    elif (expected := host.expected_devices(os.environ)) is not None:
        reason = "torch gives no reason"
        try:
            with warnings.catch_warnings():  # the error repeats them
                warnings.simplefilter("ignore")
                torch.cuda.init()
        except Exception as error:  # AssertionError of a build without CUDA, RuntimeError of the driver
            reason = " ".join(str(error).split())
        raise MachineError(
            f"{expected}: torch {torch.__version__} cannot use the NVIDIA devices of {socket.gethostname()}: "
            f"{reason}; make them usable (the driver, the container's devices, a torch that is built for "
            f"this CUDA), or {_ON_THE_CPU}"
        )


def _check_ranks(environment: Mapping[str, str], devices: int) -> None:
    """Refuse a launcher's environment that does not give every rank a device of its own."""
    machine = f"{socket.gethostname()} has {devices} CUDA device{'s' if devices != 1 else ''}"
    for name, most in (("LOCAL_WORLD_SIZE", devices), ("LOCAL_RANK", devices - 1)):
        if name in environment and int(environment[name]) > most:
            raise MachineError(
                f"{name}={environment[name]}: {machine}, and every rank needs one of its own; use torchrun "
                f"--nproc-per-node {devices} and as many devices in {host.VISIBLE}, or {_ON_THE_CPU}"
            )
    if int(environment.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" not in environment:
        raise MachineError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} without LOCAL_RANK: all ranks of {socket.gethostname()} would use "
            f"its first CUDA device; start them with torchrun, which sets LOCAL_RANK, or {_ON_THE_CPU}"
        )


def backend(override: str | None = None) -> str:
    """Return the torch.distributed backend: nccl with CUDA, gloo without, or `override` where it can work.

    Raises:
        ConfigError: `override` is nccl without a CUDA device, or gloo with one, which has no all-to-all there.
        MachineError: see `device`.
    """
    if _fake_machine.get() is None:
        check_devices()
    if override is None:
        return "nccl" if has_cuda() else "gloo"
    if override not in ("nccl", "gloo"):
        raise ConfigError(f"--distributed-backend {override}: is neither nccl nor gloo; leave the flag out")
    if override == "nccl" and not has_cuda():
        raise ConfigError(
            "--distributed-backend nccl: needs a CUDA device and torch sees none; leave the flag out or use gloo"
        )
    if override == "gloo" and has_cuda():
        raise ConfigError(
            "--distributed-backend gloo: tensors are on the CUDA device, which gloo serves only in part; leave the "
            "flag out, or hide the devices with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return override


def synchronize() -> None:
    """Wait until the device has finished what was queued; return immediately on the CPU."""
    if has_cuda():
        torch.cuda.synchronize()


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """Queue the block's work on a CUDA stream of its own, in parallel to other threads', and wait for it at the end."""
    if not has_cuda():
        yield
        return
    stream = torch.cuda.Stream(device())  # a new thread's own device is the first one
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def max_memory_bytes() -> int:
    """Return this process's peak memory in bytes: on the device with CUDA, resident memory without."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def cuda_profile() -> contextlib.AbstractContextManager[None]:
    """Return a block that a profiler around the process (nsys) records, where it waits for CUDA's profiler API."""
    return torch.cuda.profiler.profile()


def memory_statistics() -> dict[str, int]:
    """Return what this process has allocated, by Megatron-LM's names; without CUDA the peak alone, in bytes."""
    if not has_cuda():
        return {"mem-max-allocated-bytes": max_memory_bytes()}
    found = torch.cuda.memory_stats()
    return {
        "mem-reserved-bytes": found["reserved_bytes.all.current"],
        "mem-allocated-bytes": found["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": found["allocated_bytes.all.peak"],
        "mem-allocated-count": found["allocation.all.current"],
    }


def available_memory_bytes() -> int:
    """Return how many bytes can still be allocated.

    With CUDA it is the device's memory; without, this machine's, within the limit of the control group (a container's,
    or a batch system's). What files occupy in memory counts as free.
    """
    if has_cuda():
        return torch.cuda.mem_get_info(device())[0]
    return host.available_bytes()


def capability(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the compute capability of the GPU that has a tensor; None for another device."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def is_captured(tensor: torch.Tensor) -> bool:
    """Return whether what is done with a tensor is being captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


_FP8_CAPABILITY, _FP8_CUDA = 9, (12, 9)


def why_no_fp8_products() -> str | None:
    """Return why no card here has products in FP8 with a scale per tile of 1 x 128 and 128 x 128; None where it has.

    cuBLAS has them from CUDA 12.9 on, for compute capability 9.x alone (H100, H200). Later cards have another format.
    """
    if not has_streams():
        return "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability(device())
    if major != _FP8_CAPABILITY:
        return f"the device's compute capability is {major}.{minor}, and cuBLAS has FP8 in tiles of 128 for 9.x alone"
    version = torch.version.cuda or "0.0"
    if tuple(int(part) for part in version.split(".")[:2]) < _FP8_CUDA:
        return f"this torch was built for CUDA {version}, and cuBLAS has FP8 in tiles of 128 from CUDA 12.9 on"
    return None


_GROUPED_MAJORS = (9, 10)


def has_grouped_kernel(dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product of this dtype is one kernel on this process's CUDA device.

    Elsewhere, as on compute capability 8.x and 12.x (`_grouped_mm_cuda` of torch 2.9 to 2.13), it is a product for each
    group after a copy of the offsets to the host, which waits for them.
    """
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device())[0] in _GROUPED_MAJORS


# ---- A CUDA stream next to the current one, for work that needs few results of others and hides behind their messages.
#
# A tensor that one stream wrote and another reads needs two things, in forward and again, the other way round, in
# backward: the reader waits for the writer, and the allocator has to know of the reader, since it would otherwise hand
# the memory out again while the reader is still at work. `fork` and `join` do both, on the way to the side stream and
# back. Autograd runs the backward of an operation on the stream of its forward.


@functools.cache
def _side(device: int) -> torch.cuda.Stream:
    """Return the side stream of a device, the same one for all layers: they do not run at the same time."""
    return torch.cuda.Stream(device)


def side() -> torch.cuda.Stream:
    """Return the side stream of the current device."""
    return _side(torch.cuda.current_device())


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, origin: torch.cuda.Stream, target: torch.cuda.Stream) -> Tensor:
        ctx.streams = origin, target
        target.wait_stream(origin)
        tensor.record_stream(target)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        origin, target = ctx.streams
        origin.wait_stream(target)
        grad.record_stream(origin)
        return grad, None, None


def fork(tensor: Tensor) -> Tensor:
    """Return a tensor of the current stream for the side stream, which waits for what is queued on this one so far.

    What is queued on the current stream after this call runs next to the side stream's work. Backward: the current
    stream waits for the gradient.
    """
    return _Crossing.apply(tensor, torch.cuda.current_stream(), side())


def join(tensor: Tensor) -> Tensor:
    """Return a tensor of the side stream for the current one, which waits for it. Backward: the other way round."""
    return _Crossing.apply(tensor, side(), torch.cuda.current_stream())


def keep(value: Any) -> None:
    """Keep the memory of a tensor, or of all in a tuple, list or dataclass, for the current stream, which reads it."""
    if isinstance(value, Tensor):
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream())
    elif isinstance(value, (tuple, list)):
        for part in value:
            keep(part)
    elif dataclasses.is_dataclass(value):
        keep(list(vars(value).values()))


def on_side() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which work is queued on the side stream."""
    return torch.cuda.stream(side())


# ---- Copies between host and device through pinned memory, that neither waits for.


class HostCopy:
    """A copy of a tensor that is on its way to the host.

    Work that is queued between the construction and `result` keeps the device busy while the host waits.

    Args:
        tensor: on this process's device; without CUDA, or on the meta device, it is taken as it is.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._copy = tensor
        if has_cuda() and not tensor.is_meta:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def result(self) -> Tensor:
        """Return the copy in the host's memory; waits for what was queued before the construction, and no longer."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._copy


def on_device(values: Sequence[float], dtype: torch.dtype, to: torch.device | None = None) -> Tensor:
    """Return these numbers of the host as a tensor on the device, or on another, without waiting for it."""
    return torch.tensor(values, dtype=dtype, pin_memory=has_cuda()).to(to or device(), non_blocking=True)


# ---- Transformer Engine and apex.

# What of a library has to be loaded before it can be used. apex without its extensions offers an Adam that cannot be
# made; an unrelated package of that name has no optimizers.
_MODULES = {"transformer_engine": ("transformer_engine.pytorch",), "apex": ("apex.optimizers", "amp_C")}
LIBRARIES = {"transformer_engine": "Transformer Engine", "apex": "apex"}
NOT_INSTALLED = "it is not installed"
_REASON_LENGTH = 300


def hide_unusable(*, cuda: bool) -> None:
    """Make Transformer Engine and apex look missing in this process where they cannot be used.

    Both need a CUDA device, so that they are not even imported without one. One that the program has imported by itself
    already is left alone.
    """
    for library in _MODULES:
        if library in sys.modules or not _is_installed(library):
            continue
        if not cuda or why_not_loaded(library) is not None:
            # `import library` raises ModuleNotFoundError, and the parts of it that were loaded are forgotten.
            for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
                del sys.modules[name]
            sys.modules[library] = None  # type: ignore[assignment]


@functools.cache
def why_not_loaded(library: str) -> str | None:
    """Return why a library cannot be loaded, None if it can be; loads it at the first call."""
    if not _is_installed(library):
        return NOT_INSTALLED
    if library in sys.modules and sys.modules[library] is None:
        return "it is hidden, because torch saw no CUDA device when the engine was loaded"
    try:
        for module in _MODULES[library]:
            importlib.import_module(module)
    except Exception as error:  # whatever its own code raises
        text = " ".join(str(error).split())
        shown = text if len(text) <= _REASON_LENGTH else text[:_REASON_LENGTH] + " ..."
        return f"it is installed and cannot be loaded: {type(error).__name__}: {shown}".removesuffix(": ")
    return None


def _is_installed(library: str) -> bool:
    """Return whether there is a library of this name, also one that is hidden."""
    return library in sys.modules or importlib.util.find_spec(library) is not None


def why_no_transformer_engine() -> str | None:
    """Return why Transformer Engine cannot be used here, with what its import raised; None where it can be."""
    return why_not_loaded("transformer_engine") if has_cuda() else "there is no CUDA device"


def have_transformer_engine() -> bool:
    """Return whether Transformer Engine can be loaded and there is a CUDA device for it."""
    return why_no_transformer_engine() is None


def require_transformer_engine(flag: str, instead: str) -> None:
    """Refuse a flag that needs Transformer Engine where it cannot be used; `instead` is the one that works."""
    why = why_no_transformer_engine()
    if why is not None:
        raise ConfigError(
            f"{flag}: Transformer Engine cannot be used here, {why}; install one that was built for this torch and "
            f"CUDA (the extra [gpu]), or use {instead}"
        )


def unusable_libraries() -> list[str]:
    """Return a line for each of Transformer Engine and apex that is installed, has a device, and cannot be loaded."""
    lines = []
    for library, name in LIBRARIES.items():
        why = why_not_loaded(library) if has_cuda() else None
        if why is not None and why != NOT_INSTALLED:
            lines.append(f"{name} is not used: {why}")
    return lines
