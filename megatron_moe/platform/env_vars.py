"""Settings that are read from environment variables and checked where a program starts. Loads no torch."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from megatron_moe.config.errors import ConfigError
from megatron_moe.platform import host

HALF_PRODUCTS = "MEGATRON_MOE_CPU_HALF_PRODUCTS"
"""How a CPU multiplies bf16 and fp16; "auto" depends on the processor: see `cpu_half_gemm.py`."""
KERNELS = "MEGATRON_MOE_KERNELS"
"""Which form of an operation computes; "auto": Triton's on a GPU: see `kernels/choice.py`."""
CPU_KERNELS = "MEGATRON_MOE_CPU_KERNELS"
"""Which form computes on a CPU; "auto": C where it can be compiled: see `kernels/choice.py`."""
FP8 = "MEGATRON_MOE_FP8"
"""How products in FP8 are computed; "auto" depends on the device: see `moe/grouped_gemm_fp8.py`."""
_VALUES = {
    HALF_PRODUCTS: ("auto", "native", "fp32"),
    KERNELS: ("auto", "triton", "torch"),
    CPU_KERNELS: ("auto", "c", "torch"),
    FP8: ("auto", "triton", "scaled", "emulated"),
}

chosen = dict.fromkeys(_VALUES, "auto")
"""The value of each variable above, which `check` reads once: operations look it up at every call."""


# What has to be in the environment for the same bits again, each with the values that give them; the first is set
# where there is none. NCCL_ALGO's are Megatron-LM's: NVLS adds in the switch, in an order of its own. A ring serves
# every collective, the others leave some of them without an algorithm.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


def deterministic_environment() -> dict[str, str]:
    """Return the variables of cuBLAS, NCCL and Transformer Engine that `--deterministic-mode` needs, with their values.

    A value that the environment has already is kept.

    Raises:
        ConfigError: the environment has a value with which bits differ from run to run.
    """
    found = {}
    for name, values in _DETERMINISTIC.items():
        found[name] = os.environ.get(name) or values[0]
        if found[name] not in values:
            raise ConfigError(
                f"--deterministic-mode, {name}={found[name]}: bits may differ from run to run with it; unset {name}, "
                f"which is then {values[0]}" + (f", or set it to {' or '.join(values[1:])}" if values[1:] else "")
            )
    return found


def check() -> None:
    """Read the variables into `chosen`; end the program with one message and status 2 where a value is not known.

    The package calls this when it is imported, before anything else. All processes of a program have the same
    environment, and so rank 0 alone prints the message.
    """
    for name, values in _VALUES.items():
        value = os.environ.get(name) or "auto"
        if value not in values:
            if os.environ.get("RANK", "0") == "0":
                message = f"{name}={value}: not one of {', '.join(values)}; leave it unset for auto"
                print(f"megatron_moe: error: {message}", file=sys.stderr, flush=True)
            raise SystemExit(2)
        chosen[name] = value


# ---- What triton and CUDA's allocator read, where there may be a GPU and the user has set nothing.

_TRITON_FOLDERS = ("TRITON_CACHE_DIR", "TRITON_HOME")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the setting of CUDA's allocator, the newest first."""


def keep_kernels_on_this_node() -> None:
    """Let triton keep compiled kernels in this user's folder of the node's temporary files.

    Its own place is the home folder. A container's unknown user has /, which cannot be written, and a home that nodes
    share would be written by all ranks. Inductor's place is among the temporary files already.

    The package calls this when it is imported: triton reads the variable at its first kernel.
    """
    if host.cannot_have_a_gpu(os.environ) or any(name in os.environ for name in _TRITON_FOLDERS):
        return
    folder = Path(tempfile.gettempdir()) / f"megatron_moe_{os.getuid()}"
    with suppress(OSError):  # no folder for temporary files: triton says what it cannot write
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        # Not one that another user could write: what is in it is run.
        if found.st_uid == os.getuid() and not found.st_mode & 0o022:
            os.environ[_TRITON_FOLDERS[0]] = str(folder / "triton")


def let_segments_grow() -> None:
    """Let CUDA's allocator grow its segments, for dropless layers ask for other sizes in every micro-batch.

    Segments of fixed sizes would be fragmented after some hours. To be called before torch is loaded.
    """
    if not host.cannot_have_a_gpu(os.environ) and allocator_setting() is None:
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def allocator_setting() -> str | None:
    """Return the setting of CUDA's allocator in this environment, as NAME=VALUE; None: there is none."""
    return next((f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ), None)
