"""Products of groups of rows with one matrix per group. The only file that picks a grouped-GEMM kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

GroupedLinear = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_linear_loop(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """The plain reference: one product per expert. Same arguments as `grouped_linear`."""
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    # unbind, not weights[e]: indexing would make the backward write a zero-filled stack for every expert.
    outputs = [F.linear(rows[a:b], w) for a, b, w in zip(starts, ends, weights.unbind(0))]
    return torch.cat(outputs)


def grouped_linear_torch(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """torch's grouped product (`torch.nn.functional.grouped_mm`). Same arguments as `grouped_linear`."""
    return F.grouped_mm(rows, weights.transpose(-2, -1), offs=offsets)


_BACKENDS: dict[str, GroupedLinear] = {"grouped_mm": grouped_linear_torch, "loop": grouped_linear_loop}


def grouped_linear(backend: str) -> GroupedLinear:
    """The kernel for `--moe-expert-backend`: a function of

    rows [R, in], grouped by expert; weights [e, out, in]; offsets [e] int32, the end of each expert's rows

    that returns [R, out]. The last offset is R. An expert without rows is allowed; its gradient is zero.

    Raises:
        ValueError: for a backend that is none of these.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"--moe-expert-backend {backend}: not one of {', '.join(_BACKENDS)}")
    return _BACKENDS[backend]
