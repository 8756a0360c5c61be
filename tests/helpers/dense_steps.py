"""Steps of models with random weights, written without a run: what upcycling and changes of experts are made of."""

from pathlib import Path
from typing import Any

import torch

from megatron_moe.config.schema import build
from megatron_moe.hf.family import DEEPSEEK
from megatron_moe.hf.mapping import mapping
from megatron_moe_tools.convert.native import MemorySource, NativeSink
from megatron_moe_tools.convert.pipeline import convert
from megatron_moe_tools.convert.workspace import Workspace

SIZES: dict[str, Any] = {  # without a length, as of a folder that was converted
    "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "vocab_size": 131,
    "max_position_embeddings": 64, "group_query_attention": True, "num_query_groups": 2,
    "make_vocab_size_divisible_by": 64,
}  # fmt: skip


def step_of(path: Path, *, seed: int = 0, **settings: Any) -> Path:
    """Write a step of a model with weights whose outputs are of size one; its folder."""
    run = build({**SIZES, **settings})
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if run.precision.bf16 else torch.float32
    tensors = {}
    for key, shape in mapping(run, DEEPSEEK).shapes.items():
        values = torch.randn(shape, generator=generator)
        if "norm" in key:
            values = 1 + 0.25 * values
        elif key.endswith("expert_bias"):
            values *= 0.05
        elif not key.endswith("bias"):
            values *= shape[-1] ** -0.5
        tensors[key] = values if key.endswith("expert_bias") else values.to(dtype)
    sink = NativeSink(MemorySource(run, tensors, {}, None))
    workspace = Workspace(path, sink.identity())
    with workspace.open():
        convert(sink, workspace)
        workspace.publish()
    return path
