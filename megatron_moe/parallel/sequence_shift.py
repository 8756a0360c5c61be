"""A sequence moved by some positions, also where context parallelism spreads it over ranks.

The engine's own `roll_tensor` sends single columns between neighbours and knows no gradient. What is moved here, ids
and losses per token, is so small beside the activations that every rank may see all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.parallel.sequence_chunks import all_gather_sequence, context_parallel_slice


def shifted(x: Tensor, by: int, group: ProcessGroup) -> Tensor:
    """The tensor whose position s holds x[:, s + by], and zero where the sequence has no such position.

    Args:
        x: [B, S / CP], this rank's part of the sequence as `sequence_chunks` has it.
        by: how far ahead to look, in tokens of the whole sequence; negative looks back.
        group: the context-parallel ranks.

    Returns:
        A new tensor like `x`. Backward: the same shift the other way.
    """
    whole = all_gather_sequence(x.t(), group).t()
    nothing = whole.new_zeros((whole.shape[0], min(abs(by), whole.shape[1])))
    moved = torch.cat((whole[:, by:], nothing) if by >= 0 else (nothing, whole[:, :by]), dim=1)
    return context_parallel_slice(moved, group.rank(), group.size()) if group.size() > 1 else moved
