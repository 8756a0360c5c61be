"""The residual stream in fp32: the add at the end of each half of a layer.

The engine's add casts the stream to the dtype of what is added, so that `fp32_residual_connection` alone leaves an fp32
stream that was rounded to bf16 in every layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BiasDropoutAdd = Callable[[tuple[Tensor, "Tensor | None"], Tensor, float], Tensor]


def fp32_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """residual + dropout(x + bias), in the residual's dtype throughout; the engine's protocol.

    Args:
        training: whether dropout drops.
        fused: part of the protocol; there is one way.

    Returns:
        A function of ((x, bias or None), residual, dropout probability); x [S, B, H] in the model's dtype, residual
        and result [S, B, H] in fp32.
    """

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
        x, bias = x_with_bias
        wide = x.to(residual.dtype) if bias is None else x.to(residual.dtype) + bias.to(residual.dtype)
        return residual + F.dropout(wide, p=probability, training=training)

    return add


def residual_dtype(fp32_residual: bool, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the stream between layers, and so of what pipeline stages send each other."""
    return torch.float32 if fp32_residual else model_dtype
