"""Which form of an operation computes: a Triton kernel on a GPU, C for some on a CPU, torch's operations elsewhere.

An operation is written in torch where it belongs, and decorated with `has_kernel`, which names its entry in `KERNELS`.
What is decorated is not differentiable by itself: autograd functions call it. Two environment variables choose one form
for all tensors, MEGATRON_MOE_KERNELS, and for a CPU's, MEGATRON_MOE_CPU_KERNELS (`platform/env_vars.py`).

The kernels in C (`cpu.c`) are compiled with gcc at first use, kept in the user's cache, and called through ctypes. They
compute the bits of torch's form (the source says how), in one pass instead of some twenty. Products of groups of rows
(`cpu_products.c`) add in an order of their own. Where they cannot be had, torch's form computes: on another processor
than x86-64 with AVX2, without gcc, and where a rank of the run lacks them (`same_on_all_ranks`).

`launch` runs a Triton kernel: not for an empty grid, and not for tensors without memory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import platform as host
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import replacing
from megatron_moe.platform import env_vars
from megatron_moe.platform.cpu_half_gemm import multiply_in_fp32
from megatron_moe.precision.packed_state import ADAM_FACTORS, AdamState, AdamStep, StochasticRounding, update_by_torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

SOURCES = [Path(__file__).with_name(name) for name in ("cpu.c", "cpu_products.c")]
_FLAGS = "-O3 -march=native -mprefer-vector-width=512 -fPIC -fopenmp".split()
_FLAGS += "-ffp-contract=off -fno-math-errno -fno-trapping-math".split()
_COMPILER_SECONDS = 600  # gcc takes 5 s; a machine may be busy with much else
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Below this many numbers threads cost more than they save; torch's own operations draw the line there too.
_NUMBERS_PER_THREAD = 32768
_MULTIPLICATIONS_PER_THREAD = 2**20


class _Unavailable(Exception):
    """The kernels cannot be had here; the message says why."""


# ---- Which form computes.


def takes_kernels(tensor: Tensor) -> bool:
    """Return whether kernels compute with this tensor: on a GPU, unless the variable says otherwise.

    Never in fp64, which they do not have. A plan's imagined GPU has none: its figures would depend on whether the
    machine that plans has Triton.
    """
    way = env_vars.chosen[env_vars.KERNELS]
    if way == "torch" or tensor.dtype == torch.float64:
        return False
    return way == "triton" or (tensor.device.type not in ("cpu", "meta") and why_no_triton() is None)


@functools.cache
def why_no_triton() -> str | None:
    """Return why Triton cannot be used, None if it can be."""
    try:
        importlib.import_module("triton")
    except Exception as error:  # a build for another torch raises errors of its own
        return f"{type(error).__name__}: {error}"
    return None


_objections: list[str] = []
"""Why the ranks of this run have agreed to use torch's form; empty where none objected, or outside of a run."""


def why_no_c() -> str | None:
    """Return why the kernels do not compute on this CPU, None if they do; compiles them at the first call.

    Raises:
        ConfigError: MEGATRON_MOE_CPU_KERNELS=c, and they cannot be had.
    """
    reason = _reason()
    if reason is not None and env_vars.chosen[env_vars.CPU_KERNELS] == "c":
        raise ConfigError(f"{env_vars.CPU_KERNELS}=c: {reason}; leave it unset, and torch's form computes")
    return reason


def _reason() -> str | None:
    for name in (env_vars.KERNELS, env_vars.CPU_KERNELS):
        if env_vars.chosen[name] == "torch":
            return f"{name}=torch"
    return _objections[0] if _objections else _loaded()[1]


@contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Let all ranks use torch's form within the block if one of them has no other. Collective over all ranks.

    Raises:
        ConfigError: see `why_no_c`; on all ranks.
    """
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, _reason())
    _objections[:] = [f"rank {rank}: {one}" for rank, one in enumerate(reasons) if one is not None]
    try:
        why_no_c()
        yield
    finally:
        _objections.clear()


def takes_c(tensor: object) -> bool:
    """Return whether kernels in C compute with this tensor.

    Not for a tensor that is not in a CPU's memory, nor while something watches (an audit, a compiler, a tracer).
    """
    return in_memory(tensor) and not is_watched() and why_no_c() is None


def is_watched() -> bool:
    """Return whether something watches torch's operations, which would not see what C does."""
    return torch._C._len_torch_dispatch_stack() > 0


