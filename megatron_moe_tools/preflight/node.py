"""Checks of a node: its GPUs by nvidia-smi, its cores, its limits, the disk of --save's folder."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.io.files import free_bytes, new_file
from megatron_moe.io.texts import duration_text, size_text
from megatron_moe_tools.preflight.findings import FAIL, IMPOSSIBLE, PASS, WARN, Finding, Place

_SMI_SECONDS = 20
_FIELDS = (
    "index",
    "clocks_throttle_reasons.active",
    "clocks.max.sm",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "memory.used",
)
_HOT, _WARM = 88, 83
"""Degrees Celsius: data-centre GPUs slow down from about 88 on, and idle at 25 to 50."""
_USED_MIB = 2048
# Bits of nvidia-smi's clocks_throttle_reasons. Not among them: idle, a set application clock, the power cap at work.
_SLOWED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 1 << 30
_LEAST_LOCKED = 64 << 20
_WRITTEN, _PIECE = 256 << 20, 8 << 20
_WRITE_SECONDS = 10.0
# Weights in the run's dtype, main weights and two moments in fp32: what a step of a checkpoint has per parameter.
_BYTES_PER_PARAMETER = 14


class Gpu(NamedTuple):
    """A GPU as nvidia-smi reports it; None where it says [N/A]."""

    number: str
    throttled: int | None
    max_clock: int | None
    temperature: int | None
    uncorrected: int | None
    used_mib: int | None


def gpus() -> list[Gpu] | Finding:
    """Return this node's GPUs by nvidia-smi, or the finding that says why it reports none."""
    if shutil.which("nvidia-smi") is None:
        status = WARN if platform.has_cuda() else IMPOSSIBLE
        advice = "install NVIDIA's driver utilities in the container" if status == WARN else ""
        return Finding(status, "nvidia-smi is not on PATH", advice)
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(FAIL, f"nvidia-smi did not answer within {_SMI_SECONDS} s", "drain the node: its driver hangs")
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        return Finding(FAIL, f"nvidia-smi ended with status {done.returncode}: {said}", "repair the driver of the node")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [Gpu(row[0], *(_number(cell) for cell in row[1:])) for row in rows if len(row) == len(_FIELDS)]


def _number(cell: str) -> int | None:
    try:
        return int(cell, 0)  # throttle reasons are hexadecimal
    except ValueError:
        return None


def _of_gpus(judge: Callable[[list[Gpu]], Finding]) -> Callable[[Place], Finding]:
    """Make a check of what judges the node's GPUs; where nvidia-smi reports none, its finding says why."""

    @functools.wraps(judge)
    def look(place: Place) -> Finding:
        found = gpus()
        return found if isinstance(found, Finding) else judge(found)

    return look


@_of_gpus
def gpu_clocks(found: list[Gpu]) -> Finding:
    """Check that no GPU is slowed down, and that all may reach the same clock."""
    slowed = {gpu.number: [word for bit, word in _SLOWED.items() if (gpu.throttled or 0) & bit] for gpu in found}
    if any(slowed.values()):
        text = "; ".join(f"GPU {index}: {', '.join(words)}" for index, words in slowed.items() if words)
        return Finding(FAIL, text, "drain the node: look at its cooling and power, then nvidia-smi -q -d PERFORMANCE")
    clocks = {gpu.max_clock for gpu in found if gpu.max_clock is not None}
    if len(clocks) > 1:
        each = ", ".join(f"GPU {gpu.number} {gpu.max_clock} MHz" for gpu in found)
        return Finding(WARN, f"highest clocks differ: {each}", "reset limits with nvidia-smi --reset-gpu-clocks")
    return Finding(PASS, f"{len(found)} GPUs, none slowed down, up to {max(clocks, default=0)} MHz")


@_of_gpus
def gpu_temperature(found: list[Gpu]) -> Finding:
    """Check that the GPUs are cool enough before the work begins."""
    known = [(gpu.temperature, gpu.number) for gpu in found if gpu.temperature is not None]
    if not known:
        return Finding(IMPOSSIBLE, "nvidia-smi reports no temperature")
    hottest, index = max(known)
    text, figures = f"at most {hottest} C, GPU {index}", {"celsius": float(hottest)}
    if hottest >= _WARM:
        status = FAIL if hottest >= _HOT else WARN
        return Finding(status, text, f"below {_WARM} C is well; look at the node's cooling", figures)
    return Finding(PASS, text, figures=figures)


@_of_gpus
def gpu_memory_errors(found: list[Gpu]) -> Finding:
    """Check that no GPU has had an uncorrected memory error since the driver was loaded."""
    wrong = [f"GPU {gpu.number}: {gpu.uncorrected}" for gpu in found if gpu.uncorrected]
    if wrong:
        return Finding(FAIL, f"uncorrected memory errors: {', '.join(wrong)}", "reset these GPUs, or replace them")
    if all(gpu.uncorrected is None for gpu in found):
        return Finding(WARN, "no GPU counts memory errors (ECC is off)", "nvidia-smi --ecc-config=1, then a reboot")
    return Finding(PASS, "no uncorrected memory error")


