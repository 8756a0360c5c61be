"""Runs that save to a local S3 and load from it: the bits of a disk, damage, two writers, and a store that fails."""

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.checkpoint import lock as writer_lock
from tests.helpers import object_store, trained_steps
from tests.helpers.object_store import Fault, ObjectStore
from tests.helpers.rows import rows
from tests.helpers.trained_steps import SMALL

RUN = {
    **SMALL,
    "num_layers": 1,
    "moe_layer_freq": "[1]",
    "train_iters": 4,
    "save_interval": 2,
    "use_distributed_optimizer": True,
}


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as store:
        yield store


def trained(flags: dict[str, Any], environment: dict[str, str]) -> str:
    """A run on this case's ranks; what it ended with, or the error."""
    from megatron_moe.checkpoint.errors import SaveError
    from megatron_moe.config.errors import ConfigError

    with object_store.in_use(environment):
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


@pytest.mark.test_all(
    instead="tests/checkpoint/test_folder_object_storage.py::test_a_damaged_step_is_found_passed_over_and_put_aside"
)
def test_damage_in_a_store_is_found_by_all_ranks_and_the_step_before_is_loaded(gloo, store):
    root = store.bucket("damage")
    flags = {**RUN, "save": str(root), "load": str(root)}
    gloo.run(2, trained, flags=flags, environment=store.environment)
    flipped = root / "iter_0000004" / "__1_0.distcp"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 4
    flipped.write_bytes(data)
    first, second = gloo.run(2, trained, flags={**flags, "ckpt_step": 4}, environment=store.environment)
    assert first == second and "__1_0.distcp does not hold what was saved" in first
    gloo.run(2, trained, flags=flags, environment=store.environment)
    assert manifest.content_defect(root / "iter_0000004", manifest.read(root / "iter_0000004").files) is None
    assert (root / "iter_0000004.bad" / "__1_0.distcp").read_bytes() == data


@pytest.mark.parametrize(
    ("file", "said"),
    rows([("__1_0.distcp", "rank 1: "), ("manifest.json", "manifest.json")], test=[("__1_0.distcp", "rank 1: ")]),
)
def test_a_save_that_the_store_refuses_stops_all_ranks_with_the_reason_and_leaves_the_step_before(
    gloo, store, file, said
):
    root = store.bucket(f"refused-{file.replace('_', '-').strip('-')}")
    flags = {**RUN, "save": str(root)}
    store.arm(Fault(what=500, times=999, only=f"PUT */iter_0000004/{file}*"))
    first, second = gloo.run(2, trained, flags=flags, environment=store.environment)
    store.disarm()
    assert first == second and first.startswith("SaveError: step 4 was not saved: ") and said in first
    assert "Internal Server Error" in first and f"earlier steps in {root} stay" in first
    assert {entry.name for entry in root.iterdir()} == {folder.OWNER, folder.LATEST, "iter_0000002"}


def test_a_store_that_fails_while_a_step_is_read_ends_the_run_and_loads_no_older_step(gloo, store):
    root = store.bucket("outage")
    flags = {**RUN, "save": str(root), "load": str(root)}
    gloo.run(2, trained, flags=flags, environment=store.environment)
    store.arm(Fault(what=503, times=999, only="GET */iter_0000004/__0_0.distcp*"))
    first, second = gloo.run(2, trained, flags={**flags, "train_iters": 6}, environment=store.environment)
    store.disarm()
    assert first == second and first.startswith("ConfigError: ") and "__0_0.distcp" in first
    assert folder.steps(root) == [2, 4] and not (root / "iter_0000004.bad").exists()


@pytest.mark.test_all(
    instead="tests/checkpoint/test_folder_object_storage.py::test_one_of_several_writers_that_start_together_gets_the_lock"
)
def test_a_second_run_is_refused(gloo, store):
    root = store.bucket("second")
    folder.claim_root(root)
    lock, _ = writer_lock.acquire(root)
    with lock:
        for text in gloo.run(2, trained, flags={**RUN, "save": str(root)}, environment=store.environment):
            assert "another job writes there" in text and "remove s3://second/run/.writer.lock" in text
    assert folder.steps(root) == []
