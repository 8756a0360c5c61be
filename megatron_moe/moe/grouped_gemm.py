"""Matrix products of a gate and of groups of rows, and the sums of weight gradients that products add to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.engine.patching import replaced
from megatron_moe.kernels import choice
from megatron_moe.kernels.choice import has_kernel, is_watched
from megatron_moe.platform import cpu_half_gemm, hardware, numerics
from megatron_moe.platform.numerics import unaffected_by_autocast
from megatron_moe.platform.protocols import AutogradContext
from megatron_moe.precision.contract import mixes_dtypes

# ---- Weight gradients that are added to their sum over micro-batches by the product that makes them.
#
# The engine's DistributedDataParallel keeps that sum, `main_grad`, in fp32, and its hook adds what autograd hands on to
# it: a product that has been rounded to the weight's dtype. A backward pass that finds the sum of its weight adds to it
# instead, without the rounding, and hands on the rest of the gradient, which is zero. Zeros of the sparse layout take
# no memory, and are right in whatever they are added to: the gradient of another use of the weight, which is still to
# be added (a table that is also the output layer), or the sum itself: where nothing is stored, CUDA's addition of both
# layouts launches no kernel, too. Expanded zeros autograd would copy to a whole gradient. The hook needs a tensor, not
# None: with `--overlap-grad-reduce` it checks that there is one, and autograd calls hooks of missing ones on another
# thread.

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


# ---- A gate's product.


class _GateProduct(torch.autograd.Function):
    """The gate's product, which saves the operands in their own dtypes, as other functions of the graph do.

    Autograd alone would save a copy of all hidden states in fp32. TF32 is not for it: ten bits of mantissa would choose
    other experts.
    """

    @staticmethod
    @unaffected_by_autocast
    def forward(ctx: AutogradContext, hidden: Tensor, weight: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.parameter, ctx.fused = weight, fused
        half = hidden.dtype == weight.dtype and hidden.dtype in _HALF
        if half and dtype == torch.float32 and not hardware.on_cpu(hidden):
            # A product that adds in fp32 and returns fp32, which CUDA has. Products of half-precision numbers are exact
            # in fp32: the sums are those of operands that were cast first.
            return torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=dtype).view(*hidden.shape[:-1], -1)
        with numerics.full_products():
            return F.linear(hidden.to(dtype), weight.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    @unaffected_by_autocast
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        grad_hidden = grad_weight = None
        with numerics.full_products():
            if ctx.needs_input_grad[0]:
                grad_hidden = torch.matmul(grad, weight.to(grad.dtype)).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                rows = hidden.flatten(0, -2).to(grad.dtype)
                total = main_grad_of(ctx.parameter) if ctx.fused else None
                if total is None:
                    grad_weight = torch.mm(grad.flatten(0, -2).t(), rows).to(weight.dtype)
                else:
                    add_product(total, grad.flatten(0, -2).t(), rows)
                    grad_weight = no_gradient(weight)
        return grad_hidden, grad_weight, None, None


def gate_product(hidden: Tensor, weight: Tensor, dtype: torch.dtype, fused: bool = False) -> Tensor:
    """Return hidden weight^T, computed in `dtype` whatever the operands' dtypes are, also under autocast.

    It is the product of the router's and of the shared expert's gate, which has few columns.

    Args:
        hidden: [..., H].
        weight: [N, H].
        dtype: fp32 or fp64, the dtype of the product.
        fused: whether the weight's gradient is added to its fp32 sum, where it has one, instead of being rounded.

    Returns:
        [..., N] in `dtype`. Gradients: summed in `dtype` and rounded once, to the dtypes of `hidden` and `weight`.
    """
    return _GateProduct.apply(hidden, weight, dtype, fused)


# ---- Products of groups of rows.

GroupedLinear = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel: rows [R, in], grouped by expert; weights [e, ..., in], of an expert one matrix or several with outputs side
by side; offsets [e] int32, the end of each expert's rows, of which the last is R -> [R, out]. An expert without
rows is allowed; its gradient is zero. `TorchProduct` takes rows behind the last, and leaves their results unwritten. A
kernel that reads offsets on the host is registered with `offsets_on_host`, so that they are copied once per layer."""