def in_memory(tensor: object) -> bool:
    """Return whether this is a plain tensor with numbers in a CPU's memory."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def library() -> ctypes.CDLL:
    """Return the kernels in C, where `why_no_c` returns None."""
    found = _loaded()[0]
    assert found is not None
    return found


# ---- The kernels in C.


def weighted_swiglu_forward(gate_up: Tensor, probs: Tensor) -> Any:
    if not _covers(gate_up, probs):
        return NotImplemented
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    hidden = gate_up.new_empty((rows, width))
    _call("weighted_swiglu_forward", (gate_up, probs, hidden), rows, width, _threads(rows * width))
    return hidden


def weighted_swiglu_backward(grad: Tensor, gate_up: Tensor, probs: Tensor) -> Any:
    if not _covers(gate_up, probs) or grad.dtype != gate_up.dtype:
        return NotImplemented
    rows, width = grad.shape
    threads = _threads(rows * width)
    grad_gate_up, grad_probs = torch.empty_like(gate_up), torch.empty_like(probs)
    products = probs.new_empty((threads, width))
    operands = (grad.contiguous(), gate_up, probs, grad_gate_up, grad_probs, products)
    _call("weighted_swiglu_backward", operands, rows, width, threads)
    return grad_gate_up, grad_probs


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    if x.dtype not in _NAMES or not x.dtype == weight.dtype == dtype or not x.is_contiguous():
        return NotImplemented
    threads = _threads(rows * width)
    y, inverse_rms = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    operands = (x, weight, y, inverse_rms, inverse_rms.new_empty((threads, width)))
    _call("rms_norm_forward", operands, rows, width, threads, ctypes.c_float(eps))
    return y, inverse_rms


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor) -> Any:
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    if x.dtype not in _NAMES or not x.dtype == weight.dtype == grad.dtype or not x.is_contiguous():
        return NotImplemented
    threads = _threads(rows * width)
    grad_x, grad_weights = torch.empty_like(x), inverse_rms.new_empty((rows, width))
    products = inverse_rms.new_empty((threads, width))
    operands = (grad.contiguous(), x, weight, inverse_rms, grad_x, grad_weights, products)
    _call("rms_norm_backward", operands, rows, width, threads)
    return grad_x, grad_weights.sum(0).to(weight.dtype)


class _Adam(ctypes.Structure):
    """The argument of `adam_update` in C, whose struct `Adam` says what the fields are."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("main", "weight", "low_bits", "carry_bits", "grad")),
        *((name, ctypes.c_void_p * 2) for name in ("moments", "exponents")),
        ("places", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("n", "width", "start", "first_column")),
        ("formats", ctypes.c_int * 2),
        ("threads", ctypes.c_int),
        *((name, ctypes.c_float) for name in ADAM_FACTORS),
        ("seeds", ctypes.c_uint * 2),
    )


_ADAM_FORMATS = {torch.float32: 129, torch.bfloat16: 130, torch.int8: 131, torch.uint8: 131, torch.float8_e4m3fn: 132}


def adam_update(
    grads: Sequence[Tensor], states: Sequence[AdamState], step: AdamStep, rounding: Sequence[StochasticRounding] | None
) -> Any:
    for grad, state in zip(grads, states):
        stored = (state.main, state.weight, state.low_bits, state.carry_bits, *state.moments, *state.exponents)
        if grad.dtype != torch.float32 or not all(one is None or one.is_contiguous() for one in (grad, *stored)):
            return NotImplemented
    if not _adam_is_torchs():
        return NotImplemented
    for number, (grad, state) in enumerate(zip(grads, states)):
        _adam_update(grad, state, step, None if rounding is None else rounding[number])
    return None


