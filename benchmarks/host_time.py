"""The host's time for a MoE layer's pass: what Python and torch take to launch its kernels, without a GPU.

    python -m benchmarks.host_time [--ep 8 --passes 500]

A small layer of one rank runs forward and backward as it would on CUDA, with a driver whose launches do nothing: all
else of Triton is real, and kernels are compiled for sm_90. Products, and exchanges of a pretended group, return at
once, with as many rows to and from each rank. Times are the thread's own, so that other programs disturb them little;
the fastest pass is told apart from the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS, HIDDEN, EXPERTS, TOPK, FFN = 32, 64, 32, 4, 32
_DEVICE = {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}
_LOADED = (1, 1, 32, 0, 1024)  # module, function, registers, spills, threads


def driver() -> Any:
    """Return a driver of Triton for a card of compute capability 9.0 that launches nothing."""
    from triton.backends.compiler import GPUTarget

    utils = SimpleNamespace(get_device_properties=lambda _: _DEVICE, load_binary=lambda *_: _LOADED)
    return SimpleNamespace(
        utils=utils,
        launcher_cls=lambda source, metadata: lambda *_: None,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )


def nothing_runs(stack: ExitStack, ep: int) -> None:
    """Have kernels, products and exchanges do nothing; what would be read of their results is zero."""
    from triton.runtime import driver as active

    from megatron_moe.moe.dispatch import AllToAllDispatcher
    from megatron_moe.platform import env_vars, hardware

    def grouped_product(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
        if right.dim() == 2:
            return left.new_zeros(offs.shape[0], left.shape[0], right.shape[1])
        return left.new_zeros(left.shape[0], right.shape[-1])

    def product(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return left.new_zeros(left.shape[0], right.shape[1], dtype=out_dtype or left.dtype)

    rows = [TOKENS * TOPK // ep] * ep
    forms = {env_vars.KERNELS: "triton", env_vars.CPU_KERNELS: "torch"}
    stack.enter_context(mock.patch.object(active, "_active", driver()))
    stack.enter_context(mock.patch.dict(env_vars.chosen, forms))
    stack.enter_context(mock.patch.object(hardware, "on_cpu", lambda tensor: False))
    stack.enter_context(mock.patch.object(AllToAllDispatcher, "splits", lambda self, copied: (rows, rows)))
    stack.enter_context(mock.patch.object(F, "grouped_mm", grouped_product))
    stack.enter_context(mock.patch.object(torch, "mm", product))


def seconds(ep: int, passes: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each forward pass, and of each backward pass, of one of `ep` ranks."""
    from benchmarks.contestants import engine_config
    from benchmarks.problem import Shape
    from megatron_moe.config import schema
    from megatron_moe.moe.layer import MoELayer
    from megatron_moe.parallel import groups

    run = schema.build({"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "expert_model_parallel_size": ep})
    groups.fake_world(run, 0, ep)
    torch.set_num_threads(1)
    forward, backward = [], []
    try:
        shape = Shape(TOKENS, HIDDEN, EXPERTS, TOPK, FFN, 0)
        settings = {"moe_shared_expert_intermediate_size": None, "expert_model_parallel_size": ep}
        layer = MoELayer(engine_config(shape, torch.bfloat16, **settings), layer_number=1).train()
        rows = torch.zeros(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        slope = torch.ones_like(rows)
        with ExitStack() as stack:
            nothing_runs(stack, ep)
            for _ in range(passes):
                layer.router.reset_counts()
                layer.zero_grad()
                started = time.thread_time()
                output, _ = layer(rows)
                halfway = time.thread_time()
                output.backward(slope)
                forward.append(halfway - started)
                backward.append(time.thread_time() - halfway)
    finally:
        groups.destroy()
    return forward, backward


def main(argv: Sequence[str] | None = None) -> int:
    """Print the microseconds of both passes."""
    parser = argparse.ArgumentParser(prog="benchmarks.host_time", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks; default: 1")
    parser.add_argument("--passes", type=int, default=500, help="default: 500")
    args = parser.parse_args(argv)
    forward, backward = seconds(args.ep, args.passes)
    begin = args.passes // 10  # the first ones compile
    for name, choose in (("fastest", min), ("median", statistics.median)):
        one, other = choose(forward[begin:]) * 1e6, choose(backward[begin:]) * 1e6
        print(f"{name}: forward {one:.0f} us, backward {other:.0f} us, both {one + other:.0f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
