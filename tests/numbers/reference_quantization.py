"""Block quantisation as it is defined, number by number, in fp64."""

import torch
from torch import Tensor

BLOCK = 256
LARGEST = {8: 127, 4: 7}


def rounded(values: Tensor, bits: int) -> Tensor:
    """Return each number of a vector as the nearest multiple of its block's largest magnitude over 127 or 7, fp64."""
    exact = values.double()
    found = torch.zeros_like(exact)
    for start in range(0, len(exact), BLOCK):
        block = exact[start : start + BLOCK]
        scale = float(block.abs().max()) / LARGEST[bits]
        for index, value in enumerate(block.tolist()):
            found[start + index] = round(value / scale) * scale if scale else 0.0
    return found


def bound(values: Tensor, bits: int) -> Tensor:
    """Return the largest error that each number of a vector may have: half a step of its block, fp64."""
    found = torch.zeros(len(values), dtype=torch.float64)
    for start in range(0, len(values), BLOCK):
        found[start : start + BLOCK] = float(values[start : start + BLOCK].double().abs().max()) / (2 * LARGEST[bits])
    return found
