"""A MoE layer in plain torch as a contestant: one that knows its shapes, with a SwiGLU by torch.compile."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestants import Contestant, LayerContestant, Skipped
from benchmarks.problem import Problem


def plain_layer(problem: Problem) -> Contestant:
    """Return a layer that sorts rows, loops over the experts' products and gathers both ways.

    It has no options and no dispatch. Its products have as many rows as the routing gives: a benchmark's routing stays
    the same, and torch keeps code for each of these shapes.

    Raises:
        Skipped: where torch cannot compile.
    """
    module = _PlainMoE(problem).to(problem.x.device)
    try:
        module(problem.x)
    except Exception as error:  # what a missing or failing compiler raises has no common class
        raise Skipped(f"torch.compile failed ({type(error).__name__})") from error

    def gradients() -> dict[str, Tensor]:
        return {f"d{name}": weight.grad for name, weight in module.named_parameters() if weight.grad is not None}

    return LayerContestant(problem, module, module, gradients)


class _PlainMoE(nn.Module):
    """The layer of `oracle`, for x [T, H]."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.shape = problem.shape
        for name in ("router", "w1", "w2", "shared_w1", "shared_w2"):
            self.register_parameter(name, nn.Parameter(getattr(problem, name).clone()))

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        chosen, ids = torch.sigmoid(x.float() @ self.router.float().t()).topk(shape.topk, dim=-1)
        probs = chosen / chosen.sum(dim=-1, keepdim=True) * shape.scaling_factor
        order = ids.flatten().argsort(stable=True)
        rows_of_token = torch.empty_like(order)
        rows_of_token[order] = torch.arange(order.shape[0], device=x.device)
        rows_of_token = rows_of_token.view_as(ids)
        counts = torch.bincount(ids.flatten(), minlength=shape.experts).tolist()
        rows = _Copies.apply(x, order // shape.topk, rows_of_token)
        routed = _Experts.apply(rows, probs.flatten()[order], self.w1, self.w2, counts)
        ones = probs.new_ones(x.shape[0])
        shared = _Experts.apply(x, ones, self.shared_w1.unsqueeze(0), self.shared_w2.unsqueeze(0), [x.shape[0]])
        return _Sums.apply(routed, order // shape.topk, rows_of_token) + shared


class _Copies(torch.autograd.Function):
    """Each token's copies, [R, H] from [T, H]; slots [T, K] are the rows of a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return F.embedding_bag(ctx.saved_tensors[0], grad, mode="sum"), None, None


class _Sums(torch.autograd.Function):
    """The sums of each token's rows, [T, H] from [R, H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return F.embedding_bag(slots, rows, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Experts(torch.autograd.Function):
    """down(prob * silu(gate) * up) of rows [R, H] that are sorted by expert, `counts` for each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, prob: Tensor, w1: Tensor, w2: Tensor, counts: list[int]) -> Tensor:
        gate_up = _products(rows, w1.transpose(1, 2), counts)
        hidden = _swiglu(*gate_up.chunk(2, dim=-1), prob)
        ctx.save_for_backward(rows, prob, w1, w2, gate_up, hidden)
        ctx.counts = counts
        return _products(hidden, w2.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        rows, prob, w1, w2, gate_up, hidden = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        grad_hidden = _products(grad, w2, ctx.counts)
        grad_prob = _swiglu_backward(grad_hidden, *gate_up.chunk(2, dim=-1), prob, *grad_gate_up.chunk(2, dim=-1))
        grad_w1, grad_w2 = _sums(grad_gate_up, rows, w1, ctx.counts), _sums(grad, hidden, w2, ctx.counts)
        return _products(grad_gate_up, w1, ctx.counts), grad_prob, grad_w1, grad_w2, None


def _products(rows: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    """Return each expert's rows times its matrix, [R, N] from [R, K] and [E, K, N]."""
    result = rows.new_empty((rows.shape[0], matrices.shape[2]))
    for some, matrix, into in zip(rows.split(counts), matrices.unbind(), result.split(counts), strict=True):
        torch.mm(some, matrix, out=into)
    return result


def _sums(left: Tensor, right: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Return each expert's left^T right, the gradient [E, N, K] of its weights."""
    result = torch.empty_like(weights)
    for one, other, into in zip(left.split(counts), right.split(counts), result.unbind(), strict=True):
        torch.mm(one.t(), other, out=into)
    return result


@torch.compile(dynamic=False)
def _swiglu(gate: Tensor, up: Tensor, prob: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float() * prob.unsqueeze(-1)).to(gate.dtype)


@torch.compile(dynamic=False)
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, prob: Tensor, of_gate: Tensor, of_up: Tensor) -> Tensor:
    slope, wide, factor = grad.float(), gate.float(), up.float()
    sigmoid = torch.sigmoid(wide)
    silu = wide * sigmoid
    weighted = slope * prob.unsqueeze(-1)
    of_gate.copy_(weighted * factor * (sigmoid + silu * (1 - sigmoid)))
    of_up.copy_(weighted * silu)
    return (slope * silu * factor).sum(-1)
