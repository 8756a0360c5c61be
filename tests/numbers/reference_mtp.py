"""A language model with multi-token prediction, as section 2.2 of DeepSeek-V3 has it, written to be read; torch only.

Attention is plain (one key and value per head, no position embedding) and the MLP dense: what is of interest is which
token is merged where, which label is predicted from there, and what each loss weighs. Weights are a dict of full
tensors under their names in the whole model; everything is computed in their dtype, position by position where that
says more.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Losses:
    """next_token [B, S] per position. depths: per depth the mean over its targets. total: what is trained."""

    next_token: Tensor
    depths: list[Tensor]
    total: Tensor


def language_model(
    tokens: Tensor, labels: Tensor, mask: Tensor, weights: Weights, *, layers: int, depths: int, heads: int,
    factor: float, eps: float,
) -> Losses:  # fmt: skip
    """Losses of a batch.

    The total is (1 / N) x (sum of the next-token losses + factor / depths x sum of all depths' losses), each sum over
    positions whose label the mask keeps, N the labels that it keeps.

    Args:
        tokens: [B, S]; the token at i.
        labels: [B, S]; the token at i + 1, as the data has it.
        mask: [B, S], 1 where the label counts.
    """
    table, head = weights["embedding.word_embeddings.weight"], weights["output_layer.weight"]
    length = tokens.shape[1]
    hidden = table[tokens]
    for layer in range(layers):
        hidden = transformer_layer(hidden, weights, f"decoder.layers.{layer}.", heads, eps)
    hidden = norm(hidden, weights["decoder.final_layernorm.weight"], eps)
    next_token = cross_entropy(hidden @ head.T, labels)
    total, means = (next_token * mask).sum(), []
    for depth in range(1, depths + 1):
        name = f"mtp.layers.{depth - 1}."
        merged = []
        for i in range(length):  # position i has h_i of the depth before and the embedding of token i + depth
            ahead = tokens[:, i + depth] if i + depth < length else torch.zeros_like(tokens[:, 0])
            pair = (
                norm(table[ahead], weights[name + "enorm.weight"], eps),
                norm(hidden[:, i], weights[name + "hnorm.weight"], eps),
            )
            merged.append(torch.cat(pair, dim=-1) @ weights[name + "eh_proj.weight"].T)
        hidden = transformer_layer(torch.stack(merged, dim=1), weights, name + "transformer_layer.", heads, eps)
        hidden = norm(hidden, weights[name + "final_layernorm.weight"], eps)
        losses, targets = [], []
        for i in range(length - depth):  # and predicts token i + depth + 1, which is the label at i + depth
            losses.append(cross_entropy(hidden[:, i] @ head.T, labels[:, i + depth]) * mask[:, i + depth])
            targets.append(mask[:, i + depth])
        total = total + factor / depths * torch.stack(losses).sum()
        means.append(torch.stack(losses).sum() / torch.stack(targets).sum())
    return Losses(next_token, means, total / mask.sum())


def transformer_layer(x: Tensor, weights: Weights, name: str, heads: int, eps: float) -> Tensor:
    """[B, S, H] -> [B, S, H]: causal attention and a gated MLP, each behind its norm, each added to what came in."""
    batch, length, width = x.shape
    size = width // heads
    qkv = norm(x, weights[name + "input_layernorm.weight"], eps) @ weights[name + "self_attention.linear_qkv.weight"].T
    query, key, value = qkv.view(batch, length, heads, 3, size).unbind(3)
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(size)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(future, -math.inf).softmax(-1), value)
    x = x + mixed.reshape(batch, length, width) @ weights[name + "self_attention.linear_proj.weight"].T
    gate, up = (
        norm(x, weights[name + "pre_mlp_layernorm.weight"], eps) @ weights[name + "mlp.linear_fc1.weight"].T
    ).chunk(2, dim=-1)
    return x + (torch.nn.functional.silu(gate) * up) @ weights[name + "mlp.linear_fc2.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log of the label's probability, per position."""
    return -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
