"""What Muon does to a model's weights, in fp64 and by singular values, written to be read; torch only.

Muon (Keller Jordan 2024) as in Moonlight (arXiv 2502.16982): the momentum's matrices are orthogonalized by a polynomial
of their singular values, and scaled to the size of AdamW's updates. What a linear layer holds as one weight and is
several maps (queries, keys and values; gate and up; one expert after another) is as many matrices.
"""

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


def expected_error(matrix: Tensor, steps: Steps, unit: float) -> float:
    """The root mean square distance from `orthogonalized` in the Frobenius norm.

    Rounding errors are taken for independent and alike in all directions, and 0.385 `unit` of what is rounded. A step
    rounds G = X X^T, P = b G + c G G, and a X + P X; an error of G or P passes through the step's own products, and
    what comes out of a step is multiplied by the derivatives of the steps after it.
    """
    short, long = sorted(matrix.shape)
    values = torch.linalg.svdvals(matrix.double())
    values = values / values.norm()
    kappa = 0.385 * unit
    square = (kappa * _gain(values, steps, short, long)) ** 2
    for number, (a, b, c) in enumerate(steps):
        gram = values**2
        polynomial = b * gram + c * gram**2
        after = values * (a + polynomial)
        of_gram = (kappa * gram.norm()) ** 2
        error = of_gram * ((b * values + c * values**3).norm() ** 2 / short)
        error += of_gram * c**2 * gram.norm() ** 2 * values.norm() ** 2 / short**2
        error += (kappa * polynomial.norm()) ** 2 * values.norm() ** 2 / short
        error += (kappa * after.norm()) ** 2
        square += float(error) * _gain(after, steps[number + 1 :], short, long) ** 2
        values = after
    return math.sqrt(square)


def _gain(values: Tensor, steps: Steps, short: int, long: int) -> float:
    """The root mean square, over all directions, of a composed map's derivatives at a [short, long] matrix.

    For singular values s, t and their images F these are (F(s) - F(t)) / (s - t) and (F(s) + F(t)) / (s + t), in equal
    parts, and F(s) / s in the directions beyond the square.
    """
    values = values.clamp_min(1e-12)
    image, slope = values, torch.ones_like(values)
    for a, b, c in steps:
        slope = slope * (a + 3 * b * image**2 + 5 * c * image**4)
        image = a * image + b * image**3 + c * image**5
    difference = values.unsqueeze(0) - values.unsqueeze(1)
    same = difference.abs() < 1e-9
    apart = (image.unsqueeze(0) - image.unsqueeze(1)) / difference.masked_fill(same, 1.0)
    apart = torch.where(same, (slope.unsqueeze(0) + slope.unsqueeze(1)) / 2, apart)
    total = values.unsqueeze(0) + values.unsqueeze(1)
    together = (image.unsqueeze(0) + image.unsqueeze(1)) / total
    beyond = (long - short) * (image / values).square().sum()
    return math.sqrt(float((apart.square().sum() + together.square().sum()) / 2 + beyond) / (short * long))


def scale(rows: int, columns: int, mode: str = "spectral", extra: float = 0.2) -> float:
    """The factor on an orthogonalized matrix."""
    if mode == "spectral":
        return extra * math.sqrt(max(rows, columns))
    if mode == "unit_rms_norm":
        return extra * math.sqrt(rows / columns)
    return extra * math.sqrt(max(1.0, rows / columns))


def matrices(
    name: str,
    weight: Tensor,
    *,
    query_groups: int,
    head: int,
    split_qkv: bool = True,
    of_heads: dict[str, list[int]] | None = None,
) -> list[Tensor]:
    """The matrices in a weight of one rank, as views whose last axis is the input; none where AdamW updates it.

    of_heads: module -> rows of the matrices of a head, where each head is orthogonalized by itself.
    """
    if name.endswith("experts.weight1"):  # [e, 2, F, H]
        return [half for expert in weight for half in expert]
    if name.endswith("experts.weight2"):  # [e, H, F]
        return list(weight)
    module = name.split(".")[-2]
    if not name.endswith(".weight") or weight.dim() != 2 or not (module.startswith("linear_") or module == "eh_proj"):
        return []
    if module == "linear_fc1":
        return list(weight.chunk(2))
    if of_heads and module in of_heads:
        rows = len(weight) // sum(of_heads[module]) * of_heads[module]
        return list(weight.split(rows))
    if module == "linear_qkv" and split_qkv:
        by_group = weight.view(query_groups, -1, weight.shape[1])
        return [by_group[:, : -2 * head], by_group[:, -2 * head : -head], by_group[:, -head:]]
    return [weight]
