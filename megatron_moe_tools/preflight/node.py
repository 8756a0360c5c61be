"""Checks of one node: what is installed, kernels for the run's sizes, GPUs, cores, limits, and --save's disk."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from packaging.requirements import Requirement

from megatron_moe import platform
from megatron_moe.config.errors import MachineError
from megatron_moe.config.paths import is_url
from megatron_moe.config.schema import Run
from megatron_moe.engine import defects
from megatron_moe.engine.defects import NEWEST, OLDEST, dotted
from megatron_moe.io.files import free_bytes, new_file
from megatron_moe.io.texts import duration_text, size_text
from megatron_moe.platform import hardware, numerics
from megatron_moe_tools.preflight.cli import FAIL, IMPOSSIBLE, NODE, PASS, RANK, WARN, Finding, Place, check

_COMPILE_SECONDS = 30
_PROGRAM = "#include <Python.h>\nint main(void) { return PY_MAJOR_VERSION == 3 ? 0 : 1; }\n"


def cudnn_version() -> tuple[int, int, int] | None:
    """Return torch's cuDNN: (9, 11, 0) for 91100, and (8, 9, 2) for 8902, as cuDNN 9 made room for larger ones."""
    number = torch.backends.cudnn.version()
    if number is None:
        return None
    unit = 10000 if number >= 90000 else 1000
    return number // unit, number % unit // 100, number % 100


def device_name() -> str | None:
    """Return the name of this process's CUDA device, None without one."""
    return torch.cuda.get_device_name(hardware.device()) if hardware.has_cuda() else None


def bind() -> None:
    """Make this process's CUDA device the current one; do nothing without CUDA."""
    if hardware.has_cuda():
        torch.cuda.set_device(hardware.device())


@check(RANK)
def driver(place: Place) -> Finding:
    """Check that torch can use the NVIDIA devices that this machine has, and that there is one for every rank."""
    try:
        device = platform.device()
    except MachineError as error:
        return Finding(FAIL, str(error), "make the devices usable: driver, container, or a torch for this CUDA")
    name = device_name()
    if name is None:
        hidden = "no NVIDIA device, or all are hidden by CUDA_VISIBLE_DEVICES; a run trains on the CPU"
        return Finding(IMPOSSIBLE, hidden)
    return Finding(PASS, name if place.world_size > 1 else f"{name} as {device}")


@check(NODE, "torch")
def torch_build(place: Place) -> Finding:
    """Check that torch has the grouped product, and report what it was built with."""
    found = f"torch {torch.__version__}, "
    found += f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if (cudnn := cudnn_version()) is not None:
        found += f", cuDNN {dotted(cudnn)}"
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found += f", NCCL {dotted(torch.cuda.nccl.version())}"
    if not hasattr(F, "grouped_mm"):
        return Finding(FAIL, f"{found}: has no torch.nn.functional.grouped_mm", f"install {_requirement('torch')}")
    return Finding(PASS, found)


@check(NODE)
def engine(place: Place) -> Finding:
    """Check that megatron-core can be loaded, and is the release that was tested with this Python."""
    tested = OLDEST if sys.version_info < (3, 12) else NEWEST
    advice = f"pip install megatron-core=={dotted(tested)}"
    try:
        version = defects.engine_version()
    except importlib.metadata.PackageNotFoundError:
        return Finding(FAIL, "megatron-core is not installed", advice)
    python = ".".join(map(str, sys.version_info[:3]))
    found = f"megatron-core {dotted(version)}, Python {python}"
    try:
        importlib.import_module("megatron_moe.parallel.groups")  # which imports it
    except Exception as error:  # whatever its own code or a library's raises
        return Finding(FAIL, f"{found}: it cannot be imported, {type(error).__name__}: {error}", advice)
    if version != tested:
        return Finding(WARN, f"{found}: not tested together", advice)
    return Finding(PASS, found)


@check(NODE)
def transformer_engine(place: Place) -> Finding:
    """Check that an installed Transformer Engine can be loaded, and is there where the run asks for it."""
    run = place.run
    needed = run.model.transformer_impl == "transformer_engine" or run.moe.moe_expert_backend == "te"
    return _library("transformer_engine", "transformer-engine", needed)


