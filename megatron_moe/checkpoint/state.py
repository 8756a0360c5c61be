"""What a step holds, and its two halves: the model's tensors and the optimizer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_moe.checkpoint import dist, optimizer_state
from megatron_moe.model.float16_module import Float16Module
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.precision.contract import declared_fp32_state


@dataclass(frozen=True)
class Progress:
    """How far a run has come: optimizer steps, committed or skipped, and sequences consumed.

    skipped_iterations: those that were not committed. loss_scale_raised, loss_scale_lowered: moves of fp16's scale.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    loss_scale_raised: int = 0
    loss_scale_lowered: int = 0


@dataclass(frozen=True)
class Trained:
    """Everything that training changes, held by one rank.

    model: wrapped chunks, one per virtual pipeline stage. optimizer and scheduler: the engine's.
    """

    model: Sequence[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    pg_collection: ProcessGroupCollection


def metadata(pg_collection: ProcessGroupCollection) -> dict[str, Any]:
    """How the engine is to name and shard tensors: one key per layer, independent of the layout."""
    return {**optimizer_state.FORMAT, "non_homogeneous_layers": True, "dp_cp_group": pg_collection.dp_cp}


def model_state(trained: Trained) -> dict[str, Any]:
    """The model's sharded state dict, one entry per chunk; its tensors are the live ones: loading fills them."""
    chunks = [unwrapped(chunk) for chunk in trained.model]
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    options = metadata(trained.pg_collection)
    return {name: chunk.sharded_state_dict(metadata=options) for name, chunk in zip(names, chunks)}


def fp32_state_keys(trained: Trained, state: dict[str, Any]) -> frozenset[str]:
    """Keys in `model_state` of the tensors that the model declares as fp32 state (`expert_bias`)."""
    declared = {tensor.data_ptr() for chunk in trained.model for _, tensor in declared_fp32_state(chunk)}
    return frozenset(tensor.key for tensor in dist.sharded_tensors(state) if tensor.data.data_ptr() in declared)


def put_model_state(trained: Trained, loaded: dict[str, Any]) -> None:
    """Hand loaded tensors to the chunks; every tensor of the model has to be among them."""
    for chunk, state in zip(trained.model, loaded.values()):
        unwrapped(chunk).load_state_dict(state)


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside its wrappers."""
    while isinstance(chunk, (DistributedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk


def layout(facts: RankFacts) -> dict[str, int]:
    """The sizes of the layout; random states are valid for the layout that saved them."""
    return {name: size for name, size in asdict(facts).items() if name.endswith("_size")}
