"""Refuses to start where the CUDA devices that a user may expect cannot be used, or do not suffice for the ranks.

Without these rules a node with a driver that is too old would train on its CPU, and ranks that a launcher did not
number would share one device.
"""

from __future__ import annotations

import functools
import os
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path

from megatron_moe.config.errors import MachineError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILES = (Path("/dev"), "nvidia[0-9]*")
# Slurm writes the last of these for a job without devices. CUDA reads a list up to the first device that is not there.
_HIDING = ("", "-1", "nodevfiles")
_ON_THE_CPU = f"set {_VISIBLE}= (empty) to run on the CPU"


def check() -> None:
    """Refuse this process's devices where a run on them would not be what was asked for.

    Raises:
        MachineError: torch cannot use the machine's NVIDIA devices and they are not hidden, or it can, and the launcher
            gave this machine more ranks than it has devices, or did not number them.
    """
    import torch  # here, and not above: a launcher that counts devices needs no torch

    if torch.cuda.is_available():
        _check_ranks(os.environ, torch.cuda.device_count())
    elif (expected := _expected(os.environ)) is not None:
        raise MachineError(
            f"{expected}: torch {torch.__version__} cannot use the NVIDIA devices of {socket.gethostname()}: "
            f"{_why_unavailable()}; make them usable (the driver, the container's devices, a torch that is built for "
            f"this CUDA), or {_ON_THE_CPU}"
        )


def visible_count() -> int:
    """Return how many NVIDIA devices a process started here would see, by its environment and the driver's files."""
    named = os.environ.get(_VISIBLE)
    if _expected(os.environ) is None:
        return 0
    return len((_device_files() or "").split(", ")) if named is None else len(named.split(","))


def _expected(environment: Mapping[str, str]) -> str | None:
    """Return what says that this process has NVIDIA devices; None where nothing does, or where they are hidden."""
    named = environment.get(_VISIBLE)
    if named is None:
        return _device_files()
    return None if named.split(",")[0].strip().lower() in _HIDING else f"{_VISIBLE}={named}"


@functools.cache
def _device_files() -> str | None:
    """Return the device files of NVIDIA's driver, None where there are none."""
    folder, pattern = _DEVICE_FILES
    return ", ".join(sorted(str(path) for path in folder.glob(pattern))) or None


def _why_unavailable() -> str:
    """Return what torch says when it is made to use CUDA."""
    import torch

    try:
        with warnings.catch_warnings():  # the error repeats them
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except Exception as error:  # AssertionError of a build without CUDA, RuntimeError of the driver
        return " ".join(str(error).split())
    return "torch gives no reason"


def _check_ranks(environment: Mapping[str, str], devices: int) -> None:
    """Refuse a launcher's environment that does not give every rank a device of its own."""
    host = f"{socket.gethostname()} has {devices} CUDA device{'s' if devices != 1 else ''}"
    for name, most in (("LOCAL_WORLD_SIZE", devices), ("LOCAL_RANK", devices - 1)):
        if name in environment and int(environment[name]) > most:
            raise MachineError(
                f"{name}={environment[name]}: {host}, and every rank needs one of its own; use torchrun "
                f"--nproc-per-node {devices} and as many devices in {_VISIBLE}, or {_ON_THE_CPU}"
            )
    if int(environment.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" not in environment:
        raise MachineError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} without LOCAL_RANK: all ranks of {socket.gethostname()} would use "
            f"its first CUDA device; start them with torchrun, which sets LOCAL_RANK, or {_ON_THE_CPU}"
        )
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "WORLD_SIZE" not in environment:
        raise MachineError(
            f"SLURM_STEP_NUM_TASKS={environment['SLURM_STEP_NUM_TASKS']} without WORLD_SIZE: each task of srun would "
            "be a run of its own, on the first CUDA device; let srun start one torchrun on each node "
            f"(examples/slurm/launch.sh), use srun --ntasks 1, or {_ON_THE_CPU}"
        )
