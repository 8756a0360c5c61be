"""One MoE layer to compute: its weights, input, output gradient and routing, and a slow fp32 oracle for the answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_SCALING_FACTOR = 2.5
_CLOSEST_CALL = 1e-4
"""Smallest gap between a token's K-th and next score: far above rounding, so that everybody routes alike."""


@dataclass(frozen=True)
class Shape:
    """T tokens, width H, E experts of width F, K of them per token, a shared expert of width Fs."""

    tokens: int = 4096
    hidden: int = 512
    experts: int = 32
    topk: int = 4
    ffn: int = 256
    shared: int = 256

    scaling_factor: float = _SCALING_FACTOR

    @property
    def flops(self) -> int:
        """Of one forward and backward pass, a multiply-add as 2: (2HE + 6HFK + 6HFs) T, three times."""
        per_token = 2 * self.hidden * self.experts + 6 * self.hidden * (self.ffn * self.topk + self.shared)
        return 3 * per_token * self.tokens

    def __str__(self) -> str:
        return (
            f"T{self.tokens} H{self.hidden} E{self.experts} top-{self.topk} F{self.ffn} shared {self.shared}, "
            f"{self.flops / 1e9:.1f} GFLOP forward and backward"
        )


@dataclass(frozen=True)
class Problem:
    """What every contestant is given, all in one dtype.

    x, grad_output: [T, H]. router: [E, H]. w1: [E, 2F, H], gate rows before up rows. w2: [E, H, F]; of a rank's problem
    w1 and w2 are its own experts'.
    shared_w1: [2Fs, H]. shared_w2: [H, Fs].
    """

    shape: Shape
    x: Tensor
    grad_output: Tensor
    router: Tensor
    w1: Tensor
    w2: Tensor
    shared_w1: Tensor
    shared_w2: Tensor

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that the experts are divided among."""
        return self.shape.experts // len(self.w1)


def make_problem(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Problem:
    """Draw a problem. A token whose choice of experts is a close call is drawn again.

    The gradient that comes from above is of the size of a loss averaged over tokens, times T.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return (torch.randn(*size, generator=generator) * std).to(dtype)

    s = shape
    router = normal(s.experts, s.hidden, std=s.hidden**-0.5)
    x = normal(s.tokens, s.hidden, std=1.0)
    while (close := _is_close_call(x, router, s.topk)).any():
        x[close] = normal(int(close.sum()), s.hidden, std=1.0)
    problem = (
        x,
        normal(s.tokens, s.hidden, std=1.0),
        router,
        normal(s.experts, 2 * s.ffn, s.hidden, std=s.hidden**-0.5),
        normal(s.experts, s.hidden, s.ffn, std=s.ffn**-0.5),
        normal(2 * s.shared, s.hidden, std=s.hidden**-0.5),
        normal(s.hidden, s.shared, std=s.shared**-0.5),
    )
    return Problem(shape, *(tensor.to(device) for tensor in problem))


def _is_close_call(x: Tensor, router: Tensor, topk: int) -> Tensor:
    scores = torch.sigmoid(x.double() @ router.double().t())
    best = scores.topk(topk + 1, dim=-1).values
    return best[:, topk - 1] - best[:, topk] < _CLOSEST_CALL


def oracle(problem: Problem) -> dict[str, Tensor]:
    """Output and gradients in fp32, expert by expert, by autograd: y, dx, drouter, dw1, dw2, dshared_w1, dshared_w2.

    DeepSeek-V3's gate: sigmoid scores, the K best, weights that sum to one, times the scaling factor.
    """
    names = ("x", "router", "w1", "w2", "shared_w1", "shared_w2")
    leaf = {name: getattr(problem, name).float().clone().requires_grad_() for name in names}
    x = leaf["x"]
    scores = torch.sigmoid(x @ leaf["router"].t())
    chosen, expert_ids = scores.topk(problem.shape.topk, dim=-1)
    probs = chosen / chosen.sum(dim=-1, keepdim=True) * problem.shape.scaling_factor
    y = _swiglu(x @ leaf["shared_w1"].t()) @ leaf["shared_w2"].t()
    for expert, (w1, w2) in enumerate(zip(leaf["w1"].unbind(), leaf["w2"].unbind(), strict=True)):
        token, slot = torch.where(expert_ids == expert)
        out = _swiglu(x[token] @ w1.t()) @ w2.t()
        y = y.index_add(0, token, out * probs[token, slot].unsqueeze(-1))
    y.backward(problem.grad_output.float())
    return {"y": y.detach()} | {f"d{name}": tensor.grad for name, tensor in leaf.items() if tensor.grad is not None}


def relative_error(result: Tensor, truth: Tensor) -> float:
    """||result - truth|| / ||truth|| over all elements, in fp64."""
    if result.shape != truth.shape:
        raise AssertionError(f"shape {tuple(result.shape)}, expected {tuple(truth.shape)}")
    return float((result.double() - truth.double()).norm() / truth.double().norm())


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
