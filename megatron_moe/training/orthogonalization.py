"""The Newton-Schulz iteration, which replaces the singular values of a matrix by numbers near 1.

M = U S V^T becomes U p(S / |M|) V^T, where |M| is the Frobenius norm and p the composition of one odd polynomial of
degree 5 per step: x (a + b x^2 + c x^4). `p` alone says how near to 1 a singular value comes, which `mapped` computes
for the tests and docs/muon.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_moe.platform.half_products import multiply_in_fp32
from megatron_moe.precision.contract import mixes_dtypes

Coefficients = tuple[float, float, float]

# a, b, c of each step; of a longer iteration the last ones go on.
COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    # Keller Jordan, "Muon" (2024); Moonlight's (arXiv:2502.16982).
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Per step, by Jiacheng You for modded-nanogpt (2025); Megatron-LM's default.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def steps_of(kind: str, count: int) -> tuple[Coefficients, ...]:
    """Return the coefficients of `count` steps of a kind."""
    known = COEFFICIENTS[kind]
    return tuple(known[min(step, len(known) - 1)] for step in range(count))


def mapped(values: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """Return what becomes of singular values, over the Frobenius norm of their matrix, in exact arithmetic."""
    for a, b, c in steps:
        square = values * values
        values = values * (a + square * (b + c * square))
    return values


@torch.no_grad()
@mixes_dtypes("matrices are scaled in fp32 and iterated in the dtype that is asked for")
def orthogonalized(matrices: Tensor, steps: Sequence[Coefficients], dtype: torch.dtype) -> Tensor:
    """Return the matrices with their singular values mapped to numbers near 1.

    The scale of a matrix is of no account, down to numbers that fp32 cannot square. A matrix of zeros stays one.

    Args:
        matrices: [N, m, n], floating.
        steps: see `steps_of`.
        dtype: bf16 or fp32, of the iteration. In bf16 each product adds in fp32 and is rounded once.

    Returns:
        [N, m, n] in `dtype`.
    """
    wide = matrices.to(torch.float32, copy=True)
    for order in (math.inf, 2):  # what is squared is at most 1
        norm = torch.linalg.vector_norm(wide, order, dim=(1, 2), keepdim=True)
        wide.div_(norm.masked_fill(norm == 0, 1))
    x = wide.to(dtype)
    del wide
    transposed = x.shape[1] > x.shape[2]
    if transposed:
        x = x.mT  # the products with the shorter side are the smaller ones
    for a, b, c in steps:
        gram = _product(x, x.mT)
        polynomial = _product(gram, gram, gram, b, c)
        x = _product(polynomial, x, x, a)
    return x.mT if transposed else x


def _product(left: Tensor, right: Tensor, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Return beta x added + alpha x left right for batches of matrices, rounded once."""
    if multiply_in_fp32(left):
        wide = None if added is None else added.float()
        return _product(left.float(), right.float(), wide, beta, alpha).to(left.dtype)
    if added is None:
        return torch.bmm(left, right)
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)