def _adam_update(grad: Tensor, state: AdamState, step: AdamStep, rounding: StochasticRounding | None) -> None:
    def pointer(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    task = _Adam(
        **{name: pointer(getattr(state, name)) for name in ("main", "weight", "low_bits", "carry_bits")},
        grad=pointer(grad),
        moments=(ctypes.c_void_p * 2)(*map(pointer, state.moments)),
        exponents=(ctypes.c_void_p * 2)(*map(pointer, state.exponents)),
        places=pointer(None if rounding is None else rounding.row_ids),
        n=grad.numel(),
        width=1 if rounding is None else rounding.width,
        start=0 if rounding is None else rounding.start,
        first_column=0 if rounding is None else rounding.first_column,
        formats=(ctypes.c_int * 2)(*(_ADAM_FORMATS[one.dtype] for one in state.moments)),
        threads=_threads(grad.numel()),
        seeds=(ctypes.c_uint * 2)(*((0, 0) if rounding is None else rounding.seeds)),
        **step.factors(),
    )
    library().adam_update(ctypes.byref(task))


@functools.cache
def _adam_is_torchs() -> bool:
    """Return whether the kernel has the bits of this torch's own AdamW, whose compiler chose how it rounds."""
    generator = torch.Generator().manual_seed(0)
    numel = 8 * 1024 + 5
    grad, main, first = (torch.randn(numel, generator=generator) * scale for scale in (1e-2, 1.0, 1e-3))
    moments = (first, torch.rand(numel, generator=generator) * 1e-4)
    copies = [one.clone() for one in (main, *moments)]
    step = AdamStep(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, number=7)
    _adam_update(grad, AdamState(main, None, None, None, moments, (None, None)), step, None)
    update_by_torch(copies[0], grad, copies[1:], step)
    return all(torch.equal(one, other) for one, other in zip((main, *moments), copies))


def _covers(gate_up: Tensor, probs: Tensor) -> bool:
    """Return whether there is a kernel for these dtypes and strides."""
    contiguous = gate_up.is_contiguous() and probs.is_contiguous()
    return gate_up.dtype in _NAMES and probs.dtype == torch.float32 and contiguous


def _threads(numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), numbers // _NUMBERS_PER_THREAD))


def _call(name: str, operands: tuple[Tensor, ...], rows: int, width: int, threads: int, *more: Any) -> None:
    function = getattr(library(), f"{name}_{_NAMES[operands[0].dtype]}")
    pointers = [ctypes.c_void_p(one.data_ptr()) for one in operands]
    function(*pointers, ctypes.c_longlong(rows), ctypes.c_longlong(width), ctypes.c_int(threads), *more)


# Products of groups of rows (`cpu_products.c`). Torch calls a library for each group: oneDNN for bf16, MKL for fp32,
# which leaves AVX-512 to Intel's processors. The kernel computes all groups at once, where the processor has AVX-512
# and no library is faster. Its bits are not always torch's, so that it computes also while something watches.


class _Product(ctypes.Structure):
    """The argument of the functions in C, whose struct `Product` says what the fields are."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("left", "right", "result", "ends", "room")),
        *((name, ctypes.c_longlong) for name in ("groups", "rows", "height", "width", "depth")),
        *((name, ctypes.c_longlong) for name in ("left_stride", "right_stride", "right_group", "columns", "next")),
        *((name, ctypes.c_int) for name in ("over_rows", "transposed", "adds", "rounds", "threads")),
    )


def takes_products(left: Tensor, right: Tensor) -> bool:
    """Return whether the kernel multiplies these operands of `grouped_product`."""
    if left.dtype not in _NAMES or right.dtype != left.dtype or not in_memory(left) or multiply_in_fp32(left):
        return False
    if why_no_c() is not None or (left.shape[-1] % 2 and right.dim() == 3):
        return False
    if not hasattr(library(), f"grouped_product_{_NAMES[left.dtype]}"):
        return False
    return left.dtype != torch.float32 or _mkl_leaves_avx512()


@functools.cache
def _mkl_leaves_avx512() -> bool:
    """Return whether torch multiplies fp32 by MKL, and the processor is not Intel's."""
    with suppress(OSError):
        return torch.backends.mkl.is_available() and "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    return False


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor, result: Tensor) -> None:
    """Write what `torch.nn.functional.grouped_mm` returns into `result`, of operands that `takes_products` takes.

    Args:
        left, right: [R, K] and [e, K, N], a matrix for each group of rows; or [N, R] and [R, K], a sum over the rows of
            each group.
        offsets: [e] int32, the end of each group's rows.
        result: [R, N] or [e, N, K], contiguous, in the operands' dtype.

    Raises:
        ValueError: the offsets decrease, or are beyond the rows.
    """
    _multiply(left.t() if right.dim() == 2 else left, right, offsets, result)


