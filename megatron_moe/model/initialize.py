"""Initialisation of weights, independent of layout and device.

Every tensor of the whole model has a name without the layout (global layer number, global expert number) and its own
random stream, keyed by seed and name. A rank draws the full tensor and keeps its part, so that any TP, PP, VPP, EP and
ETP, on a GPU or a CPU, start from the same model.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_moe.engine.layers import set_tensor_model_parallel_attributes
from megatron_moe.platform.protocols import EngineConfig


@dataclass(frozen=True)
class Split:
    """The split of a parameter over the tensor-parallel ranks.

    axis: the dimension that is split; None if every rank has the whole. stride: the number of blocks that are split
    separately, as the gate and up halves of a gated layer are.
    """

    axis: int | None
    stride: int = 1


_WHOLE, _ROWS, _COLUMNS = Split(None), Split(0), Split(1)

# Module -> split of its weight. One that is not listed is an error, so that no parameter is left uninitialised.
_SPLITS = {
    **dict.fromkeys("word_embeddings output_layer linear_qkv linear_q_proj linear_q_up_proj".split(), _ROWS),
    **dict.fromkeys("linear_kv_up_proj linear_fc1 eh_proj core_attention".split(), _ROWS),
    **dict.fromkeys("linear_q_down_proj linear_kv_down_proj router shared_experts".split(), _WHOLE),
    **dict.fromkeys("input_layernorm pre_mlp_layernorm final_layernorm".split(), _WHOLE),
    **dict.fromkeys("post_self_attn_layernorm post_mlp_layernorm".split(), _WHOLE),
    **dict.fromkeys("q_layernorm k_layernorm kv_layernorm enorm hnorm".split(), _WHOLE),
    "linear_proj": _COLUMNS,
    "linear_fc2": _COLUMNS,
}
_OUTPUT_PROJECTIONS = ("linear_proj", "linear_fc2")


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Return an fp32 CPU tensor from N(0, std^2) that is a function of the arguments, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # 128 bits of key: a 32-bit seed, as torch's CPU generator has, would give some of 10^5 tensors the same stream.
    generator = numpy.random.Generator(numpy.random.SFC64(int.from_bytes(digest[:16], "little")))
    drawn = generator.standard_normal(shape, dtype=numpy.float32)
    drawn *= numpy.float32(std)  # by numpy: torch's operations are not for every thread
    return torch.from_numpy(drawn)


@torch.no_grad()
def initialize_weights(chunk: torch.nn.Module, seed: int) -> None:
    """Fill all parameters of an unwrapped GPTModel chunk, and mark those that are split over TP ranks.

    Weights are normal with the configured standard deviation; projections back into the residual stream have it divided
    by sqrt(2 x layers), as Megatron-LM does. Norms are one, biases zero.
    """
    model: Any = chunk  # its configuration and groups are the engine's
    rank, ranks = model.pg_collection.tp.rank(), model.pg_collection.tp.size()
    config: EngineConfig = model.config
    std = config.init_method_std
    output_std = std / (2 * config.num_layers) ** 0.5
    for prefix, experts in _experts(chunk):
        parent = global_name(chunk, prefix + ".")
        experts.reset_parameters(
            lambda name, shape, s, parent=parent: normal(seed, parent + name, shape, s), std, output_std
        )
    parameters = dict(chunk.named_parameters())
    for name, (full_name, split) in placement(chunk).items():
        parameter = parameters[name]
        module_name, parameter_name = name.split(".")[-2:]
        _mark(parameter, split)
        if parameter_name == "bias":
            parameter.zero_()
        elif module_name.endswith("norm"):
            parameter.fill_(1.0)
        else:
            width = output_std if module_name in _OUTPUT_PROJECTIONS else std
            full = normal(seed, full_name, whole_shape(tuple(parameter.shape), split, ranks), width)
            parameter.copy_(part(full, split, rank, ranks))


def placement(chunk: torch.nn.Module) -> dict[str, tuple[str, Split]]:
    """Return parameter name in this chunk -> (its name in the whole model, its split over TP ranks).

    Routed experts are not included: they are split over EP and ETP, see `GroupedExperts`.
    """
    model: Any = chunk
    routed = tuple(f"{prefix}." for prefix, _ in _experts(chunk))
    found = {}
    for name, _ in chunk.named_parameters():
        if not name.startswith(routed):
            module_name, parameter_name = name.split(".")[-2:]
            found[name] = global_name(chunk, name), _split(module_name, parameter_name, model.config)
    return found


def global_name(chunk: torch.nn.Module, name: str) -> str:
    """Return a parameter's name in the whole model: with the layer's global number, from 0, without tied copies."""
    if chunk.share_embeddings_and_output_weights and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"  # the last stage's copy of the first stage's table
    model: Any = chunk
    layers = model.decoder.layers
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{layers[int(m[1])].layer_number - 1}.", name)


def whole_shape(shape: tuple[int, ...], split: Split, ranks: int) -> tuple[int, ...]:
    """Return the shape of the whole of which each of that many tensor-parallel ranks has a part of this shape."""
    whole = list(shape)
    if split.axis is not None:
        whole[split.axis] *= ranks
    return tuple(whole)


def part(full: Tensor, split: Split, rank: int, ranks: int) -> Tensor:
    """Return a TP rank's part of every block of the full tensor."""
    if split.axis is None or ranks == 1:
        return full
    blocks = full.chunk(split.stride, split.axis)
    return torch.cat([block.chunk(ranks, split.axis)[rank] for block in blocks], split.axis)


def _experts(chunk: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of the routed experts of each MoE layer."""
    return [(name, module) for name, module in chunk.named_modules() if name.endswith(".mlp.experts")]


def _split(module_name: str, parameter_name: str, config: EngineConfig) -> Split:
    split = _SPLITS[module_name]
    if module_name in ("q_layernorm", "k_layernorm") and not config.qk_layernorm:
        return _ROWS  # the one norm of all heads, which the engine's configuration does not have
    if parameter_name == "bias" and split == _COLUMNS:
        return _WHOLE
    gated = module_name == "linear_fc1" and config.gated_linear_unit
    return Split(split.axis, stride=2) if gated else split


def _mark(parameter: torch.nn.Parameter, split: Split) -> None:
    """Mark a split weight for the gradient norm, which would skip the parts of all TP ranks but the first.

    Megatron-core 0.16.1 marks split weights only if it initialises them itself.
    """
    if split.axis is not None and not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, split.axis, split.stride)
