"""Seeds: one number of the user's, a stream for every place that draws.

Weights do not depend on these streams (`model/initialize.py` has its own, by tensor); dropout does. The door to
megatron-core's random state tracker.
"""

from __future__ import annotations

import hashlib
import random

import numpy
import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_moe.config.schema import Run
from megatron_moe.parallel.groups import rank_facts

# The engine adds at most a few thousand for TP, EP and ETP ranks; streams this far apart cannot meet.
_STRIDE = 1 << 16


def seed_everything(run: Run, iteration: int = 0) -> None:
    """Seed Python, NumPy, torch and the engine's tracker for this rank, after `groups.initialize`.

    A run that goes on from `iteration` without the states of its ranks, because they were those of another layout,
    begins streams of their own: those of --seed would draw once more what the first iterations drew.

    Ranks that hold different tokens or different layers draw differently: every pipeline stage and every rank of
    DP x CP has its own stream. Ranks of one tensor-parallel group share it, because they drop the same activations,
    and the tracker splits it where they hold different ones.
    """
    facts = rank_facts()
    place = facts.pp_rank + facts.pp_size * (facts.cp_rank + facts.cp_size * facts.dp_rank)
    seed = run.training.seed
    if iteration:
        seed = int.from_bytes(hashlib.sha256(f"{seed} {iteration}".encode()).digest()[:4], "little")
    seed += _STRIDE * place
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
