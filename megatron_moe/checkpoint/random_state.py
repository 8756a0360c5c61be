"""Random states: one file per rank, valid for the layout that wrote it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_moe import platform
from megatron_moe.checkpoint import pickles


def path_of(step: Path, rank: int) -> Path:
    """The file of one rank."""
    return step / "rng" / f"rank_{rank:05d}.pt"


def current() -> dict[str, Any]:
    """The states of Python, numpy, torch and the engine's model-parallel tracker, as tensors and plain values."""
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


def read(path: Path) -> dict[str, Any]:
    """What `current` gave when it was written; changes nothing.

    Raises:
        UntrustedError: the file is damaged, or holds anything but tensors and plain values.
    """
    return pickles.read_file(path.parents[1], f"{path.parent.name}/{path.name}")


def restore(state: dict[str, Any]) -> None:
    """Put the states of the same rank of the same layout back."""
    random.setstate((3, tuple(state["python"]), state["python_gauss"]))
    name, position, has_gauss, cached = state["numpy_rest"]
    np.random.set_state((name, state["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if platform.has_cuda():
        torch.cuda.set_rng_state(state["cuda"])