@check(NODE)
def apex(place: Place) -> Finding:
    """Check that an installed apex can be loaded."""
    return _library("apex", "apex", needed=False)


def _library(library: str, distribution: str, needed: bool) -> Finding:
    """Check one of the libraries that the engine imports where they are installed."""
    name, version = hardware.LIBRARIES[library], _version(distribution)
    required = _requirement(distribution)
    if version is None:
        if needed:
            return Finding(FAIL, f"{name} is not installed and the flags ask for it", _install_te(required))
        return Finding(PASS, f"{name} is not installed; the run does without")
    if not platform.has_cuda():
        return Finding(IMPOSSIBLE, f"{name} {version}: it loads with a CUDA device alone")
    why_not = hardware.why_not_loaded(library)
    if why_not is not None:
        advice = f"remove it (pip uninstall {distribution}), or build it against this torch"
        if library == "transformer_engine":
            advice = f"build it against torch {torch.__version__}: {_install_te(required)}"
        return Finding(FAIL if needed else WARN, f"{name} {version}: {why_not}", advice)
    if not Requirement(required).specifier.contains(version, prereleases=True):
        return Finding(WARN, f"{name} {version}: this engine takes {required}", _install_te(required))
    return Finding(PASS, f"{name} {version}")


def _install_te(required: str) -> str:
    return f"pip install --no-build-isolation '{required}', after torch"


