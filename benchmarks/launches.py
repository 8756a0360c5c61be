"""What a GPU would launch for a MoE layer, the bytes that it would move, and the time that follows, without a GPU.

    python -m benchmarks.launches [--tokens 4096 --hidden 7168 --experts 32 --topk 8 --ffn 2048 --ep 1]

One layer of one rank runs forward and backward on torch's meta device, as it would on CUDA. Every operation of torch
that is no view is a launch (a grouped product is two: it writes its pointers first), and reads or writes each of its
tensors once, what it changes in place twice; so is and does each of our kernels. With a memory bandwidth, a rate of
the products and one of the links between cards that makes an estimate of the layer's time on the device; with a time
for each launch, of the host's. `--ep` counts expert parallelism, with the same number of rows to and from each rank.
`--kernels torch` counts the form in torch's operations, and needs no Triton. `--sums` counts what adding the weights'
gradients to their fp32 sums takes too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PRODUCTS = ("mm", "addmm", "_grouped_mm", "bmm")
NO_LAUNCH = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
)
IN_PLACE = ("add_", "mul_", "div_", "clamp_")

# What an estimate assumes of an H200: FLOP/s of products by their operands' dtype (published are 1979e12 for FP8, where
# nothing was measured and kernels wait for the L2 cache, 989e12 and 67e12),
# bytes a second (published 4.8e12), and the seconds that the smallest kernel takes.
RATES = {torch.float8_e4m3fn: 900e12, torch.bfloat16: 600e12, torch.float16: 600e12, torch.float32: 45e12}
BANDWIDTH = 4.3e12
SMALLEST = 3e-6
# Of an exchange between cards of one node: NVLink's bytes a second, each way, as published.
LINK = 450e9
EXCHANGE = "alltoall_base_"


@dataclass(frozen=True)
class Launched:
    """One operation.

    size: bytes read and written. flops: of a product, and the dtype of its operands. sent: bytes to other cards.
    """

    name: str
    launches: int
    size: int
    flops: int = 0
    dtype: torch.dtype = torch.float32
    sent: int = 0

    @property
    def seconds(self) -> float:
        """The time at the assumed rates."""
        if self.sent:
            return max(self.sent / LINK, SMALLEST)
        product = self.flops / RATES[self.dtype] if self.flops else 0.0
        return max(self.size / BANDWIDTH, product, SMALLEST * self.launches)


class Launches(TorchDispatchMode):
    """Counts what is launched within the block, by torch and by our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launched] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = list({id(one): one for one in tree_iter((args, kwargs, result)) if isinstance(one, Tensor)}.values())
        empty = any(one.is_sparse for one in tensors)  # what is handed on in place of a gradient that was added
        if tensors and name not in NO_LAUNCH and not is_view(func) and not empty:
            size = sum(touched(one) for one in tensors) + (touched(args[0]) if name in IN_PLACE else 0)
            count, sent = 2 if name == "_grouped_mm" else 1, 0
            if name == EXCHANGE:  # one part of the rows stays here
                ranks = dist.get_world_size()
                sent = touched(args[1]) * (ranks - 1) // ranks
            self.found.append(Launched(name, count, size, flops(name, args), tensors[0].dtype, sent))
        return result

    def seen(self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Count a launch of a kernel of ours."""
        operands = [getattr(one, "base", one) for one in arguments]  # of a tensor as TMA reads it
        tensors = {id(one): one for one in operands if isinstance(one, Tensor)}.values()
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        size = sum(touched(one) for one in tensors)
        if name == "triton_products._add":
            total, left, right = arguments[:3]  # which it reads and writes
            self.found.append(Launched(name, 1, size + touched(total), flops("mm", (left, right)), left.dtype))
        elif name.startswith("triton_fp8._multiply"):
            size += touched(operands[5]) if constants.get("ADD") else 0
            work = 2 * operands[1].numel() * constants["WIDTH"] * constants.get("PARTS", 1)
            self.found.append(Launched(name, 1, size, work, torch.float8_e4m3fn))
        else:
            self.found.append(Launched(name, 1, size))


def is_view(func: Any) -> bool:
    """Return whether an operation returns memory of its input, and writes none."""
    returned = func._schema.returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def touched(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor; one that is expanded is read once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride()):
        count *= length if stride else 1
    return count * tensor.element_size()


def flops(name: str, args: tuple) -> int:
    """Return the FLOPs of a product: 2 m n k. Of a grouped one the groups' rows are one after another."""
    if name not in PRODUCTS:
        return 0
    left, right = args[1:3] if name == "addmm" else args[:2]
    return 2 * left.numel() * right.shape[-1]


def summed(weight: Any) -> Any:
    """Give a weight an fp32 sum, to which the gradient that autograd hands on is added; return the node that does."""
    weight.main_grad = torch.empty(weight.shape)
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]

    def add(*_: Any) -> None:
        if not weight.grad.is_sparse:  # else it was added in the product
            weight.main_grad.add_(weight.grad)

    node.register_hook(add)
    return node


