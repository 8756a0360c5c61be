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
from megatron_moe.checkpoint import dist, sharded, step_reader
from megatron_moe.checkpoint import optimizer as optimizer_tensors
from megatron_moe.config.schema import Run
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
    return {**optimizer_tensors.FORMAT, "non_homogeneous_layers": True, "dp_cp_group": pg_collection.dp_cp}


def model_state(trained: TrainState) -> dict[str, Any]:
    """Return the model's sharded state dict, one entry per chunk; loading fills its tensors.

    They are the live ones, but for the weights of a fully sharded model in bf16 or fp16, which `put_model_state` puts
    into the shards.
    """
    names = ["model"] if len(trained.model) == 1 else [f"model{index}" for index in range(len(trained.model))]
    options = metadata(trained.pg_collection)
    return {
        name: sharded.model_state(unwrapped(chunk), options)
        if isinstance(chunk, FullyShardedDataParallel)
        else dist.model_tensors(unwrapped(chunk), options)
        for name, chunk in zip(names, trained.model)
    }


def put_model_state(trained: TrainState, loaded: dict[str, Any]) -> None:
    """Load tensors into the chunks; every tensor of the model has to be among them."""
    for chunk, state in zip(trained.model, loaded.values()):
        if isinstance(chunk, FullyShardedDataParallel):
            sharded.put_weights(unwrapped(chunk), state, metadata(trained.pg_collection))
        else:
            unwrapped(chunk).load_state_dict(state)


def optimizer_state(trained: TrainState, state: dict[str, Any], *, loading: bool) -> Any:
    """Return the optimizer's sharded state dict. Collective: a distributed optimizer gathers its shards.

    Args:
        state: what `model_state` returned.
    """
    options = metadata(trained.pg_collection)
    if (model := fully_sharded(trained)) is not None:
        return sharded.optimizer_state(model, trained.optimizer, options, loading=loading)
    return optimizer_tensors.sharded_state(trained.optimizer, state, options, loading=loading)


def put_optimizer_state(trained: TrainState, loaded: dict[Any, Any], run: Run) -> None:
    """Load main weights, moments, step count and loss scale into the optimizer."""
    if (model := fully_sharded(trained)) is not None:
        sharded.put_optimizer_state(model, trained.optimizer, loaded, metadata(trained.pg_collection))
    else:
        optimizer_tensors.load(trained.optimizer, loaded, run)


def average_state(trained: TrainState) -> dict[str, Any]:
    """Return the sharded state of the average of the weights; loading fills its tensors."""
    chunks = [unwrapped(chunk) for chunk in trained.model]
    return sharded.average_state(trained.average.weights, chunks, trained.optimizer, metadata(trained.pg_collection))


def fully_sharded(trained: TrainState) -> torch.nn.Module | None:
    """Return the model within the wrappers where its weights are spread over data-parallel ranks; it is one chunk."""
    (chunk, *_) = trained.model
    return unwrapped(chunk) if isinstance(chunk, FullyShardedDataParallel) else None


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