@check(NODE)
def compiler(place: Place) -> Finding:
    """Check that there are a C compiler and Python.h, which triton and torch.compile need on every node at run time."""
    status = FAIL if platform.has_cuda() else WARN
    words = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or shutil.which("cc") or ""]
    include = sysconfig.get_paths()["include"]
    advice = (
        "install gcc and Python's headers (Debian: gcc, python3-dev), or set CC; triton and torch.compile need both"
    )
    if not words[0] or shutil.which(words[0]) is None:
        return Finding(status, f"no C compiler: {words[0] or 'neither gcc nor cc'} is not on PATH", advice)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.c"
        source.write_text(_PROGRAM)
        done = subprocess.run(
            [*words, f"-I{include}", "-c", str(source), "-o", str(source.with_suffix(".o"))],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
    if done.returncode != 0:
        line = next((line for line in done.stderr.splitlines() if "error" in line), "it gives no reason")
        return Finding(status, f"{words[0]} does not compile a file with Python.h of {include}: {line}", advice)
    return Finding(PASS, f"{words[0]} compiles with Python.h of {include}")


@check(NODE)
def triton(place: Place) -> Finding:
    """Check that triton is installed, which torch.compile generates code for."""
    version = next(filter(None, map(_version, ("triton", "pytorch-triton"))), None)
    if version is not None:
        return Finding(PASS, f"triton {version}")
    if not platform.has_cuda():
        return Finding(IMPOSSIBLE, "triton is not installed, and not used without a CUDA device")
    return Finding(FAIL, "triton is not installed", "install the triton that this torch's metadata names")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirement(distribution: str) -> str:
    """Return what this package's own metadata requires of a distribution here, "torch>=2.11" or so; else its name."""
    try:
        lines = importlib.metadata.requires("megatron_moe") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for required in map(Requirement, lines):
        here = required.marker is None or required.marker.evaluate({"extra": "gpu"})
        if here and required.name == distribution:
            return str(required).partition(";")[0].strip()
    return distribution


_CUDNN_WITH_TWO_WIDTHS = (9, 11, 0)
_ATTENTION_LENGTH = 512


@check(RANK)
def attention(place: Place) -> Finding:
    """Check that the attention of the run's head widths takes a fast kernel."""
    if (why_not := _why_not(place)) is not None:
        return why_not
    from megatron_moe.model.context_parallel import for_kernels  # with the engine, which may be broken

    run = place.run
    if run.model.transformer_impl == "transformer_engine":
        return Finding(PASS, "Transformer Engine's attention, which chooses its kernel itself (NVTE_DEBUG=1 shows it)")
    heads, groups, (key_width, value_width) = attention_sizes(run)

    operands = []  # of a short sequence, with gradients, since a kernel without a backward pass refuses them
    for count, width in ((heads, key_width), (groups, key_width), (groups, value_width)):
        shape, device = (1, count, _ATTENTION_LENGTH, width), hardware.device()
        operands.append(torch.empty(shape, dtype=dtype_of(run), device=device, requires_grad=True))
    query = operands[0]
    key, value, grouped = for_kernels(*operands)
    if run.parallel.context_parallel_size == 1:
        choice = torch._fused_sdp_choice(query, key, value, None, 0.0, True, enable_gqa=grouped)
        kernel = torch.nn.attention.SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
    else:
        # Half of a rank's queries against more keys: torch's lower-right causal mask takes the flash kernel where that
        # can, the memory-efficient one otherwise, and never cuDNN's.
        query = query[:, :, : query.shape[2] // 2]
        params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, grouped)
        kernel = "math"
        if torch.backends.cuda.can_use_flash_attention(params):
            kernel = "flash"
        elif torch.backends.cuda.can_use_efficient_attention(params):
            kernel = "efficient"
    return judged_attention(run, kernel, cudnn_version())


def attention_sizes(run: Run) -> tuple[int, int, tuple[int, int]]:
    """Return the heads and key/value groups of a rank, and the widths of keys and values."""
    model, tensor_ranks = run.model, run.parallel.tensor_model_parallel_size
    heads = max(1, model.num_attention_heads // tensor_ranks)
    if model.multi_latent_attention:
        return heads, heads, (model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim)
    groups = max(1, run.derived.num_query_groups // tensor_ranks)
    return heads, groups, (run.derived.head_size, run.derived.head_size)


def judged_attention(run: Run, kernel: str, cudnn: tuple[int, int, int] | None) -> Finding:
    """Return the finding for the kernel that was chosen."""
    heads, groups, (keys, values) = attention_sizes(run)
    dtype = run.derived.params_dtype_name
    found = f"{kernel} kernel for {dtype}, {heads} heads, {groups} key/value groups, widths {keys}/{values}"
    if run.parallel.context_parallel_size > 1:
        found += f", context parallel over {run.parallel.context_parallel_size}"
    if kernel == "math":
        return Finding(FAIL, f"{found}: it keeps the S x S scores in memory", "use --bf16 and head widths up to 256")
    if kernel in ("flash", "cudnn"):
        return Finding(PASS, found)
    advice = "no fast kernel was chosen; flash needs widths that are equal, at most 256, multiples of 8"
    if dtype == "float32":
        advice = "the flash and cuDNN kernels have no fp32; use --bf16 for a long run"
    elif keys != values and run.parallel.context_parallel_size > 1:
        advice = "flash has one width and the mask is not cuDNN's: count on this, or do without --context-parallel-size"
    elif keys != values and (cudnn is None or cudnn < _CUDNN_WITH_TWO_WIDTHS):
        found += f"; cuDNN {dotted(cudnn)}" if cudnn else "; no cuDNN"
        advice = "install a torch with cuDNN 9.11 or later, which is fast at two widths"
    return Finding(WARN, found, advice)


@check(RANK)
def grouped_product(place: Place) -> Finding:
    """Check that the experts' grouped product is one kernel, which needs no copy to the host."""
    if (why_not := _why_not(place)) is not None:
        return why_not
    run = place.run
    if run.moe.num_experts is None or run.moe.moe_expert_backend != "grouped_mm":
        return Finding(PASS, "the run does not use torch's grouped product")
    name = f"{run.derived.params_dtype_name} on {device_name()}"
    if hardware.has_grouped_kernel(dtype_of(run)):
        return Finding(PASS, f"one kernel for {name}")
    found = f"{name}: torch's fallback, a product for each expert after a copy of the counts to the host"
    advice = "the kernel needs --bf16 and compute capability 9.x or 10.x (H100, H200, B200)"
    return Finding(WARN, found, f"{advice}; --moe-expert-backend te is another way on other cards")


@check(RANK)
def reductions(place: Place) -> Finding:
    """Check that the switches by which a run keeps sums of half-precision products in fp32 can be set."""
    numerics.apply(deterministic=False)
    departing = []
    try:
        for name, value, wanted in numerics.states():
            if value != wanted:
                departing.append(f"{name} is {value}, not {wanted}")
    finally:
        numerics.restore()
    if departing:
        return Finding(FAIL, "; ".join(departing), "use a torch whose switches can be set: docs/guides/precision.md")
    return Finding(PASS, "a run adds half-precision products in fp32, and multiplies by TF32 with --allow-tf32 alone")


def dtype_of(run: Run) -> torch.dtype:
    """Return the dtype of weights and activations."""
    return getattr(torch, run.derived.params_dtype_name)


def _why_not(place: Place) -> Finding | None:
    if not platform.has_cuda():
        return Finding(IMPOSSIBLE, "torch sees no CUDA device")
    if not place.has_model:
        return Finding(IMPOSSIBLE, "no flags of a model were given; add them, for example --preset deepseek-v3")
    return None


_SMI_SECONDS = 20
_FIELDS = {
    "number": "index",
    "throttled": "clocks_throttle_reasons.active",
    "max_clock": "clocks.max.sm",
    "temperature": "temperature.gpu",
    "uncorrected": "ecc.errors.uncorrected.volatile.total",
    "used_mib": "memory.used",
}
"""What is asked of a GPU -> nvidia-smi's name for it."""
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


def gpus() -> list[dict[str, int | None]] | Finding:
    """Return the figures of this node's GPUs, None for [N/A], or the finding that says why nvidia-smi reports none."""
    if shutil.which("nvidia-smi") is None:
        missing = "nvidia-smi is not on PATH"
        if platform.has_cuda():
            return Finding(WARN, missing, "install NVIDIA's driver utilities in the container")
        return Finding(IMPOSSIBLE, missing)
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(FAIL, f"nvidia-smi did not answer within {_SMI_SECONDS} s", "drain the node: its driver hangs")
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        return Finding(FAIL, f"nvidia-smi ended with status {done.returncode}: {said}", "repair the driver of the node")
    found = []
    for line in done.stdout.splitlines():
        gpu: dict[str, int | None] = dict.fromkeys(_FIELDS)
        for name, cell in zip(_FIELDS, line.split(",")):
            with contextlib.suppress(ValueError):
                gpu[name] = int(cell, 0)  # throttle reasons are hexadecimal
        if gpu["number"] is not None:
            found.append(gpu)
    return found


@check(NODE)
def gpu_clocks(place: Place) -> Finding:
    """Check that no GPU is slowed down, and that all may reach the same clock."""
    if isinstance(found := gpus(), Finding):
        return found
    slowed = []
    for gpu in found:
        words = [word for bit, word in _SLOWED.items() if (gpu["throttled"] or 0) & bit]
        if words:
            slowed.append(f"GPU {gpu['number']}: {', '.join(words)}")
    if slowed:
        advice = "drain the node: look at its cooling and power, then nvidia-smi -q -d PERFORMANCE"
        return Finding(FAIL, "; ".join(slowed), advice)
    clocks = {gpu["max_clock"] for gpu in found if gpu["max_clock"] is not None}
    if len(clocks) > 1:
        each = ", ".join(f"GPU {gpu['number']} {gpu['max_clock']} MHz" for gpu in found)
        return Finding(WARN, f"highest clocks differ: {each}", "reset limits with nvidia-smi --reset-gpu-clocks")
    return Finding(PASS, f"{len(found)} GPUs, none slowed down, up to {max(clocks, default=0)} MHz")


@check(NODE)
def gpu_temperature(place: Place) -> Finding:
    """Check that the GPUs are cool enough before the work begins."""
    if isinstance(found := gpus(), Finding):
        return found
    known = [(gpu["temperature"], gpu["number"]) for gpu in found if gpu["temperature"] is not None]
    if not known:
        return Finding(IMPOSSIBLE, "nvidia-smi reports no temperature")
    hottest, index = max(known)
    text, figures = f"at most {hottest} C, GPU {index}", {"celsius": float(hottest)}
    if hottest >= _WARM:
        status = FAIL if hottest >= _HOT else WARN
        return Finding(status, text, f"below {_WARM} C is well; look at the node's cooling", figures)
    return Finding(PASS, text, figures=figures)


@check(NODE)
def gpu_memory_errors(place: Place) -> Finding:
    """Check that no GPU has had an uncorrected memory error since the driver was loaded."""
    if isinstance(found := gpus(), Finding):
        return found
    wrong = [f"GPU {gpu['number']}: {gpu['uncorrected']}" for gpu in found if gpu["uncorrected"]]
    if wrong:
        return Finding(FAIL, f"uncorrected memory errors: {', '.join(wrong)}", "reset these GPUs, or replace them")
    if all(gpu["uncorrected"] is None for gpu in found):
        return Finding(WARN, "no GPU counts memory errors (ECC is off)", "nvidia-smi --ecc-config=1, then a reboot")
    return Finding(PASS, "no uncorrected memory error")


@check(NODE)
def gpu_in_use(place: Place) -> Finding:
    """Check that no other process has memory of the GPUs; what this tool's own ranks took is little."""
    if isinstance(found := gpus(), Finding):
        return found
    used, most = [], 0
    for gpu in found:
        mib = gpu["used_mib"] or 0
        most = max(most, mib)
        if mib > _USED_MIB:
            used.append(f"GPU {gpu['number']}: {mib} MiB")
    if used:
        return Finding(WARN, f"memory is in use: {', '.join(used)}", "end what runs there: see nvidia-smi")
    return Finding(PASS, f"at most {most} MiB in use on a GPU")


@check(RANK)
def cpu_cores(place: Place) -> Finding:
    """Check that the ranks of a node may use a core each, and as many as their threads."""
    cores, ranks = len(os.sched_getaffinity(0)), place.local_world_size
    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    found = f"cores {cores}, ranks of this node {ranks}, OMP_NUM_THREADS {threads}"
    if cores < ranks:
        advice = 'give srun --cpus-per-task "$SLURM_CPUS_PER_TASK" (it does not inherit sbatch\'s since Slurm 22.05)'
        return Finding(FAIL, found, f"{advice}, or the container more cores (--cpuset-cpus)")
    if cores < ranks * threads:
        return Finding(WARN, found, f"set OMP_NUM_THREADS to at most {cores // ranks}")
    return Finding(PASS, found)


@check(NODE)
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
    if soft < _LEAST_LOCKED:
        return Finding(WARN, found, advice)
    return Finding(PASS, found)


@check(NODE)
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


@check(NODE)
def disk_space(place: Place) -> Finding:
    """Check that --save's folder has room for a step of the checkpoint, and for the next one next to it."""
    if isinstance(folder := _save_folder(place.run), Finding):
        return folder
    room = free_bytes(folder)
    if room is None:
        return Finding(WARN, f"the file system of {folder} does not say how much room it has", "look at it by hand")
    found = f"{size_text(room)} free in {folder}"
    if not place.has_model:
        if not room:
            return Finding(FAIL, found, "free some of it")
        return Finding(PASS, found)
    needed = 2 * checkpoint_bytes(place.run)
    found += f", two checkpoints take about {size_text(needed)}"
    if room < needed:
        return Finding(FAIL, found, "free some of it, or name another folder in --save")
    return Finding(PASS, found)


@check(NODE)
def disk_speed(place: Place) -> Finding:
    """Write a file into --save's folder, onto the disk, and check how fast that was."""
    if isinstance(folder := _save_folder(place.run), Finding):
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
    rate, least = written / (time.perf_counter() - began), place.thresholds.least_write
    found = f"{rate / 1e6:.0f} MB/s from {place.host} to {folder}"
    if place.has_model:
        seconds = checkpoint_bytes(place.run) / rate / place.nodes
        found += f"; a checkpoint takes about {duration_text(seconds)}"
        if place.nodes > 1:
            found += f" if {place.nodes} nodes write as fast at once"
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
    if is_url(run.checkpoint.save):
        return Finding(IMPOSSIBLE, "--save is in an object store")
    folder = Path(run.checkpoint.save).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
