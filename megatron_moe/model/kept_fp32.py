"""`--keep-fp32` in the built model: which modules of a chunk become fp32 islands, and what each of them emits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from megatron_moe.config import derived, module_names
from megatron_moe.config.schema import Run
from megatron_moe.model.initialize import global_name
from megatron_moe.moe.router import TopKRouter
from megatron_moe.precision.contract import Emits, declared_fp32_parameters, declared_fp32_state, make_island
from megatron_moe.precision.guard import HeldTensor

# ---- The model's tensors, each beside the dtype that the precision contract wants.


def held_by_model(run: Run, chunks: Sequence[torch.nn.Module]) -> Iterator[HeldTensor]:
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
            yield HeldTensor(name, "weight", parameter.dtype, wanted)
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None:
                summed = torch.float32 if derived.grads_in_fp32(run) else wanted
                yield HeldTensor(name, "accumulated gradient", gradient.dtype, summed)
        for name, tensor in declared_fp32_state(chunk):
            yield HeldTensor(chunk_name + without_wrappers(name), "fp32 state", tensor.dtype, torch.float32)


def without_wrappers(name: str) -> str:
    """A tensor's name in the model itself: each wrapper holds what it wraps as `module`."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


# ----


def keep_in_fp32(chunk: torch.nn.Module, run: Run, config: Any) -> list[str]:
    """Make fp32 islands of the modules of `--keep-fp32` that are in this chunk, before its weights are drawn.

    Args:
        chunk: an unwrapped GPTModel.
        config: the engine's configuration that the chunk was built with.

    Returns:
        Names of these modules in the whole model.
    """
    wanted = frozenset(module_names.kept_in_fp32(run))
    # With tied weights a lone stage's output layer has no weight of its own, and computes with the embedding's.
    here = {module_name(chunk, path): part for path, part in chunk.named_modules()}
    for name in (found := sorted(wanted & here.keys())):
        make_island(here[name], _emits(name, here[name], config, wanted))
    return found


def module_name(chunk: torch.nn.Module, path: str) -> str:
    """A module's name in the whole model, with the layer's global number from 0."""
    return global_name(chunk, path + ".").removesuffix(".")


def _emits(name: str, module: torch.nn.Module, config: Any, kept: frozenset[str]) -> Emits | None:
    """Asked of the configuration at every call, because an fp32 evaluation changes it for a while."""
    if isinstance(module, TopKRouter):
        return None  # the gate computes in fp32 or wider by itself, and its probs are never narrow
    if name == module_names.OUTPUT_LAYER:
        return Emits(as_computed=True)  # only the loss reads logits, in fp32
    if name.endswith(".final_layernorm") and module_names.OUTPUT_LAYER in kept:
        return Emits(as_computed=True)  # nothing between the two needs the model's dtype
    if name.startswith(module_names.EMBEDDING):
        return Emits(partial(getattr, config, "pipeline_dtype"))  # it starts the residual stream
    if name.endswith("norm") and config.fp32_residual_connection:
        return Emits(partial(getattr, config, "params_dtype"))  # it reads the stream for a module of the model's dtype
    return Emits()
