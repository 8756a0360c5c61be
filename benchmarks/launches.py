"""What a GPU would launch for a MoE layer, and the bytes that it would move, without a GPU.

    python -m benchmarks.launches [--tokens 4096 --hidden 7168 --experts 32 --topk 8 --ffn 2048] [--bandwidth 4.3e12]

The layer runs forward and backward on torch's meta device, as it would on CUDA. Every operation of torch that is no
view is one launch (a grouped product is two: it writes its pointers first) and reads and writes each of its tensors
once; so does a kernel of ours. At a given bandwidth and rate of the products that makes an estimate of the layer's time.
It needs Triton for the fused form; MEGATRON_MOE_KERNELS=torch counts the form in torch's operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Launched:
    """Launches of one operation. flops: of a product. size: bytes read and written."""

    name: str
    launches: int
    size: int
    flops: int


class Launches(TorchDispatchMode):
    """Counts what is launched within the block, by torch and by our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launched] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in NO_LAUNCH and not is_view(func):
            tensors = {id(one): one for one in tree_iter((args, kwargs, result)) if isinstance(one, Tensor)}.values()
            count = 2 if name == "_grouped_mm" else 1
            self.found.append(Launched(name, count, sum(touched(one) for one in tensors), flops(name, args, result)))
        return result

    def seen(self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Count a launch of a kernel of ours."""
        tensors = {id(one): one for one in arguments if isinstance(one, Tensor)}.values()
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        self.found.append(Launched(name, 1, sum(touched(one) for one in tensors), 0))


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


def flops(name: str, args: tuple, result: Any) -> int:
    """Return the FLOPs of a product: 2 m n k, with all rows of a grouped one together."""
    if name not in PRODUCTS:
        return 0
    left, right = [one for one in args if isinstance(one, Tensor)][:2] if name != "addmm" else args[1:3]
    if name == "_grouped_mm":  # rows of all groups together; the sum over rows where both operands have them
        return 2 * left.shape[0] * left.shape[1] * right.shape[-1]
    return 2 * left.numel() * right.shape[-1]