def of_layer(
    tokens: int,
    hidden: int,
    experts: int,
    topk: int,
    ffn: int,
    kernels: str = "triton",
    sums: str = "none",
    ep: int = 1,
    shared: int = 0,
    **settings: Any,
) -> tuple[list[Launched], list[Launched]]:
    """Return what one rank's layer launches forward, and backward, in bf16.

    Args:
        tokens: of this rank. experts: of all `ep` ranks. shared: the width of a shared expert; 0: there is none.
        sums: whether the weights' gradients are also added to fp32 sums: "none", "added" when autograd hands them on,
            as the engine's DistributedDataParallel does, or "fused", in the product (`--gradient-accumulation-fusion`).
        settings: of the engine's configuration, or of our own with the schema's names.
    """
    from benchmarks.contestants import engine_config
    from benchmarks.problem import Shape
    from megatron_moe import platform
    from megatron_moe.config import schema
    from megatron_moe.kernels.choice import launches_seen_by
    from megatron_moe.moe import grouped_gemm_fp8
    from megatron_moe.moe.dispatch import AllToAllDispatcher
    from megatron_moe.moe.layer import MoELayer
    from megatron_moe.parallel import groups
    from megatron_moe.platform import env_vars

    run = schema.build({"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "expert_model_parallel_size": ep})
    groups.fake_world(run, 0, ep)
    form = mock.patch.dict(env_vars.chosen, {env_vars.KERNELS: kernels})
    form_of_fp8 = {"triton": "triton", "torch": "emulated"}[kernels]
    fp8 = mock.patch.object(grouped_gemm_fp8, "fp8_form", lambda: form_of_fp8)
    own = {name: settings.pop(name) for name in ("fp8_format",) if name in settings}
    settings |= {"moe_shared_expert_intermediate_size": shared or None, "expert_model_parallel_size": ep}
    settings |= {"gradient_accumulation_fusion": sums == "fused", "use_cpu_initialization": True}
    try:
        with form, fp8, platform.fake_device("cuda", {}), torch.device("meta"):
            config = engine_config(Shape(tokens, hidden, experts, topk, ffn, shared), torch.bfloat16, **settings)
            vars(config).update(own)
            layer = MoELayer(config, layer_number=1).train()
            dispatcher = getattr(layer.dispatcher, "inner", layer.dispatcher)
            if isinstance(dispatcher, AllToAllDispatcher):  # what it would read from the device
                vars(dispatcher)["splits"] = lambda _: ([tokens * topk // ep] * ep,) * 2
            vars(dispatcher)["rows_here"] = lambda _: tokens * topk
            hooks = [] if sums == "none" else [summed(weight) for weight in layer.parameters()]
            rows = torch.empty(tokens, 1, hidden, dtype=torch.bfloat16, requires_grad=True)
            launches = Launches()
            with launches, launches_seen_by(launches.seen):
                output, _ = layer(rows)
                forward = len(launches.found)
                output.backward(torch.empty_like(output))
        del hooks
    finally:
        groups.destroy()
    begin = next(place for place, one in enumerate(launches.found) if one.name != "empty_like" and place >= forward)
    return launches.found[:begin], launches.found[begin:]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a launch, and what they come to."""
    parser = argparse.ArgumentParser(prog="benchmarks.launches", description=(__doc__ or "").splitlines()[0])
    sizes = {"tokens": 4096, "hidden": 7168, "experts": 32, "topk": 8, "ffn": 2048, "ep": 1, "shared": 0}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    parser.add_argument("--kernels", choices=("triton", "torch"), default="triton", help="default: triton")
    parser.add_argument("--sums", choices=("none", "added", "fused"), default="none", help="default: none")
    parser.add_argument("--fp8-format", choices=("e4m3", "hybrid"), help="default: products in bf16")
    parser.add_argument("--host-us", type=float, default=60, help="microseconds of the host for a launch; default: 60")
    args = parser.parse_args(argv)
    host = vars(args).pop("host_us")
    passes = of_layer(**vars(args))
    for title, found in zip(("forward", "backward"), passes, strict=True):
        print(f"{title:40} launches      GB    TFLOP     ms")
        for one in found:
            figures = f"{one.size / 1e9:7.3f} {one.flops / 1e12:8.3f} {one.seconds * 1e3:6.3f}"
            print(f"  {one.name:38} {one.launches:8} {figures}")
    every = [*passes[0], *passes[1]]
    launches, seconds, work = (sum(getattr(one, name) for one in every) for name in ("launches", "seconds", "flops"))
    size = sum(one.size for one in every if not one.flops)
    print(f"{launches} launches, {size / 1e9:.2f} GB beside the products, {work / 1e12:.2f} TFLOP in them")
    print(
        f"{seconds * 1e3:.2f} ms, {work / seconds / 1e12:.0f} TFLOP/s, estimated at {BANDWIDTH / 1e12} TB/s and {RATES}"
    )
    if args.ep > 1:
        print(f"{sum(one.sent for one in every) / 1e9:.2f} GB to other cards, at {LINK / 1e9:.0f} GB/s")
    print(f"the host: {launches * host / 1e3:.2f} ms, at {host:g} us a launch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
