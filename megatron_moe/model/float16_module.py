"""The dtypes of a built model: modules that stay in fp32, the half-precision wrapper, and the dtype inventory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_moe.config import module_names
from megatron_moe.config.module_names import INPUT, MODEL, OWN, RESIDUAL, ROUTER, SHORT, dtype_words
from megatron_moe.config.schema import Run
from megatron_moe.engine.layers import Float16Module as EngineFloat16Module
from megatron_moe.engine.modules import DeepcopyKeepsGroups
from megatron_moe.model.initialize import global_name
from megatron_moe.platform.protocols import EngineConfig
from megatron_moe.precision.contract import (
    Emits,
    PrecisionError,
    TensorDtype,
    declared_fp32_state,
    make_island,
)


def keep_in_fp32(chunk: torch.nn.Module, run: Run, config: EngineConfig) -> None:
    """Make fp32 islands of the modules of `--keep-fp32` that are in this chunk, before its weights are drawn.

    Args:
        chunk: an unwrapped GPTModel.
        config: the engine's configuration that the chunk was built with. It is read at every pass, because an fp32
            evaluation changes it temporarily.
    """
    emits = {
        INPUT: Emits(),
        RESIDUAL: Emits(partial(getattr, config, "pipeline_dtype")),
        MODEL: Emits(partial(getattr, config, "params_dtype")),
        OWN: Emits(as_computed=True),
        ROUTER: None,
    }
    kept, parts = module_names.kept_in_fp32(run), module_names.parts(run)
    # With tied weights a lone stage's output layer has no weight of its own, and computes with the embedding's.
    here = {module_name(chunk, path): module for path, module in chunk.named_modules()}
    for name in sorted(set(kept) & here.keys()):
        make_island(here[name], emits[parts[name].emits(run, kept)])


def module_name(chunk: torch.nn.Module, path: str) -> str:
    """Return a module's name in the whole model, with the layer's global number from 0."""
    return global_name(chunk, path + ".").removesuffix(".")


class Float16Module(DeepcopyKeepsGroups, EngineFloat16Module):
    """A wrapper that casts a model's parameters to bf16 or fp16, and its inputs and outputs at the pipeline's ends.

    It is megatron-core's wrapper (so that the engine's `isinstance` tests work) with a guarantee added: state that a
    module declares in `fp32_state` (`expert_bias`, `local_tokens_per_expert`) has the same bits after wrapping as
    before.

    Args:
        config: the engine's TransformerConfig; exactly one of `fp16` and `bf16` is set.
        module: the model.

    Raises:
        PrecisionError: if any declared fp32 tensor changed its dtype or its bits, naming it.
    """

    def __init__(self, config: EngineConfig, module: torch.nn.Module) -> None:
        before = {name: _bits(tensor) for name, tensor in declared_fp32_state(module)}
        super().__init__(config, module)
        changed = []
        for name, tensor in declared_fp32_state(self.module):
            kept = tensor.dtype == torch.float32
            if kept and tensor.device.type != "meta":
                kept = torch.equal(_bits(tensor), before[name])
            if not kept:
                changed.append(f"{name} is {tensor.dtype}")
        if changed:
            raise PrecisionError(f"wrapping in Float16Module changed fp32 state: {'; '.join(changed)}")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as every torch module does; the engine's wrapper has no `assign`."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int32).clone()


_TORCH = {short: getattr(torch, name) for name, short in SHORT.items()}


def model_dtypes(run: Run, chunks: Sequence[torch.nn.Module]) -> Iterator[TensorDtype]:
    """Yield the dtype inventory: all weights, gradient buffers and declared fp32 state, with the dtypes they must have.

    Args:
        run: has the modules that are kept in fp32, the model's dtype and that of the gradients.
        chunks: model chunks at any stage: built, cast, or wrapped for data parallelism.
    """
    words, kept = dtype_words(run), module_names.kept_in_fp32(run)
    for index, chunk in enumerate(chunks):
        prefix = f"model{index}." if len(chunks) > 1 else ""
        model = chunk
        while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
            model = inner
        for name, parameter in model.named_parameters():
            is_kept = module_names.is_inside(global_name(model, name), kept)
            # A shard is the master weight; what is gathered of it has the model's dtype.
            wide = is_kept or isinstance(parameter, DTensor)
            wanted = torch.float32 if wide else _TORCH[words["model"]]
            yield TensorDtype(prefix + name, "weight", parameter.dtype, wanted)
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None:
                summed = torch.float32 if wide else _TORCH[words["gradients"]]
                yield TensorDtype(prefix + name, "accumulated gradient", gradient.dtype, summed)
        for name, tensor in declared_fp32_state(model):
            yield TensorDtype(prefix + name, "fp32 state", tensor.dtype, torch.float32)


def without_wrappers(name: str) -> str:
    """Return a tensor's name in the model itself, without the `module.` that each wrapper adds."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
