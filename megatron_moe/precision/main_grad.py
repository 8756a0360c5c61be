"""Weight gradients that are added to their sum over micro-batches by the product that makes them.

The engine's DistributedDataParallel keeps that sum, `main_grad`, in fp32, and its hook adds what autograd hands on to
it: a product that has been rounded to the weight's dtype. A backward pass that finds the sum of its weight adds to it
instead, without the rounding, and hands on the rest of the gradient, which is zero. Zeros of the sparse layout take no
memory, and are right in whatever they are added to: the gradient of another use of the weight, which is still to be
added (a table that is also the output layer), or the sum itself. The hook needs a tensor, not None: with
`--overlap-grad-reduce` it checks that there is one, and autograd calls the hooks of missing ones on another thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_moe.platform import hardware
from megatron_moe.precision.contract import mixes_dtypes

_HALF = (torch.bfloat16, torch.float16)


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Return the fp32 sum of a weight's gradients, of its shape, or None.

    The weight is the parameter itself, kept next to what a function of the graph saves: where activations are
    recomputed, what comes back as saved is another tensor. A parameter with hooks has no sum here: they are given its
    gradient.

    There is none without the engine's DistributedDataParallel, from ZeRO stage 2 on, for a view of a parameter, with
    `--grad-reduce-in-bf16`, and for weights in fp64, which would be rounded.
    """
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    total = getattr(weight, "main_grad", None)
    return total if total is not None and total.dtype == torch.float32 and weight.dtype != torch.float64 else None


def no_gradient(weight: Tensor) -> Tensor:
    """Return zeros of a weight's shape and dtype that take no memory: what is left of an added gradient."""
    return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device, layout=torch.sparse_coo)


@mixes_dtypes("products of half-precision numbers are added to an fp32 sum without being rounded")
def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left right to a sum in place, in the sum's dtype or wider.

    Args:
        total: [N, K] fp32 or fp64.
        left: [N, R], right: [R, K], in any floating dtypes. A CPU widens half precision first, which is the caller's to
            do once for several products: it has none with half-precision operands and an fp32 result.
    """
    if left.dtype == right.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)  # addmm_ by a name that counters of FLOPs know
    elif left.dtype == right.dtype and left.dtype in _HALF and not hardware.on_cpu(left):
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        wide = torch.promote_types(total.dtype, torch.promote_types(left.dtype, right.dtype))
        total += torch.mm(left.to(wide), right.to(wide))