def grouped_linear_loop(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return the products, computed expert by expert; the arguments are those of `GroupedLinear`."""
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    # unbind, not weights[e]: indexing would make the backward write a zero-filled stack for every expert.
    # A gate's product in the rows' dtype is F.linear with a backward pass that follows no autocast.
    outputs = [
        gate_product(rows[a:b], w, rows.dtype) for a, b, w in zip(starts, ends, weights.flatten(1, -2).unbind(0))
    ]
    return torch.cat(outputs)


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Return what `cpu_half_gemm.grouped_product` returns, on a CPU by the kernel in C where there is one."""
    if not choice.takes_products(left, right):
        return cpu_half_gemm.grouped_product(left, right, offsets)
    if is_watched():  # by what would not see the kernel, and may change no bit
        result = cpu_half_gemm.grouped_product(left, right, offsets)
    elif right.dim() == 2:
        result = left.new_empty((offsets.shape[0], left.shape[0], right.shape[1]))
    else:
        result = left.new_empty((left.shape[0], right.shape[-1]))
    choice.grouped_product(left, right, offsets, result)
    return result


class DelayedWgrad:
    """The gradients of weights that a backward pass left out, to be computed when the device has nothing better to do.

    It serves one forward and backward pass of an expert's products, one after the other.

    Args:
        fused: see `TorchProduct`.
    """

    def __init__(self, fused: bool | None = False) -> None:
        self._fused = fused
        self._left_out: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = []

    def grouped_linear(self, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """Return what `TorchProduct` returns; the backward pass finds the gradient of the rows alone."""

        def leave_out(gradient: Callable[[Tensor], Tensor]) -> None:
            self._left_out.append((weights, gradient))

        return _GroupedMM.apply(rows, weights.detach(), offsets, self._fused, leave_out)

    def compute(self) -> None:
        """Compute what was left out, and pass it on to the parameters, as the backward pass would have done."""
        for weights, gradient in self._left_out:
            with torch.no_grad():
                of_weights = gradient(weights)
            torch.autograd.backward(weights, of_weights)
        self._left_out.clear()


@has_kernel("add_grouped_product")
def add_grouped_product(total: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> None:
    """Add left_e^T right_e to the sum of each expert e, in place and in fp32.

    Args:
        total: [e, N, K] fp32, contiguous.
        left, right: [R, N] and [R, K], grouped by expert, of one dtype.
        offsets: [e] int32, the end of each expert's rows. The form in torch reads them on the host.
    """
    if choice.takes_products(left.t(), right):
        choice.add_sums(total, left, right, offsets, rounds=False)
        if not is_watched():
            return
        total = total.clone()  # torch's form is shown on a copy
    # Without values, as in a plan, all rows are the first expert's: the operations of a whole layer, at once.
    ends = [left.shape[0]] if offsets.is_meta else offsets.tolist()
    counts = [end - start for start, end in zip([0, *ends], ends)]
    left, right = left[: ends[-1]], right[: ends[-1]]
    if hardware.on_cpu(left):
        left, right = left.to(total.dtype), right.to(total.dtype)  # all at once, and not by each product
    for expert, one, other in zip(total.unbind(0), left.t().split(counts, dim=1), right.split(counts)):
        if other.shape[0]:
            add_product(expert, one, other)


def added_to_main_grad(weights: Tensor, left: Tensor, right: Tensor, offsets: Tensor, fused: bool | None) -> bool:
    """Add the gradient of stacked weights to its fp32 sum, if it has one and product and addition may be one.

    Args:
        weights: [e, ..., K], with N rows for an expert.
        left, right, offsets: of `add_grouped_product`.
        fused: None: where that costs nothing, which is on a CPU. There products in half precision are rounded before
            they are added, as those are that autograd adds; what is saved is the gradient of all experts.

    Returns:
        Whether it was added.
    """
    for_nothing = hardware.on_cpu(weights) and not hardware.has_cuda()
    rounded = fused is None and for_nothing and cpu_half_gemm.multiplies_group_by_group(left)
    if fused is None:
        fused = for_nothing and weights.dtype == torch.float32
    total = main_grad_of(weights) if fused or rounded else None
    if total is None:
        return False
    experts = total.view(total.shape[0], -1, total.shape[-1])
    if rounded and choice.takes_products(left.t(), right):
        choice.add_sums(experts, left, right, offsets, rounds=True)
    elif rounded:
        for expert, product in cpu_half_gemm.products_over_rows(left.t(), right, offsets):
            experts[expert] += product
    else:
        add_grouped_product(experts, left, right, offsets)
    return True


class _GroupedMM(torch.autograd.Function):
    """The grouped product of torch, whose own backward fails on gradients with strides of zero (those of a sum).

    leave_out: takes a function of the weights that computes their gradient, instead of having it computed.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext,
        rows: Tensor,
        weights: Tensor,
        offsets: Tensor,
        fused: bool | None,
        leave_out: Callable[[Callable[[Tensor], Tensor]], None] | None = None,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, offsets)
        ctx.parameter = weights
        ctx.fused, ctx.leave_out = fused, leave_out
        matrices = weights.flatten(1, -2)
        if rows.shape[0] == 0:  # no token chose an expert of this rank; the kernel refuses empty operands
            return rows.new_zeros((0, matrices.shape[1]))
        return grouped_product(rows, matrices.transpose(-2, -1), offsets)

    @staticmethod
    @unaffected_by_autocast
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weights, offsets = ctx.saved_tensors
        grad, fused = grad.contiguous(), ctx.fused

        def of_weights(weights: Tensor) -> Tensor:
            if rows.shape[0] == 0:
                return torch.zeros_like(weights)
            if added_to_main_grad(weights, grad, rows, offsets, fused):
                return no_gradient(weights)
            return grouped_product(grad.t(), rows, offsets).view(weights.shape)

        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            matrices = weights.flatten(1, -2)
            grad_rows = grouped_product(grad, matrices, offsets) if rows.shape[0] else torch.zeros_like(rows)
        if ctx.leave_out is not None:
            ctx.leave_out(of_weights)
        elif ctx.needs_input_grad[1]:
            grad_weights = of_weights(ctx.parameter)
        return grad_rows, grad_weights, None, None, None


@dataclass(frozen=True)
class TorchProduct:
    """Torch's grouped product (`torch.nn.functional.grouped_mm`) as a kernel, a `GroupedLinear`.

    It needs rows of whole 16 bytes: `in` and `out` are multiples of 8 in half precision, of 4 in fp32.

    Attributes:
        fused: whether the weights' gradients are added to their fp32 sums by their product, where there are sums; None:
            on a CPU, see `added_to_main_grad`.
    """

    fused: bool | None = False

    def __call__(self, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """Return the products; the arguments are those of `GroupedLinear`.

        Raises:
            ValueError: for fp64, which the kernel does not have.
        """
        if rows.dtype == torch.float64:
            raise ValueError("--moe-expert-backend grouped_mm: torch's grouped product has no fp64; loop has")
        return _GroupedMM.apply(rows, weights, offsets, self.fused)


class TransformerEngineProduct:
    """Transformer Engine's grouped product (its module GroupedLinear) as a kernel over stacked weights.

    The modules have no parameters: each call lends them the experts' matrices, as views of the stack. What is stored,
    initialised and resharded is the same as with the other kernels.
    """

    def __init__(self) -> None:
        self._modules: dict[tuple[int, ...], tuple[Any, list[str]]] = {}

    def __call__(self, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """Return the products; the arguments are those of `GroupedLinear`, with the offsets on the host."""
        ends = offsets.tolist()
        return self.product(rows, weights, [end - start for start, end in zip([0, *ends[:-1]], ends)])

    def product(self, rows: Tensor, weights: Tensor, splits: list[int]) -> Tensor:
        """Return the products; splits are the numbers of rows of each expert."""
        if rows.shape[0] == 0:  # what the extension makes of no row at all is not documented
            return grouped_linear_loop(rows, weights, torch.zeros(len(splits), dtype=torch.int32))
        matrices = weights.flatten(1, -2)
        shape = tuple(matrices.shape)
        if shape not in self._modules:
            from transformer_engine.pytorch import GroupedLinear as Module

            experts, out_features, in_features = shape
            module = Module(experts, in_features, out_features, bias=False, params_dtype=weights.dtype, device="meta")
            names = [name for name, _ in module.named_parameters()]
            for name in names:
                delattr(module, name)
            for expert in range(experts):  # what it passes to its function in place of a bias
                setattr(module, f"bias{expert}", weights.new_empty(0))
            self._modules[shape] = module, names
        module, names = self._modules[shape]
        with replaced([module], **dict(zip(names, matrices.unbind(0)))):
            return module(rows, splits)
