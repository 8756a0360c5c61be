"""`--keep-fp32` in the built model: which modules of a chunk become fp32 islands, and what each of them emits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron_moe.config import module_names
from megatron_moe.config.schema import Run
from megatron_moe.model.initialize import global_name
from megatron_moe.moe.router import TopKRouter
from megatron_moe.precision.islands import Emits, make_island


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
