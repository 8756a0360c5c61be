"""The loss head's last step: from per-token losses to what the engine's schedules want."""

from __future__ import annotations

import torch
from torch import Tensor


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: [B, S], 1 for tokens that count.
        output: [B, S] cross entropy per token, in nats.

    Returns:
        The sum (fp32 scalar), the number of tokens (int scalar), and for the logs {"lm loss": fp32 [sum, tokens]}. With
        three values the schedule divides by the tokens itself, or leaves that to the end of the step for a loss per
        token; with two it would also multiply by the context-parallel size.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.reshape(-1).float() * mask)
    tokens = mask.sum()
    # The schedule divides `total` in place; the logged value must not follow.
    logged = torch.stack((total.detach().clone(), tokens))
    return total, tokens.to(torch.int), {"lm loss": logged}
