"""What this machine is: CUDA or CPU, and which optional libraries it has.

Read at the moment of the question; nothing is remembered but what cannot change within a process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatron_moe.config.errors import ConfigError

# The kinds of machine there are; the first is what large jobs run on.
DEVICE_KINDS = ("cuda", "cpu")
# Where Linux says how much memory a control group may take and takes: version 2, version 1.
_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class _Imagined:
    """kind: one of DEVICE_KINDS. kernels: torch's functions, each with what stands for it."""

    kind: str
    kernels: Mapping[Callable, Callable]


_imagined: ContextVar[_Imagined | None] = ContextVar("imagined", default=None)


@contextlib.contextmanager
def imagining(kind: str, kernels: Mapping[Callable, Callable]) -> Iterator[None]:
    """A machine of another kind, "cuda" or "cpu", without storage: what is built in here is built as it would be there,
    on torch's meta device, where `kernels` stand for fused ones that torch would take apart. For a plan on paper."""
    token = _imagined.set(_Imagined(kind, kernels))
    try:
        yield
    finally:
        _imagined.reset(token)


def kernel(function: Callable) -> Callable:
    """A fused kernel's function, or what stands for it where the machine is imagined."""
    imagined = _imagined.get()
    return function if imagined is None else imagined.kernels.get(function, function)


def has_cuda() -> bool:
    """True where torch sees a CUDA device, or one is imagined."""
    imagined = _imagined.get()
    return torch.cuda.is_available() if imagined is None else imagined.kind == "cuda"


def on_cpu(tensor: torch.Tensor) -> bool:
    """True where a CPU works on this tensor: it is in a CPU's memory, or on the meta device and no CUDA device is
    there or imagined."""
    return tensor.device.type == "cpu" or (tensor.is_meta and not has_cuda())


def local_rank() -> int:
    """This process's number on its machine: torchrun's LOCAL_RANK, 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    """The device of this process: cuda:LOCAL_RANK, cpu where there is no CUDA, meta where the machine is imagined."""
    if _imagined.get() is not None:
        return torch.device("meta")
    return torch.device("cuda", local_rank()) if has_cuda() else torch.device("cpu")


def backend(override: str | None = None) -> str:
    """The torch.distributed backend: nccl with CUDA, gloo without, or `override` where it can work.

    Raises:
        ConfigError: nccl was asked for and there is no CUDA device; gloo was asked for and there is one (tensors are
            on the device, and gloo has no all-to-all there).
    """
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
    """Wait until the device has done what was queued; nothing to wait for on the CPU."""
    if has_cuda():
        torch.cuda.synchronize()


@contextlib.contextmanager
def beside_the_training() -> Iterator[None]:
    """Work that is queued within goes on beside what other threads queue, and is done afterwards."""
    if not has_cuda():
        yield
        return
    stream = torch.cuda.Stream(device())  # a new thread's own device is the first one
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def max_memory_bytes() -> int:
    """The most memory this process has held, in bytes: on the device with CUDA, resident memory without."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def available_memory_bytes() -> int:
    """Bytes that can still be allocated: on the device with CUDA; without, in this machine's memory and within the
    limit of the control group (a container's, a job's). What files occupy in memory counts as free."""
    if has_cuda():
        return torch.cuda.mem_get_info(device())[0]
    available = psutil.virtual_memory().available
    for folder, limit, used in _CONTROL_GROUPS:
        try:
            held = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            room = int((folder / limit).read_text()) - int((folder / used).read_text())
            available = min(available, room + int(held["inactive_file"]) + int(held["active_file"]))
        except (OSError, ValueError, KeyError):  # no such group, or "max": no limit
            continue
    return max(available, 0)


@functools.cache
def have_transformer_engine() -> bool:
    """True where Transformer Engine can be imported and there is a CUDA device for it."""
    return has_cuda() and _importable("transformer_engine.pytorch")


@functools.cache
def have_apex() -> bool:
    """True where apex's optimizers can be imported and there is a CUDA device for them."""
    return has_cuda() and _importable("apex.optimizers")


def _importable(name: str) -> bool:
    """True where module `name` imports. A build for another CUDA fails with OSError, a missing one with ImportError."""
    try:
        importlib.import_module(name)
    except (ImportError, OSError):
        return False
    return True
