"""FP8 in tiles as it is defined, in fp64: the numbers of each format from their bits, and one tile at a time."""

import bisect

import torch
from torch import Tensor

TILE = 128


def numbers(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """All finite numbers from 0 up, in order: the n-th has the code n, so an even n is an even mantissa."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    found = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, steps)
        scale = 2.0 ** (max(exponent, 1) - bias)
        found.append((mantissa / steps + (exponent > 0)) * scale)
    return [number for number in found if number <= largest]


FORMATS = {"e4m3": numbers(4, 3, 448.0), "e5m2": numbers(5, 2, 57344.0)}


def nearest(value: float, name: str) -> float:
    """The nearest number of a format, of two the one with an even mantissa, not beyond the largest."""
    known, size = FORMATS[name], abs(value)
    above = bisect.bisect_left(known, size)
    if above == len(known):
        above -= 1
    below = max(above - 1, 0)
    down, up = size - known[below], known[above] - size
    code = below if down < up or (down == up and below % 2 == 0) else above
    return known[code] if value >= 0 else -known[code]


def rounded(values: Tensor, high: int, wide: int, name: str = "e4m3") -> Tensor:
    """A matrix [M, N] in tiles of high x wide, fp64. Scales, and the numbers over them, are fp32 numbers."""
    found = torch.zeros(values.shape, dtype=torch.float64)
    for top in range(0, values.shape[0], high):
        for left in range(0, values.shape[1], wide):
            tile = values[top : top + high, left : left + wide].float()
            scale = tile.abs().max() / FORMATS[name][-1]
            if scale:
                steps = [[nearest(step, name) for step in row] for row in (tile / scale).tolist()]
                found[top : top + high, left : left + wide] = torch.tensor(steps).double() * scale.double()
    return found


def products(rows: Tensor, matrices: Tensor, grad: Tensor, gradients: str = "e4m3") -> tuple[Tensor, Tensor, Tensor]:
    """Result [R, P x out], gradients of rows [R, in] and of an expert's matrices [P, out, in], in fp64.

    grad: [R, P x out], of the result.
    """
    grads = grad.unflatten(1, matrices.shape[:2]).unbind(1)
    blocks = [rounded(matrix, TILE, TILE) for matrix in matrices]
    result = torch.cat([rounded(rows, 1, TILE) @ block.T for block in blocks], dim=1)
    grad_rows = sum(rounded(one, 1, TILE, gradients) @ block for one, block in zip(grads, blocks))
    columns = rounded(rows, TILE, 1)
    grad_matrices = torch.stack([rounded(one, TILE, 1, gradients).T @ columns for one in grads])
    return result, grad_rows, grad_matrices
