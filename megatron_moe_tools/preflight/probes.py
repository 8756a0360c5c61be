"""Questions to the CUDA device and to torch's choice of kernels, for checks of a machine before a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.platform import hardware, numerics

# The architectures on which torch's grouped product in bf16 is one kernel; others get a product for each group.
_GROUPED_MAJORS = (9, 10)
_MATMUL_SIZE, _MATMUL_SECONDS = 4096, 0.5
_ATTENTION_LENGTH = 512


class TorchBuild(NamedTuple):
    """What torch was built with; None for what is not in the build. toolkit: the version of CUDA."""

    torch: str
    toolkit: str | None
    cudnn: tuple[int, int, int] | None
    nccl: str | None
    grouped_product: bool


def torch_build() -> TorchBuild:
    """Return the versions of torch and of the libraries that it was built with."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    nccl = None
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return TorchBuild(torch.__version__, torch.version.cuda, cudnn_version(cudnn), nccl, hasattr(F, "grouped_mm"))


def cudnn_version(number: int | None) -> tuple[int, int, int] | None:
    """Return (9, 11, 0) for 91100, and (8, 9, 2) for 8902: cuDNN 9 made room for larger numbers."""
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


def grouped_product_is_fused(dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product of this dtype is one kernel on this device, without a copy to the host."""
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(hardware.device())[0] in _GROUPED_MAJORS


def attention_kernel(query: Tensor, key: Tensor, value: Tensor, grouped: bool, lower_right: bool) -> str:
    """Return the kernel that scaled_dot_product_attention takes for a causal product: "flash", "cudnn" and the like.

    Args:
        query, key, value: [B, n, Q, dk], [B, g, K, dk] and [B, g, K, dv] on the device.
        grouped: whether heads share keys.
        lower_right: whether there are more keys than queries, and the mask is torch's lower-right causal one, which
            takes the flash kernel where that can, the memory-efficient one otherwise, and never cuDNN's.
    """
    if not lower_right:
        choice = torch._fused_sdp_choice(query, key, value, None, 0.0, True, enable_gqa=grouped)
        return torch.nn.attention.SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, grouped)
    if torch.backends.cuda.can_use_flash_attention(params):
        return "flash"
    return "efficient" if torch.backends.cuda.can_use_efficient_attention(params) else "math"


def attention_operands(
    heads: int, groups: int, widths: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value on this process's device, of a short sequence, as a layer would pass them.

    Args:
        widths: of a head in queries and keys, and in values.
    """
    key_width, value_width = widths

    def empty(count: int, width: int) -> Tensor:
        shape = (1, count, _ATTENTION_LENGTH, width)
        # Kernels without a backward pass are not chosen for operands that need gradients.
        return torch.empty(shape, dtype=dtype, device=hardware.device(), requires_grad=True)

    return empty(heads, key_width), empty(groups, key_width), empty(groups, value_width)


def departing_switches() -> list[str]:
    """Return the arithmetic switches that a run sets and that do not have their value then; nothing is kept set."""
    numerics.apply(deterministic=False)
    try:
        return [f"{name} is {value}, not {wanted}" for name, value, wanted in numerics.states() if value != wanted]
    finally:
        numerics.restore()


def matmul_tflops() -> float:
    """Return the speed of a bf16 product on this process's device, measured for half a second, in TFLOP/s."""
    left = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=hardware.device()).to(torch.bfloat16)
    seconds = seconds_of(lambda: torch.mm(left, left), _MATMUL_SECONDS)
    return 2 * _MATMUL_SIZE**3 / seconds / 1e12


def seconds_of(work: Callable[[], object], at_least: float) -> float:
    """Return the mean seconds of a call, over as many calls as take `at_least` seconds after two that do not count."""
    for _ in range(2):
        work()
    hardware.synchronize()
    began, calls = time.perf_counter(), 0
    while True:
        for _ in range(8):
            work()
        hardware.synchronize()
        calls += 8
        if (elapsed := time.perf_counter() - began) >= at_least:
            return elapsed / calls
