"""What all tests share: a quiet thread pool, no GPU unless asked for, and the ranks of the distributed tests."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
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

import megatron_moe  # noqa: F401  before anything imports the engine
from tests.helpers.gloo_pool import GlooPool
from tests.helpers.ranks import ROOT, RankParent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the rows marked test_all too: make test-all")
    parser.addoption("--engine", action="store_true", help="run the tests marked engine alone")
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --engine, files without the mark need not be imported: that takes longer than many of their tests."""
    if config.getoption("--engine") and collection_path.name.startswith("test_"):
        return "pytest.mark.engine" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args)
    if not named:
        require_a_row_of_each(items)
    wanted = [item for item in items if _is_wanted(config, item, every_row=named or config.getoption("--all"))]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted


def _is_wanted(config: pytest.Config, item: pytest.Item, every_row: bool) -> bool:
    def marked(name: str) -> bool:
        return item.get_closest_marker(name) is not None

    if config.getoption("--gpu") != marked("gpu"):
        return False
    if config.getoption("--engine") and not marked("engine"):
        return False
    return every_row or not marked("test_all")


def require_a_row_of_each(items: list[pytest.Item]) -> None:
    """Refuse a mark that hides a whole test: `make test` runs a row of each, or the test that the mark names instead.

    Without this, a red test could be marked until it is no longer seen.
    """
    seen: dict[str, bool] = {}
    instead: dict[str, str | None] = {}
    for item in items:
        test, mark = item.nodeid.partition("[")[0], item.get_closest_marker("test_all")
        seen[test] = seen.get(test, False) or mark is None
        if mark is not None:
            instead[test] = mark.kwargs.get("instead")
    for test in (test for test, is_seen in seen.items() if not is_seen):
        other = instead[test]
        if other is None:
            raise pytest.UsageError(f"{test}: test_all marks each of its rows and names no test that stands for them")
        if seen.get(other) is False or (other not in seen and not (ROOT / other.partition("::")[0]).is_file()):
            raise pytest.UsageError(f"{test}: make test does not run {other}, which test_all names instead")


def pytest_collection_finish() -> None:
    """What is loaded stays: the collector need not look through torch, the engine and transformers again and again."""
    gc.collect()
    gc.freeze()


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
