"""A pretended CUDA machine: torch says that there are CUDA devices, and every tensor "on" one is in the CPU's memory.

    python -m tests.helpers.cuda_on_cpu pretrain_moe.py FLAGS...

runs a program so, also under torchrun: the branches for CUDA of this project and of megatron-core run, with gloo in
place of NCCL. It shows signatures, attributes, control flow, checkpoint contents and how often the host waits for the
device. It does not show CUDA's kernels, what torch.compile makes of a function, NCCL, streams, memory or speed.
`--transformer-engine` before the program adds Transformer Engine's own Python over a stub of its extension
(`tests/helpers/te_stub.py`).

`install` changes torch for the whole process: it belongs into a process of its own, before `megatron_moe` is imported.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.varlen
from torch.overrides import TorchFunctionMode

from tests.helpers import scaled_product_stub, te_stub

DEVICES = 8
CAPABILITY = (9, 0)
MEMORY_BYTES = 80 << 30

_CPU = torch.device("cpu")
_IS_CUDA = torch.Tensor.is_cuda.__get__


def _nothing(_self: Any, *_: Any, **__: Any) -> None: ...


class _Stream(torch.cpu.Stream):
    """A stream without a queue, with the methods of CUDA's that are used."""

    __init__ = synchronize = wait_event = _nothing

    def record_event(self, _event: Any = None) -> _Event:
        return _Event()


class _Event:
    """An event that has happened, and takes no time."""

    __init__ = record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: Any) -> float:
        return 0.0


class _Runtime:
    """CUDA's runtime as far as it is called by name; 0 is success."""

    def cudaHostRegister(self, _address: int, _size: int = 0, _flags: int = 0) -> int:
        return 0

    cudaHostUnregister = cudaHostRegister


def install() -> None:
    """Make torch in this process say that there are CUDA devices; see `Mode`, which is needed as well."""
    _replace_functions(torch.cuda)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda self, _stream: None
    torch.Tensor.type = _type_of(torch.Tensor.type)
    torch.compile = _uncompiled  # for a device that is not there
    torch.version.cuda = torch.version.cuda or "12.9"
    torch.nn.functional.scaled_mm = scaled_product_stub.scaled_mm
    torch.nn.attention.varlen.varlen_attn = varlen_attn
    torch._scaled_mm = scaled_product_stub.scaled_mm_beneath
    torch.get_device_module = lambda _device=None: torch.cuda
    torch.autograd._engine_run_backward = _under_mode(torch.autograd._engine_run_backward)
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _by_gloo(getattr(dist, name)))


def _replace_functions(cuda: Any) -> None:
    generator = torch.default_generator
    properties = types.SimpleNamespace(
        major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, name="pretended", total_memory=MEMORY_BYTES
    )
    of_a_device = {
        "get_device_capability": CAPABILITY,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "memory_stats": {},
        **dict.fromkeys(("max_memory_allocated", "memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("set_device", "synchronize", "reset_peak_memory_stats"), None),
    }
    replaced = {
        **{name: lambda _device=None, value=value: value for name, value in of_a_device.items()},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: 0,
        "cudart": _Runtime,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "initial_seed": generator.initial_seed,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda _device=None: _Stream(),
        "default_stream": lambda _device=None: _Stream(),
        "set_stream": lambda _stream: None,
        "stream": lambda _stream: contextlib.nullcontext(),
        "device": lambda _device: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "default_generators": (generator,) * DEVICES,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
    }
    for name, function in replaced.items():
        setattr(cuda, name, function)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *_: None)


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest: int,
    longest_keys: int,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Attend as torch's function of this name, which has one width, within sequences of the same length each way."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and window_size == (-1, 0) and key_ends is ends
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch._C.DisableTorchFunction():  # the kernel does not wait for lengths
        lengths = ends.diff().tolist()
        assert max(lengths) == longest == longest_keys and sum(lengths) == len(query)
        attended = [
            attend(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            for q, k, v in zip(*(one.transpose(0, 1).split(lengths, 1) for one in (query, key, value)))
        ]
    return torch.cat(attended, 1).transpose(0, 1)


def _uncompiled(model: Any = None, **_options: Any) -> Any:
    return model if model is not None else lambda function: function


def _type_of(stock: Any) -> Any:
    def type_(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if args or options:
            return stock(self, *args, **options)
        # The engine compares it with "torch.cuda.FloatTensor". Under `Mode` the stock method comes here once more.
        name = stock(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return type_


def _by_gloo(stock: Any) -> Any:
    def with_gloo(*args: Any, **options: Any) -> Any:
        args = tuple("gloo" if value == "nccl" else value for value in args)
        if options.get("backend") is not None:
            options["backend"] = "gloo"
        for name in ("pg_options", "device_id"):
            options.pop(name, None)
        return stock(*args, **options)

    return with_gloo


def _here(device: Any) -> Any:
    """Return the CPU for a CUDA device in any of its spellings; other devices as they are."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return _CPU if torch.device(device).type == "cuda" else device


def _under_mode(stock: Any) -> Any:
    """Return `stock` with `Mode` on: torch calls `backward` with the mode that it passes through switched off."""

    def under_mode(*args: Any, **options: Any) -> Any:
        with Mode():
            return stock(*args, **options)

    return under_mode


def _is_cuda(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


class Mode(TorchFunctionMode):
    """The context in which device "cuda" means the CPU's memory."""

    def __torch_function__(self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function == _IS_CUDA:
            return True
        options = dict(kwargs or {})
        if function is torch.device:
            return _CPU if isinstance(args[0], int) else _here(function(*args, **options))
        if options.get("device") is not None:
            options["device"] = _here(options["device"])
        if function in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(_here(value) if _is_cuda(value) else value for value in args)
        options.pop("pin_memory", None)
        return function(*args, **options)


def main() -> None:
    """Run the program whose path is the first argument, with the arguments that follow it."""
    install()
    arguments = sys.argv[1:]
    if arguments[0] == "--transformer-engine":
        arguments = arguments[1:]
        te_stub.install()
    script, sys.argv = arguments[0], arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with Mode():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
