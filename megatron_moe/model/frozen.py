"""Parameters that `--freeze` leaves out of the training.

The engine gives a parameter that requires no gradient no place in its gradient buffers and in its optimizers. So a
frozen one has no gradient, no moments, no fp32 copy and no weight decay, and no share of the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.model.initialize import global_name


def freeze(chunk: torch.nn.Module, names: Collection[str]) -> None:
    """Freeze what has these names in the whole model, before the chunk is wrapped.

    Behind a frozen embedding the hidden states require a gradient as if it were trained: layers that are recomputed,
    and a stage of the pipeline, have a backward pass only if their input has a gradient.
    """
    for name, parameter in chunk.named_parameters():
        if global_name(chunk, name) in names:
            parameter.requires_grad_(False)
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None and not any(parameter.requires_grad for parameter in embedding.parameters()):
        embedding.register_forward_hook(_require_gradient)


def _require_gradient(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def count_frozen(model: Sequence[torch.nn.Module], pg_collection: Any) -> int:
    """Return the elements of all frozen parameters of the whole model. Collective over all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=platform.device())
    for chunk in model:
        for parameter in chunk.parameters():
            if not parameter.requires_grad:
                total += parameter.numel() / _copies(parameter, pg_collection)
    torch.distributed.all_reduce(total)
    return round(total.item())


def _copies(parameter: torch.nn.Parameter, pg_collection: Any) -> int:
    """Return how many ranks have the same part of a parameter."""
    if not getattr(parameter, "allreduce", True):
        return pg_collection.expt_dp.size()
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return pg_collection.dp_cp.size() if is_split else pg_collection.tp_dp_cp.size()
