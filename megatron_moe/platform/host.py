"""The memory and cores of this machine, and whether NVIDIA devices are expected on it, without torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

# The kinds of machine; the first is the one of large runs.
DEVICE_KINDS = ("cuda", "cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILES = (Path("/dev"), "nvidia[0-9]*")
# Other ways to a GPU: of WSL, of a Jetson, and of AMD, whose devices torch calls cuda, too.
_OTHER_DEVICES = (Path("/dev/dxg"), Path("/dev/nvmap"), Path("/dev/kfd"))
# Slurm writes the last of these for a job without devices. CUDA reads a list up to the first device that is not there.
_HIDING = ("", "-1", "nodevfiles")
# The files in which Linux reports a control group's memory limit and use: version 2, version 1.
_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def expected_devices(environment: Mapping[str, str]) -> str | None:
    """Return what says that this process has NVIDIA devices; None where nothing does, or where they are hidden."""
    named = environment.get(VISIBLE)
    if named is None:
        return device_files()
    return None if named.split(",")[0].strip().lower() in _HIDING else f"{VISIBLE}={named}"


@functools.cache
def device_files() -> str | None:
    """Return the device files of NVIDIA's driver, None where there are none."""
    folder, pattern = _DEVICE_FILES
    return ", ".join(sorted(str(path) for path in folder.glob(pattern))) or None


def visible_devices() -> int:
    """Return how many NVIDIA devices a process started here would see, by its environment and the driver's files."""
    if expected_devices(os.environ) is None:
        return 0
    return len(os.environ.get(VISIBLE, device_files() or "").split(","))


def cannot_have_a_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether no device file and no setting lets torch find a GPU; False where that is not certain."""
    return expected_devices(environment) is None and not (
        VISIBLE not in environment and any(path.exists() for path in _OTHER_DEVICES)
    )


def available_bytes() -> int:
    """Return how many bytes can still be allocated in the control group; what files occupy counts as free."""
    available = psutil.virtual_memory().available
    for folder, limit, used in _CONTROL_GROUPS:
        try:
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            room = int((folder / limit).read_text()) - int((folder / used).read_text())
            available = min(available, room + int(statistics["inactive_file"]) + int(statistics["active_file"]))
        except (OSError, ValueError, KeyError):  # no such group, or "max": no limit
            continue
    return max(available, 0)


def total_bytes() -> int:
    """Return the memory and swap of this machine, within the limit of the control group."""
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    for folder, limit, _ in _CONTROL_GROUPS:
        try:
            total = min(total, int((folder / limit).read_text()) + psutil.swap_memory().total)
        except (OSError, ValueError):
            continue
    return total


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
