"""What all tests share: a quiet thread pool and the ranks of the distributed tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Before torch is loaded: tests run beside each other and beside gloo ranks, and spinning threads starve them all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

import megatron_moe  # noqa: F401  before anything imports the engine
from tests.helpers.gloo_pool import GlooPool
from tests.helpers.ranks import RankParent


@pytest.fixture(scope="session")
def rank_parent() -> Iterator[RankParent]:
    """The process of this worker that forks ranks."""
    parent = RankParent()
    yield parent
    parent.close()


@pytest.fixture(scope="session")
def gloo(rank_parent: RankParent) -> Iterator[GlooPool]:
    """The pool of gloo ranks of this worker: `gloo.run(world_size, function, **kwargs)`; see helpers/gloo_pool.py."""
    pool = GlooPool(rank_parent)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_loss_scale_is_left_behind() -> Iterator[None]:
    """The engine keeps the scale of auxiliary losses in a class, where the next test in this process would meet it."""
    yield
    if (engine := sys.modules.get("megatron.core.transformer.moe.moe_utils")) is not None:
        engine.MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.fixture
def one_process() -> Iterator[None]:
    """No process group is left behind by a test that builds the groups of one process."""
    yield
    from megatron_moe.parallel import groups

    groups.destroy()
