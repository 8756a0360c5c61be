"""What all tests share: a quiet thread pool, no GPU unless asked for, and the ranks of the distributed tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# Before torch is loaded: tests run beside each other and beside gloo ranks, and spinning threads starve them all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# torch asks for the name of each address that it connects to, 127.0.0.1 too. Where a name server loses the question, a
# resolver by default waits for 5 seconds and asks again, and ranks that start then come too late for the others.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Triton decides when it is loaded whether its kernels run in its interpreter, on a CPU.
if "--gpu" not in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from packaging.requirements import Requirement

import megatron_moe  # noqa: F401  before anything imports the engine
from tests.helpers.gloo_pool import GlooPool
from tests.helpers.ranks import RankParent

LEFT_OUT = pytest.StashKey[tuple[int, int, int]]()
"""How many tests --engine-only left out by their imports, of how many files, and how many in all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-only",
        action="store_true",
        help="leave out tests marked one_engine, and files that cannot reach what differs between the two environments",
    )
    parser.addoption(
        "--gpu",
        action="store_true",
        help="run the tests marked gpu, and no others, on this machine's GPUs, which are otherwise hidden",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from this process and all that it starts, before torch is asked for them.

    The tests compare with what a CPU computes, and several workers would share the first device.
    """
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _select_by_device(config, items)
    _skip_without_triton(items)
    if config.getoption("--engine-only"):
        _select_by_engine(config, items)


def _select_by_device(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests marked `gpu` with --gpu, and all others without it."""
    wanted = config.getoption("--gpu")
    left_out = [item for item in items if (item.get_closest_marker("gpu") is not None) != wanted]
    items[:] = [item for item in items if (item.get_closest_marker("gpu") is not None) == wanted]
    config.hook.pytest_deselected(items=left_out)


def _skip_without_triton(items: list[pytest.Item]) -> None:
    """Skip the tests marked `triton` where torch comes without it; where torch requires it and it is missing they fail.

    torch's builds for CUDA require it, those for a CPU do not.
    """
    required = [Requirement(one) for one in metadata.requires("torch") or []]
    brought = any(one.name == "triton" and (one.marker is None or one.marker.evaluate()) for one in required)
    if brought or importlib.util.find_spec("triton") is not None:
        return
    for item in items:
        if item.get_closest_marker("triton") is not None:
            item.add_marker(pytest.mark.skip(reason="no Triton: this torch is a build without it"))


def _select_by_engine(config: pytest.Config, items: list[pytest.Item]) -> None:
    from tests.helpers.engine_reach import of_this_repository

    reach = of_this_repository()
    # What needs Triton was skipped in an environment without it.
    reaches = {item.path: True for item in items if item.get_closest_marker("triton") is not None}
    reaches |= {path: bool(reach.chain(path)) for path in {item.path for item in items} - reaches.keys()}
    kept = {item for item in items if reaches[item.path] and item.get_closest_marker("one_engine") is None}
    left_out = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    config.hook.pytest_deselected(items=left_out)
    files = len(reaches) - sum(reaches.values())
    config.stash[LEFT_OUT] = (sum(not reaches[item.path] for item in left_out), files, len(left_out))


def pytest_collection_finish() -> None:
    """What is loaded stays: the collector need not look through torch, the engine and transformers again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist reports what it left out; each of them collects all tests."""
    if LEFT_OUT in session.config.stash and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if (left_out := getattr(node, "workeroutput", {}).get("left_out")) is not None:
        node.config.stash[LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if LEFT_OUT in config.stash:
        tests, files, together = config.stash[LEFT_OUT]
        terminalreporter.write_line(
            f"engine-only: left out {tests} tests in {files} files that cannot reach the engine, and "
            f"{together - tests} that are marked one_engine"
        )


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


@pytest.fixture(scope="module")
def once(gloo: GlooPool) -> Callable[..., list[Any]]:
    """Return `gloo.run` that computes a case once per file: the oracle of many layouts, a checkpoint that many load.

    Cases are the same when ranks, function and arguments are. Whoever asks gets the same objects and leaves them as
    they are.
    """
    known: dict[tuple[int, str, str], list[Any]] = {}

    def run(world_size: int, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        key = (world_size, function.__qualname__, repr(sorted(kwargs.items())))
        if key not in known:
            known[key] = gloo.run(world_size, function, **kwargs)
        return known[key]

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the tests of a file only read once it is written."""
    return tmp_path_factory.mktemp("shared")


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