def add_sums(total: Tensor, left: Tensor, right: Tensor, offsets: Tensor, rounds: bool) -> None:
    """Add left_e^T right_e to the sum of each expert e, in place.

    Args:
        total: [e, N, K] fp32, contiguous.
        left, right: [R, N] and [R, K], which `takes_products` takes as left^T and right.
        offsets: [e] int32, the end of each expert's rows.
        rounds: whether to round each product to the operands' dtype before it is added.
    """
    _multiply(left, right, offsets, total, adds=True, rounds=rounds)


def _multiply(
    left: Tensor, right: Tensor, offsets: Tensor, result: Tensor, adds: bool = False, rounds: bool = False
) -> None:
    """Call the kernel. left: [R, ...], also for sums over rows; see `grouped_product` for the rest."""
    over_rows = right.dim() == 2
    transposed = not over_rows and right.stride(-2) == 1
    if left.stride(-1) != 1:
        left = left.contiguous()
    if right.stride(-1) != 1 and not transposed:
        right = right.contiguous()
    multiplications = left.numel() * right.shape[-1]
    threads = max(1, min(torch.get_num_threads(), multiplications // _MULTIPLICATIONS_PER_THREAD))
    room = np.empty(threads * ctypes.c_longlong.in_dll(library(), "product_room").value + 64, np.uint8)
    task = _Product(
        left=left.data_ptr(),
        right=right.data_ptr(),
        result=result.data_ptr(),
        ends=offsets.data_ptr(),
        room=-(-room.ctypes.data // 64) * 64,
        groups=offsets.shape[0],
        rows=left.shape[0],
        height=left.shape[1] if over_rows else 0,
        width=right.shape[-1],
        depth=0 if over_rows else right.shape[1],
        left_stride=left.stride(0),
        right_stride=right.stride(-1) if transposed else right.stride(-2),
        right_group=0 if over_rows else right.stride(0),
        over_rows=over_rows,
        transposed=transposed,
        adds=adds,
        rounds=rounds,
        threads=threads,
    )
    if not getattr(library(), f"grouped_product_{_NAMES[left.dtype]}")(ctypes.byref(task)):
        raise ValueError(
            f"offsets {offsets.tolist()[:8]}...: must not decrease, nor be beyond the {left.shape[0]} rows"
        )


# ---- Compiling and loading them.
#
# A library is kept under a name made of a hash of the source, the compiler, its flags, torch's OpenMP library and the
# processor. It is written next to its place and renamed, so that processes that compile at the same time or are killed
# leave whole files and no lock.


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the library, or why there is none."""
    try:
        return _load(), None
    except (_Unavailable, OSError, subprocess.SubprocessError) as error:
        return None, " ".join(str(error).split())[:300]


def _load() -> ctypes.CDLL:
    flags = ""  # of the processor, as Linux names them
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line.partition(":")[2].strip() for line in lines if line.startswith("flags")), "")
    if host.machine() != "x86_64" or not {"avx2", "fma"} <= set(flags.split()):
        raise _Unavailable("the kernels in C are for x86-64 processors with AVX2 and FMA")
    # The OpenMP library that torch has loaded: a second one would bring threads of its own. Other packages load theirs
    # next to it (sentencepiece does).
    with open("/proc/self/maps") as file:
        loaded = {Path(line.split()[-1]) for line in file if "libgomp" in line}
    package = Path(torch.__file__).resolve().parent  # the system names files so, whatever link led to them
    folders = {package, package.with_name("torch.libs")}
    of_torch = {path for path in loaded if folders & set(path.parents)} or loaded
    if len(of_torch) != 1:
        raise _Unavailable(
            f"no OpenMP library of torch's that gcc's code can use: {len(of_torch)} of the name libgomp are loaded"
        )
    (openmp,) = of_torch
    compiler = shutil.which("gcc")
    if compiler is None:
        raise _Unavailable("there is no C compiler (gcc)")
    about = os.stat(compiler)
    described = (compiler, about.st_size, about.st_mtime_ns, _FLAGS, openmp.name, flags)
    sources = b"".join(source.read_bytes() for source in SOURCES)
    key = hashlib.sha256(sources + repr(described).encode()).hexdigest()[:24]
    kept = cache_folder() / f"cpu-{key}.so"
    with suppress(OSError):  # it is not there, or damaged: it is made again
        # Not one that another user could have written.
        known = (os.stat(kept), os.stat(kept.parent))
        if all(one.st_uid == os.getuid() and not one.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for one in known):
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(prefix="megatron_moe-") as folder:
        built = Path(folder) / "cpu.so"
        _compile(compiler, openmp, built)
        with suppress(OSError):  # no home, or one that cannot be written: it is compiled again next time
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(kept, "wb") as file:
                file.write(built.read_bytes())
        return ctypes.CDLL(str(built))


def cache_folder() -> Path:
    """Return the folder where compiled kernels are kept, of this user."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "megatron_moe"


def _compile(compiler: str, openmp: Path, built: Path) -> None:
    """Compile the sources, and link them with torch's OpenMP library and nothing else."""
    objects = {source: str(built.with_name(f"{source.stem}.o")) for source in SOURCES}
    for command in (
        *([compiler, *_FLAGS, "-c", str(source), "-o", made] for source, made in objects.items()),
        [compiler, "-shared", "-nostdlib", *objects.values(), str(openmp), "-o", str(built)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_SECONDS, check=False)
        if done.returncode:
            raise _Unavailable(f"gcc failed: {done.stderr.strip() or done.returncode}")


# ---- The operations that have kernels.


class Kernels(NamedTuple):
    """The kernels of an operation, of its arguments.

    Attributes:
        triton: "module.function" of this room, which launches the Triton kernel; None if there is none.
        c: calls the kernel in C, for a CPU; None if there is none.
    """

    triton: str | None
    c: Callable[..., Any] | None = None


KERNELS = {
    "adam_update": Kernels("triton_adam.adam_update", adam_update),
    "add_grouped_product": Kernels("triton_products.add_grouped_product"),
    "add_counts": Kernels("triton_routing.add_counts"),
    "add_statistics": Kernels("triton_loss.add_statistics"),
    "add_up_rows": Kernels("triton_dispatch.add_up_rows"),
    "choose_and_weigh": Kernels("triton_routing.choose_and_weigh"),
    "choose_experts": Kernels("triton_routing.choose_experts"),
    "count_tokens": Kernels("triton_routing.count_tokens"),
    "cut_into_tiles": Kernels("triton_fp8.cut_into_tiles"),
    "expert_weights": Kernels("triton_routing.expert_weights"),
    "expert_weights_backward": Kernels("triton_routing.expert_weights_backward"),
    "gradient_of_tile": Kernels("triton_loss.gradient_of_tile"),
    "join_positions": Kernels("triton_rotary.join_positions"),
    "join_positions_backward": Kernels("triton_rotary.join_positions_backward"),
    "rms_norm_backward": Kernels(None, rms_norm_backward),
    "rms_norm_forward": Kernels(None, rms_norm_forward),
    "sort_arrived": Kernels("triton_dispatch.sort_arrived"),
    "sort_by_expert": Kernels("triton_dispatch.sort_by_expert"),
    "spread_rows": Kernels("triton_dispatch.spread_rows"),
    "weighted_swiglu_backward": Kernels("triton_activation.weighted_swiglu_backward", weighted_swiglu_backward),
    "weighted_swiglu_forward": Kernels("triton_activation.weighted_swiglu_forward", weighted_swiglu_forward),
}


def has_kernel(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a kernel compute an operation: Triton's on a GPU, C's on a CPU.

    A kernel that does not cover the arguments returns NotImplemented, and torch computes. The form in torch alone stays
    as the attribute `eager`. The first argument decides, a tensor or a list of them.

    Args:
        name: the operation's entry of `KERNELS`.
    """
    triton, c = KERNELS[name]

    def decorated(operation: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(operation)
        def chosen(*args: _P.args, **named: _P.kwargs) -> _R:
            tensor: Any = args[0][0] if isinstance(args[0], list) else args[0]
            result: Any = NotImplemented
            if triton is not None and takes_kernels(tensor):
                result = _triton(triton)(*args, **named)
            elif c is not None and takes_c(tensor):
                result = c(*args, **named)
            return operation(*args, **named) if result is NotImplemented else result

        chosen.eager = operation  # type: ignore[attr-defined]
        return chosen

    return decorated


@functools.cache
def _triton(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(".")
    return getattr(importlib.import_module(f"megatron_moe.kernels.{module}"), function)


# ---- launching Triton kernels

Seen = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Takes a kernel, its arguments and its constants."""

_seeing: list[Seen] = []


class _Compiled(NamedTuple):
    """A kernel that Triton has compiled and loaded.

    run takes the grid, what `stream_of` returns for a device, `loaded`, the addresses and numbers, and `constants`.
    """

    run: Callable[..., None]
    stream_of: Callable[[int], int]
    loaded: tuple[Any, ...]
    constants: list[Any]


_compiled: dict[tuple[Any, ...], _Compiled] = {}
"""By all that a kernel is specialised for."""

_ONES = ((), (1, 1), (1,), ())
"""What a grid of so many dimensions lacks."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on a grid. Nothing runs where the grid is empty, or on the meta device, where a run is planned.

    Triton looks for what it has compiled at each launch, reads the tensors' addresses again and asks the driver whose
    they are, which takes several times as long as here. It is asked once for each combination of dtypes, alignments,
    kinds of numbers and constants. Hooks of its profiler (Proton) see that launch alone.

    Args:
        kernel: decorated with `triton.jit`; its constants come behind the arguments.
        arguments: tensors, the first one among them, and numbers.
        constants: by name, with Triton's own (`num_warps`).
    """
    if 0 in grid:
        return
    for see in _seeing:
        see(kernel, arguments, constants)
    if arguments[0].is_meta:
        return
    device = arguments[0].get_device()
    kinds: list[Any] = []
    passed, addresses = [], 0
    for one in arguments:
        kind = type(one)
        if kind is int:  # what Triton may specialise for, and the type by which it is passed
            kinds.append(one % 16 == 0 if 1 < one < 2**31 else (one % 16 == 0, one == 1, -(2**31) <= one < 2**31))
        elif kind is float:
            kinds.append(kind)
        elif isinstance(one, Tensor):
            kinds.append(one.dtype)
            one = one.data_ptr()
            addresses |= one
        else:  # a tensor described, of which the kernel is specialised for the dtype
            kinds.append(one.base.dtype)
        passed.append(one)
    if addresses % 16:  # not all are aligned
        kinds += [type(one) is int and one % 16 == 0 for one in passed]
    key = (id(kernel), device, *constants.values(), *kinds)
    known = _compiled.get(key)
    if known is not None:
        run, stream_of, loaded, named = known
        run(*grid, *_ONES[len(grid)], stream_of(device), *loaded, *passed, *named)
        return
    found = kernel[grid](*arguments, **constants)
    if found is not None:  # the interpreter compiles nothing
        from triton.runtime import driver

        loaded = (found.function, found.packed_metadata, None, None, None)  # no hooks, and nothing for them
        named = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        _compiled[key] = _Compiled(found.run, driver.active.get_current_stream, loaded, named)


def blocks_of(total: int, size: int) -> int:
    """Return how many blocks of `size` cover `total`. Triton's own function takes a microsecond, on each launch."""
    return -(-total // size)


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@contextmanager
def launches_seen_by(see: Seen) -> Iterator[None]:
    """Call `see` before each launch of the block, also of one that has no memory to work on."""
    _seeing.append(see)
    try:
        yield
    finally:
        _seeing.remove(see)
