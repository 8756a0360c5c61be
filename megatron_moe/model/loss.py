"""The loss head's last step: from per-token losses to what the engine's schedules want."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.parallel.collectives import sum_over_ranks


def loss_func(
    loss_mask: Tensor, output: Tensor, shared_by: ProcessGroup | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: [B, S], 1 for tokens that count; a rank's own part of the sequence under context parallelism.
        output: [B, S] cross entropy per token, in nats.
        shared_by: the context-parallel ranks, where the loss is a mean over a micro-batch. It is one over the tokens of
            all these ranks, which may have unequally many: their tokens are added up (a collective), and because the
            gradients of these ranks will be averaged, each rank's sum counts as often as there are ranks.

    Returns:
        The sum (fp32 scalar), the number of tokens (int scalar), and for the logs {"lm loss": fp32 [sum, tokens]} of
        this rank alone. With three values the schedule divides by the tokens itself, or leaves that to the end of the
        step for a loss per token; with two it would also multiply by the context-parallel size.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.reshape(-1).float() * mask)
    tokens = mask.sum()
    # The schedule divides `total` in place; the logged value must not follow.
    logged = torch.stack((total.detach().clone(), tokens))
    if shared_by is not None and shared_by.size() > 1:
        total, tokens = total * shared_by.size(), sum_over_ranks(tokens, shared_by)
    return total, tokens.to(torch.int), {"lm loss": logged}
