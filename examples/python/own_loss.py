"""Train with a loss of your own: logits and labels in, a loss for each token out.

The run masks and averages it over the global batch, alike on every layout; evaluations use it, too.

python examples/python/own_loss.py
"""

import torch
from torch import Tensor

import megatron_moe as mm


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Return cross entropy with label smoothing 0.1: logits [B, S, V] fp32, labels [B, S] -> [B, S]."""
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=0.1
    )
    return losses.view(labels.shape)


settings = mm.Settings.from_preset("tiny", mock_data=True, vocab_size=256, seq_length=32, train_iters=10, eval_iters=0)
plain = mm.train(settings)
own = mm.train(settings, loss=smoothed)
print(f"first loss: {plain.steps[0].loss:.4f} plain, {own.steps[0].loss:.4f} smoothed")
print(f"last loss:  {plain.steps[-1].loss:.4f} plain, {own.steps[-1].loss:.4f} smoothed")
