"""Seeds: derives the random streams of every rank from the seed of the run.

Weights do not depend on these streams (`model/initialize.py` has its own, by tensor); dropout does. Seeding goes
through megatron-core's random state tracker.
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

    A run that resumes at `iteration` without the random states of its ranks, because those are of another layout,
    begins new streams: those of --seed would repeat what the first iterations drew.

    Ranks that have different tokens or different layers draw differently: every pipeline stage and every rank of
    DP x CP has its own stream. Ranks of one tensor-parallel group share it, because they drop the same activations,
    and the tracker splits it where they have different ones.
    """
    facts = rank_facts()
    stream = facts.pp_rank + facts.pp_size * (facts.cp_rank + facts.cp_size * facts.dp_rank)
    seed = run.training.seed
    if iteration:
        seed = int.from_bytes(hashlib.sha256(f"{seed} {iteration}".encode()).digest()[:4], "little")
    seed += _STRIDE * stream
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
