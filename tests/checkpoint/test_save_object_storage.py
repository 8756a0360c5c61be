"""Runs that save to a local S3 and load from it: the bits of a disk, damage, two writers, and a store that fails."""

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.io.object_storage import ObjectPath
from tests.helpers import object_store, trained_steps
from tests.helpers.object_store import Fault, ObjectStore
from tests.helpers.trained_steps import SMALL

RUN = {**SMALL, "train_iters": 4, "save_interval": 2, "use_distributed_optimizer": True, "bf16": True}


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        object_store.use({})
        yield store


def trained(flags: dict[str, Any], environment: dict[str, str]) -> str:
    """A run on this case's ranks; what it ended with, or the error."""
    from megatron_moe.checkpoint.errors import SaveError
    from megatron_moe.config.errors import ConfigError

    object_store.use(environment)
    try:
        return str(trained_steps.trained(flags)["checkpoint"])
    except (ConfigError, SaveError) as error:
        return f"{type(error).__name__}: {error}"


def content(step: Any) -> dict[str, str]:
    """Hashes of what a step holds of the training."""
    files = manifest.read(step).files
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith((".distcp", ".pt"))}


def test_a_run_that_goes_on_from_a_store_has_the_bits_of_one_on_a_disk(gloo, store, tmp_path):
    root = store.bucket("bits")
    flags = {**RUN, "save": str(tmp_path), "load": str(tmp_path)}
    gloo.run(2, trained, flags={**flags, "train_iters": 6}, environment={})
    there = {**flags, "save": str(root), "load": str(root), "async_save": True, "keep_last_k": 1}
    for iterations in (4, 6):
        ended = gloo.run(2, trained, flags={**there, "train_iters": iterations}, environment=store.environment)
        assert ended == [f"{root}/iter_000000{iterations}"] * 2
    assert folder.steps(root) == [4, 6]  # the one that the run was loaded from stays
    assert content(root / "iter_0000006") == content(tmp_path / "iter_0000006")
    left = {entry.name for entry in root.iterdir()}
    assert left == {folder.OWNER, folder.LATEST, "iter_0000004", "iter_0000006"}
