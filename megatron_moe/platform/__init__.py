"""The machine that a run is on: the device, the communication backend and which optional libraries are installed.

Importing the package loads no torch: the functions about the hardware are in `hardware.py`, which is imported when the
first of them is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_moe.platform.hardware import *  # noqa: F403
    from megatron_moe.platform.host import DEVICE_KINDS
    from megatron_moe.platform.pinned_memory import host_memory

__all__ = [  # noqa: F405
    "DEVICE_KINDS",
    "available_memory_bytes",
    "backend",
    "cuda_profile",
    "device",
    "has_cuda",
    "has_streams",
    "have_transformer_engine",
    "host_memory",
    "fake_device",
    "kernel",
    "local_rank",
    "max_memory_bytes",
    "memory_statistics",
    "on_cpu",
    "require_transformer_engine",
    "side_stream",
    "synchronize",
    "unusable_libraries",
    "why_no_fp8_products",
    "why_no_transformer_engine",
]


_ELSEWHERE = {"DEVICE_KINDS": "host", "host_memory": "pinned_memory"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _ELSEWHERE.get(name, "hardware")
    return getattr(import_module(f"megatron_moe.platform.{module}"), name)
