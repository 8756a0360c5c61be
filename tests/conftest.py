"""What all tests share: a quiet thread pool and the ranks of the distributed tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is loaded: tests run beside each other and beside gloo ranks, and spinning threads starve them all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

import megatron_moe  # noqa: F401  before anything imports the engine


def _harness() -> Any:
    """tests/distributed/harness.py, which is no package member and therefore loaded by path."""
    path = Path(__file__).parent / "distributed" / "harness.py"
    spec = importlib.util.spec_from_file_location("distributed_harness", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["distributed_harness"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def gloo() -> Iterator[Any]:
    """The pool of gloo ranks of this worker: `gloo.run(world_size, function, **kwargs)`; see distributed/harness.py."""
    pool = _harness().GlooPool()
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
