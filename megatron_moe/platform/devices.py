"""Refuses to start where the CUDA devices that a user may expect cannot be used, or do not suffice for the ranks.

Without these rules a node with a driver that is too old would train on its CPU, and ranks that a launcher did not
number would share one device.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping

import torch

from megatron_moe.config.errors import MachineError
from megatron_moe.platform import host

_ON_THE_CPU = f"set {host.VISIBLE}= (empty) to run on the CPU"


def check() -> None:
    """Refuse this process's devices where a run on them would not be what was asked for.

    Raises:
        MachineError: torch cannot use the machine's NVIDIA devices and they are not hidden, or it can, and the launcher
            gave this machine more ranks than it has devices, or did not number them.
    """
    if torch.cuda.is_available():
        _check_ranks(os.environ, torch.cuda.device_count())
    elif (expected := host.expected_devices(os.environ)) is not None:
        raise MachineError(
            f"{expected}: torch {torch.__version__} cannot use the NVIDIA devices of {socket.gethostname()}: "
            f"{_why_unavailable()}; make them usable (the driver, the container's devices, a torch that is built for "
            f"this CUDA), or {_ON_THE_CPU}"
        )


def _why_unavailable() -> str:
    """Return what torch says when it is made to use CUDA."""
    try:
        with warnings.catch_warnings():  # the error repeats them
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except Exception as error:  # AssertionError of a build without CUDA, RuntimeError of the driver
        return " ".join(str(error).split())
    return "torch gives no reason"


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
