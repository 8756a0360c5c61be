"""The state that a step holds: the model's tensors, the training's progress, and each rank's random states."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_moe import platform
from megatron_moe.checkpoint import sharded, step_reader
from megatron_moe.checkpoint.sharded import Shard
from megatron_moe.engine.layers import DistributedDataParallel, get_cuda_rng_tracker
from megatron_moe.model.float16_module import Float16Module
from megatron_moe.model.fully_sharded import FullyShardedDataParallel
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.platform.protocols import ProcessGroups


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run has come: optimizer steps, committed or skipped, and sequences consumed.

    skipped_iterations, skipped_samples: those that were not committed. loss_scale_raised, loss_scale_lowered: moves of
    fp16's scale.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    loss_scale_raised: int = 0
    loss_scale_lowered: int = 0
    skipped_samples: int = 0

    @property
    def committed_samples(self) -> int:
        """Sequences of the steps that changed the weights."""
        return self.consumed_samples - self.skipped_samples

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> TrainingProgress:
        """Return the progress in a step's state; a state before skipped_samples had equal batches, or nearly."""
        share = state["skipped_iterations"] / max(state["iteration"], 1)
        known = {"skipped_samples": round(share * state["consumed_samples"]), **state}
        return cls(**{field.name: known[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class TrainState:
    """Everything that training changes, on one rank.

    model: wrapped chunks, one per virtual pipeline stage. optimizer and scheduler: the engine's. average: the
    `WeightAverage` of `--ema-decay`.
    """

    model: Sequence[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    pg_collection: ProcessGroups
    average: Any = None


def metadata(pg_collection: ProcessGroups) -> dict[str, Any]:
    """Return how the engine is to name and shard tensors: one key per layer, independent of the layout."""
    return {"non_homogeneous_layers": True, "dp_cp_group": pg_collection.dp_cp}


def model_shards(trained: TrainState) -> list[Shard]:
    """Return this rank's shards of the model's weights and fp32 state; their tensors are the live ones."""
    chunks, options = _named(trained)
    return sharded.model_shards(chunks, options, trained.pg_collection)


def optimizer_shards(trained: TrainState) -> list[Shard]:
    """Return this rank's shards of main weights and moments, which must not be packed (`optimizer.unpacked`)."""
    chunks, options = _named(trained)
    return sharded.optimizer_shards(chunks, trained.optimizer, options, trained.pg_collection)


def average_shards(trained: TrainState) -> list[Shard]:
    """Return this rank's shards of the average of the weights."""
    chunks, options = _named(trained)
    return sharded.average_shards(trained.average.weights, chunks, trained.optimizer, options, trained.pg_collection)


def _named(trained: TrainState) -> tuple[list[torch.nn.Module], dict[str, Any]]:
    return [unwrapped(chunk) for chunk in trained.model], metadata(trained.pg_collection)


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside its wrappers."""
    while isinstance(chunk, (DistributedDataParallel, FullyShardedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk


def layout(facts: RankFacts) -> dict[str, int]:
    """Return the sizes of the layout; random states are valid for the layout that saved them."""
    return {name: size for name, size in asdict(facts).items() if name.endswith("_size")}


# Random states: one file per rank, valid for the layout that wrote it.


def path_of(step: Path, rank: int) -> Path:
    """Return the file of one rank's random states."""
    return step / "rng" / f"rank_{rank:05d}.pt"


def current() -> dict[str, Any]:
    """Return the states of Python, numpy, torch and the engine's tracker, as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": list(random.getstate()[1]),
        "python_gauss": random.getstate()[2],
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": [str(name), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }
    if platform.has_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def read(path: Path) -> dict[str, Any] | None:
    """Read the states that `current` returned when the file was written; None where that was on another kind of device.

    Raises:
        UntrustedError: the file is damaged, or holds anything but tensors and plain values.
    """
    state: dict[str, Any] = step_reader.read_file(path.parents[1], f"{path.parent.name}/{path.name}")
    return state if ("cuda" in state) == platform.has_cuda() else None


def restore(state: dict[str, Any]) -> None:
    """Restore the states of the same rank of the same layout."""
    random.setstate((3, tuple(state["python"]), state["python_gauss"]))
    name, position, has_gauss, cached = state["numpy_rest"]
    np.random.set_state((name, state["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if platform.has_cuda():
        torch.cuda.set_rng_state(state["cuda"])
