"""What Muon does to a model's weights, in fp64 and by singular values, written to be read; torch only.

Muon (Keller Jordan 2024) as in Moonlight (arXiv 2502.16982): the momentum's matrices are orthogonalized by a polynomial
of their singular values, and scaled to the size of AdamW's updates. What a linear layer holds as one weight and is
several maps (queries, keys and values; gate and up; one expert after another) is as many matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
Steps = Sequence[tuple[float, float, float]]


def orthogonalized(matrix: Tensor, steps: Steps) -> Tensor:
    """U p(S / |M|) V^T of the matrix M = U S V^T, in fp64."""
    matrix = matrix.double()
    if not matrix.any():
        return matrix
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


def rounding_bound(matrix: Tensor, steps: Steps, unit: float) -> float:
    """How far a computed result may be from `orthogonalized`, in the Frobenius norm, to first order in `unit`.

    `unit` is the relative error of one rounding. A step computes a Gram matrix G = X X^T, a polynomial P = b G + c G G
    and a X + P X, each rounded once; sums are taken for exact. An error of X grows at most by the largest slope of the
    step's polynomial on [0, |X|], which is the Lipschitz constant of the map of singular values.
    """
    values = torch.linalg.svdvals(matrix.double())
    values = values / values.norm()
    error = unit  # of X / |X|, which has norm 1
    for a, b, c in steps:
        largest, gram = float(values.max()), values**2
        polynomial = b * gram + c * gram**2
        after = values * (a + polynomial)
        of_gram = unit * float(gram.norm())
        of_polynomial = (abs(b) + 2 * abs(c) * largest**2) * of_gram + unit * float(polynomial.norm())
        grid = torch.linspace(0, largest, 1000, dtype=torch.float64)
        slope = float((a + 3 * b * grid**2 + 5 * c * grid**4).abs().max())
        error = slope * error + largest * of_polynomial + unit * float(after.norm())
        values = after.abs()
    return error


def scale(rows: int, columns: int, mode: str = "spectral", extra: float = 0.2) -> float:
    """The factor on an orthogonalized matrix."""
    if mode == "spectral":
        return extra * math.sqrt(max(rows, columns))
    if mode == "unit_rms_norm":
        return extra * math.sqrt(rows / columns)
    return extra * math.sqrt(max(1.0, rows / columns))


def matrices(name: str, weight: Tensor, *, query_groups: int, head: int, split_qkv: bool = True) -> list[Tensor]:
    """The matrices in a weight of one rank, as views whose last axis is the input; none where AdamW updates it."""
    if name.endswith("experts.weight1"):  # [e, 2, F, H]
        return [half for expert in weight for half in expert]
    if name.endswith("experts.weight2"):  # [e, H, F]
        return list(weight)
    module = name.split(".")[-2]
    if not name.endswith(".weight") or weight.dim() != 2 or not (module.startswith("linear_") or module == "eh_proj"):
        return []
    if module == "linear_fc1":
        return list(weight.chunk(2))
    if module == "linear_qkv" and split_qkv:
        by_group = weight.view(query_groups, -1, weight.shape[1])
        return [by_group[:, : -2 * head], by_group[:, -2 * head : -head], by_group[:, -head:]]
    return [weight]
