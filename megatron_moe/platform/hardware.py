"""What this machine is: CUDA or CPU, its memory, and which optional libraries are installed.

Answers are computed at every call; cached are those that cannot change within a process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from megatron_moe.config.errors import ConfigError
from megatron_moe.platform import devices, host, optional_libraries


@dataclass(frozen=True)
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


def on_cpu(tensor: torch.Tensor) -> bool:
    """Return whether a CPU works on this tensor.

    That is so if it is in a CPU's memory, or on the meta device and there is no CUDA device, real or faked.
    """
    return tensor.device.type == "cpu" or (tensor.is_meta and not has_cuda())


def local_rank() -> int:
    """Return this process's rank on its machine: torchrun's LOCAL_RANK, 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    """Return the device of this process: cuda:LOCAL_RANK, cpu without CUDA, meta where the machine is faked.

    Raises:
        MachineError: this machine's CUDA devices cannot be used, or do not suffice for its ranks; see `devices.check`.
    """
    if _fake_machine.get() is not None:
        return torch.device("meta")
    devices.check()
    return torch.device("cuda", local_rank()) if has_cuda() else torch.device("cpu")


def backend(override: str | None = None) -> str:
    """Return the torch.distributed backend: nccl with CUDA, gloo without, or `override` where it can work.

    Raises:
        ConfigError: `override` is nccl without a CUDA device, or gloo with one (tensors are on the device, and gloo has
            no all-to-all there).
        MachineError: see `device`.
    """
    if _fake_machine.get() is None:
        devices.check()
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


def why_no_transformer_engine() -> str | None:
    """Return why Transformer Engine cannot be used here, with what its import raised; None where it can be."""
    return optional_libraries.why_not_loaded("transformer_engine") if has_cuda() else "there is no CUDA device"


def have_transformer_engine() -> bool:
    """Return whether Transformer Engine can be loaded and there is a CUDA device for it."""
    return why_no_transformer_engine() is None


def require_transformer_engine(flag: str, instead: str) -> None:
    """Refuse a flag that needs Transformer Engine where it cannot be used.

    Args:
        flag: with its value, as it is typed.
        instead: the flag that works without.

    Raises:
        ConfigError: it cannot be used here.
    """
    why = why_no_transformer_engine()
    if why is not None:
        raise ConfigError(
            f"{flag}: Transformer Engine cannot be used here, {why}; install one that was built for this torch and "
            f"CUDA (the extra [gpu]), or use {instead}"
        )


def unusable_libraries() -> list[str]:
    """Return a line for each of Transformer Engine and apex that is installed, has a device, and cannot be loaded."""
    lines = []
    for library, name in optional_libraries.NAMES.items():
        why = optional_libraries.why_not_loaded(library) if has_cuda() else None
        if why is not None and why != optional_libraries.NOT_INSTALLED:
            lines.append(f"{name} is not used: {why}")
    return lines