@_of_gpus
def gpu_in_use(found: list[Gpu]) -> Finding:
    """Check that no other process has memory of the GPUs; what this tool's own ranks took is little."""
    used = [f"GPU {gpu.number}: {gpu.used_mib} MiB" for gpu in found if (gpu.used_mib or 0) > _USED_MIB]
    if used:
        return Finding(WARN, f"memory is in use: {', '.join(used)}", "end what runs there: see nvidia-smi")
    return Finding(PASS, f"at most {max((gpu.used_mib or 0 for gpu in found), default=0)} MiB in use on a GPU")


def cpu_cores(place: Place) -> Finding:
    """Check that the ranks of a node may use a core each, and as many as their threads."""
    cores, ranks = len(os.sched_getaffinity(0)), place.local_world_size
    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    found = f"cores {cores}, ranks of this node {ranks}, OMP_NUM_THREADS {threads}"
    if cores < ranks:
        return Finding(
            FAIL,
            found,
            'give srun --cpus-per-task "$SLURM_CPUS_PER_TASK" (it does not inherit sbatch\'s since Slurm 22.05), or '
            "the container more cores (--cpuset-cpus)",
        )
    if cores < ranks * threads:
        return Finding(WARN, found, f"set OMP_NUM_THREADS to at most {cores // ranks}")
    return Finding(PASS, found)


def memlock(place: Place) -> Finding:
    """Check the limit of memory that a process may lock, which InfiniBand's buffers need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(PASS, "unlimited")
    found = f"{size_text(soft)} may be locked"
    if not platform.has_cuda():
        return Finding(PASS, f"{found}; nothing is locked without a CUDA device")
    advice = "docker run --ulimit memlock=-1; on Slurm, LimitMEMLOCK=infinity of slurmd and PropagateResourceLimits"
    if place.nodes > 1:
        return Finding(FAIL, f"{found}, and NCCL locks its buffers for the network between nodes", advice)
    return Finding(WARN if soft < _LEAST_LOCKED else PASS, found, advice if soft < _LEAST_LOCKED else "")


def shared_memory(place: Place) -> Finding:
    """Check the size of /dev/shm, through which NCCL's ranks of a node and data workers meet."""
    if not _SHARED_MEMORY.is_dir():
        return Finding(WARN, f"there is no {_SHARED_MEMORY}", "mount a tmpfs there")
    room = free_bytes(_SHARED_MEMORY)
    found = f"{size_text(room or 0)} free in {_SHARED_MEMORY}"
    if room is not None and room < _LEAST_SHARED:
        status = FAIL if platform.has_cuda() and place.local_world_size > 1 else WARN
        return Finding(status, found, "docker run --ipc=host, or --shm-size 16g")
    return Finding(PASS, found)


def disk_space(place: Place) -> Finding:
    """Check that --save's folder has room for a step of the checkpoint, and for the next one next to it."""
    folder = _save_folder(place.run)
    if isinstance(folder, Finding):
        return folder
    room = free_bytes(folder)
    if room is None:
        return Finding(WARN, f"the file system of {folder} does not say how much room it has", "look at it by hand")
    found = f"{size_text(room)} free in {folder}"
    if not place.has_model:
        return Finding(PASS if room else FAIL, found, "" if room else "free some of it")
    needed = 2 * checkpoint_bytes(place.run)
    found += f", two checkpoints take about {size_text(needed)}"
    if room < needed:
        return Finding(FAIL, found, "free some of it, or name another folder in --save")
    return Finding(PASS, found)


def disk_speed(place: Place) -> Finding:
    """Write a file into --save's folder, onto the disk, and check how fast that was."""
    folder = _save_folder(place.run)
    if isinstance(folder, Finding):
        return folder
    path, piece, written = folder / f".preflight-{place.host}-{os.getpid()}", os.urandom(_PIECE), 0
    began = time.perf_counter()
    try:
        with new_file(path) as file:
            while written < _WRITTEN and time.perf_counter() - began < _WRITE_SECONDS:
                file.write(piece)
                written += len(piece)
    except OSError as error:
        return Finding(FAIL, f"{folder}: {error.strerror}", "name a folder in --save that this user may write to")
    finally:
        path.unlink(missing_ok=True)
    return judged_speed(place, folder, written / (time.perf_counter() - began))


def judged_speed(place: Place, folder: Path, rate: float) -> Finding:
    """Return the finding for a rate of writing in bytes per second."""
    least = place.thresholds.least_write
    found = f"{rate / 1e6:.0f} MB/s from {place.host} to {folder}"
    if place.has_model:
        seconds = checkpoint_bytes(place.run) / rate / place.nodes
        found += f"; a checkpoint takes about {duration_text(seconds)}"
        found += f" if {place.nodes} nodes write as fast at once" if place.nodes > 1 else ""
    if rate < least * 1e6:
        return Finding(WARN, found, f"below {least:g} MB/s (--least-write): use a faster file system, or --async-save")
    return Finding(PASS, found, figures={"write_mb_per_s": round(rate / 1e6, 1)})


def checkpoint_bytes(run: Run) -> int:
    """Return about how large a step of the checkpoint is, without the vocabulary where the flags do not say it."""
    vocabulary = run.derived.padded_vocab_size(run.model.vocab_size or 0)
    return _BYTES_PER_PARAMETER * run.derived.parameter_count(vocabulary)


def _save_folder(run: Run) -> Path | Finding:
    """Return --save's folder, or the nearest one above it that exists: nothing is made here."""
    if run.checkpoint.save is None:
        return Finding(IMPOSSIBLE, "no --save was given")
    folder = Path(run.checkpoint.save).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
