"""The model's tensors, each beside the dtype that the precision contract wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_moe.config import derived
from megatron_moe.config.schema import Run
from megatron_moe.precision.contract import declared_fp32_state
from megatron_moe.precision.guard import Held
from megatron_moe.precision.islands import declared_fp32_parameters


def held_by_model(run: Run, chunks: Sequence[torch.nn.Module]) -> Iterator[Held]:
    """Every weight, its gradient buffer where there is one, and all declared fp32 state of these chunks.

    Args:
        run: says the model's dtype and that of the gradients.
        chunks: at any stage: built, cast, or wrapped for data parallelism.
    """
    model = getattr(torch, derived.params_dtype_name(run))
    for index, chunk in enumerate(chunks):
        chunk_name = f"model{index}." if len(chunks) > 1 else ""
        islands = {id(parameter) for _, parameter in declared_fp32_parameters(chunk)}
        for name, parameter in chunk.named_parameters():
            name = chunk_name + without_wrappers(name)
            wanted = torch.float32 if id(parameter) in islands else model
            yield Held(name, "weight", parameter.dtype, wanted)
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None:
                summed = torch.float32 if derived.grads_in_fp32(run) else wanted
                yield Held(name, "accumulated gradient", gradient.dtype, summed)
        for name, tensor in declared_fp32_state(chunk):
            yield Held(chunk_name + without_wrappers(name), "fp32 state", tensor.dtype, torch.float32)


def without_wrappers(name: str) -> str:
    """A tensor's name in the model itself: each wrapper holds what it wraps as `module`."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
