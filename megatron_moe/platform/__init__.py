"""Where a run runs: the device, the communication backend and what is installed.

The only room that adapts megatron-core to a machine without CUDA (`cpu_adaptor.py`). Importing it loads no torch: the
questions about the hardware are answered by `hardware.py`, which is imported when the first of them is asked.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_moe.platform.cpu_adaptor import install

if TYPE_CHECKING:
    from megatron_moe.platform.advisories import engine_version
    from megatron_moe.platform.hardware import (
        DEVICE_KINDS,
        available_memory_bytes,
        backend,
        beside_the_training,
        device,
        has_cuda,
        have_apex,
        have_transformer_engine,
        imagining,
        kernel,
        local_rank,
        max_memory_bytes,
        on_cpu,
        synchronize,
    )

__all__ = [
    "DEVICE_KINDS",
    "available_memory_bytes",
    "backend",
    "beside_the_training",
    "device",
    "engine_version",
    "has_cuda",
    "have_apex",
    "have_transformer_engine",
    "imagining",
    "install",
    "kernel",
    "local_rank",
    "max_memory_bytes",
    "on_cpu",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "advisories" if name == "engine_version" else "hardware"
    return getattr(import_module(f"megatron_moe.platform.{module}"), name)
