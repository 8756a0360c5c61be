"""One tensor as an archive of its own in a data file: what it costs, and what may be put into it."""

from __future__ import annotations

import torch

PER_PART = 2048
"""Bytes that torch's archive adds to a tensor, at most, for estimates."""


def by_itself(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no part of a larger one: an archive holds all of the memory that a tensor is
    a view of, and torch's writer would copy such a one first."""
    value = value.detach()
    if value.is_cuda or not value.numel() or value.untyped_storage().nbytes() == value.nbytes:
        return value
    content = value.contiguous().view(-1).view(torch.uint8).numpy()
    return torch.from_numpy(content).view(value.dtype).view(value.shape)
