"""Steps in an object store: published by the manifest, and whole after a kill or a refusal at any request. No torch."""

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.checkpoint import lock as writer_lock
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import remove_tree, write_bytes
from megatron_moe.io.object_storage import ObjectPath, StoreError, location
from tests.helpers.object_store import KILL, LATE, Fault, ObjectStore, in_a_fork
from tests.helpers.plain_steps import write_step
from tests.helpers.rows import rows


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_lock, "RIVALS_SECONDS", 0.0)
        yield store


@pytest.fixture
def root(request) -> Iterator[ObjectPath]:
    """A folder in this process's memory."""
    place = location(f"memory://{request.node.name.partition('[')[0]}/run")
    yield place
    remove_tree(place)


def names(root: ObjectPath) -> set[str]:
    return {entry.name for entry in root.iterdir()}


# ---- one process


def test_a_step_is_there_when_its_manifest_is_and_gone_when_that_is(root, monkeypatch):
    seen: list[tuple[str, list[int]]] = []
    call = ObjectPath._call

    def noted(self: ObjectPath, method: str, *args: Any, **options: Any) -> Any:
        result = call(self, method, *args, **options)
        if method in ("pipe_file", "open", "rm_file", "rm"):
            with monkeypatch.context() as patch:
                patch.setattr(ObjectPath, "_call", call)
                seen.append((f"{method} {self.name}", folder.steps(root)))
        return result

    monkeypatch.setattr(ObjectPath, "_call", noted)
    write_step(root, 50)
    order = [what for what, _ in seen]
    at = order.index(f"open {folder.MANIFEST}")
    assert all(there == [] for _, there in seen[:at]) and order[at + 1 :] == [f"pipe_file {folder.LATEST}"]
    assert seen[-1][1] == [50] and manifest.structure_defect(root / "iter_0000050") is None
    seen.clear()
    folder.remove_step(root / "iter_0000050")
    assert seen == [(f"rm_file {folder.MANIFEST}", []), ("rm iter_0000050", [])]


def test_which_steps_go_and_what_dead_writers_left(root):
    for number in (50, 100, 150):
        write_step(root, number)
        assert folder.remove_surplus(root, folder.Retention(keep_last=2), ()) == []
    assert folder.steps(root) == [100, 150]
    write_bytes(root / "iter_0000200" / "__0_0.distcp", b"torn")
    assert folder.find_step(root, None) == (root / "iter_0000150", [])
    assert folder.remove_left_behind(root) == ["iter_0000200"]
    assert names(root) == {folder.LATEST, "iter_0000100", "iter_0000150"}
    folder.discard(root, 150)  # it is published, so that it is not what a failed save left
    with pytest.raises(FileExistsError, match="never overwritten"):
        folder.open_hidden(root, 150)
    assert folder.steps(root) == [100, 150]


def test_a_damaged_step_is_found_passed_over_and_put_aside(root):
    for number in (50, 100):
        write_step(root, number)
    flipped = root / "iter_0000100" / "state.json"
    flipped.write_bytes(flipped.read_bytes().replace(b"1", b"3"))
    step, notes = folder.find_step(root, None)
    assert step == root / "iter_0000050" and "state.json does not hold what was saved" in notes[0]
    with pytest.raises(ConfigError, match="other complete steps: 50"):
        folder.find_step(root, 100)
    write_step(root, 100, "again")
    assert folder.find_step(root, None)[0] == root / "iter_0000100"
    assert (root / "iter_0000100.bad" / "__0_0.distcp").read_text() == "weights"


def test_a_store_that_fails_is_no_damage_and_no_empty_folder(root, monkeypatch):
    """Else a run would go back to an older step, or begin anew."""
    for number in (50, 100):
        write_step(root, number)
    real = type(root._store).cat_file

    def failing(store: Any, path: str, *args: Any, **options: Any) -> bytes:
        if "iter_0000100" in path:
            raise ConnectionError("reset by peer")
        return real(store, path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(root._store), "cat_file", failing)
        with pytest.raises(StoreError, match="reset by peer"):
            folder.find_step(root, None)
        with pytest.raises(StoreError, match="reset by peer"):
            manifest.content_defect(root / "iter_0000100", ["state.json"])
        assert "were not removed" in folder.remove_surplus(root, folder.Retention(keep_last=1), ())[0]
    assert folder.steps(root) == [50, 100]


# ---- two processes and a server


def save_the_second(root: ObjectPath) -> None:
    """What a run does to the folder when it saves step 100, keeps one step, and ends."""
    writer_lock.RIVALS_SECONDS = 0.0
    lock, _ = writer_lock.acquire(root)
    folder.claim_root(root)
    folder.remove_left_behind(root)
    lock.check()
    try:
        write_step(root, 100)
        folder.remove_surplus(root, folder.Retention(keep_last=1), ())
    except OSError:
        folder.discard(root, 100)
        raise
    finally:
        lock.release()


def what_is_wrong(root: ObjectPath, status: int) -> list[str]:
    """What is wrong with what is left, and after the next run of the same command."""
    wrong = []
    step, notes = folder.find_step(root, None)
    pointer = (root / folder.LATEST).read_text().strip()
    if step is None or manifest.content_defect(step, manifest.read(step).files):
        wrong.append(f"{step} is not whole")
    elif notes and not (step.name == "iter_0000100" and pointer == "50"):  # ended between the step and its pointer
        wrong.append(f"{notes}")
    if status == 0 and step != root / "iter_0000100":  # older ones that could not be removed are told, and stay
        wrong.append(f"it ended well and left {folder.steps(root)}")
    lock, _ = writer_lock.acquire(root)
    with lock:
        folder.remove_left_behind(root)
        if 100 not in folder.steps(root):
            write_step(root, 100)
        folder.remove_surplus(root, folder.Retention(keep_last=1), ())
    if (left := names(root) - {folder.OWNER, folder.LATEST}) != {"iter_0000100"}:
        wrong.append(f"left at the end: {left}")
    if manifest.content_defect(root / "iter_0000100", manifest.read(root / "iter_0000100").files):
        wrong.append("the last step is not whole")
    return wrong


def trial(store: ObjectStore, fault: Fault) -> tuple[int, list[str]]:
    """A save to which a fault happens, after an undisturbed one; its status, and what is wrong afterwards."""
    root = store.bucket(f"trial-{uuid.uuid4().hex}")
    folder.claim_root(root)
    write_step(root, 50)
    status = in_a_fork(store, lambda: save_the_second(root), fault)
    if fault.only != "*" and status == 3 and folder.steps(root) != [50]:
        return status, ["a step that was told not to be saved is there"]
    return status, [f"{fault}: {words}" for words in what_is_wrong(root, status)]


FAULTS = {
    "killed": [
        Fault(only="PUT */state.json*"),
        Fault(only="PUT */manifest.json*"),
        Fault(only="PUT */manifest.json*", carried_out=True),
        Fault(only="DELETE */iter_0000050/manifest.json*", carried_out=True),
    ],
    "killed at every request": [Fault(number, KILL, done) for number in range(99) for done in (False, True)],
    "refused once": [
        Fault(what=500, only="PUT */.writer.lock[?]*", carried_out=True),
        Fault(what=503, only="PUT */manifest.json*"),
    ],
    "every request refused once": [Fault(number, 503, done) for number in range(99) for done in (False, True)],
    "refused": [Fault(what=500, carried_out=True, times=999, only="PUT */manifest.json*")],
    "every request refused from one on": [Fault(number, 500, times=999) for number in range(99)],
}
STATUS = {"killed": {-9}, "refused once": {0}, "every request refused once": {0}, "refused": {3}}
STATUS["killed at every request"] = {-9, 0}
STATUS["every request refused from one on"] = {3, 0}


@pytest.mark.parametrize("kind", rows(FAULTS, test=["killed", "refused"]))
def test_a_save_that_ends_at_any_request_leaves_a_whole_step(store, kind):
    seen: dict[int, int] = {}
    for fault in FAULTS[kind]:
        status, wrong = trial(store, fault)
        assert wrong == [] and status in STATUS[kind], (fault, status)
        seen[status] = seen.get(status, 0) + 1
        if "every" in kind and fault.number >= store.asked:  # the save makes no more requests
            break
    print(kind, seen)
    assert set(seen) == STATUS[kind]


def test_a_request_that_is_not_answered_in_time_ends_in_an_error(store, monkeypatch):
    root = store.bucket("late")

    def save() -> None:
        import fsspec

        fsspec.config.conf["s3"] = {"config_kwargs": {"read_timeout": 0.3}, "retries": 1}
        save_the_second(root)

    folder.claim_root(root)
    write_step(root, 50)
    assert in_a_fork(store, save, Fault(what=LATE, times=999, only="PUT */config.json*")) == 3
    assert folder.steps(root) == [50] and names(root) == {folder.OWNER, folder.LATEST, "iter_0000050"}


# ---- two writers


def taken(root: ObjectPath) -> None:
    """Take the lock and keep it until the process ends."""
    writer_lock.acquire(root)


def test_one_of_several_writers_that_start_together_gets_the_lock(store):
    root = store.bucket("rivals")
    folder.claim_root(root)
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: outcome(root), range(4)))
    assert sorted(outcomes) == ["another job writes there"] * 3 + ["got it"]


def outcome(root: ObjectPath) -> str:
    try:
        writer_lock.acquire(root)
    except ConfigError as error:
        return "another job writes there" if "another job writes there" in str(error) else str(error)
    return "got it"


def test_a_dead_writers_lock_is_taken_over_and_a_living_ones_is_not(store, monkeypatch):
    root = store.bucket("dead")
    folder.claim_root(root)
    assert in_a_fork(store, lambda: taken(root)) == 0  # it ends without giving the lock back
    lock, (note,) = writer_lock.acquire(root)
    assert "that process is dead" in note
    lock.check()
    assert in_a_fork(store, lambda: taken(root)) == 4  # ConfigError
    away = replace(writer_lock._me(), host="far", boot="other", token="other")
    (root / writer_lock.NAME).write_bytes(writer_lock._content(away))
    with pytest.raises(writer_lock.LostLockError, match="taken over by process .* on far"):
        lock.check()
    lock.release()
    with pytest.raises(ConfigError, match="on far"):
        writer_lock.acquire(root)
    monkeypatch.setattr(writer_lock, "STALE_MINUTES", -1.0)  # by the store's clock
    lock, (note,) = writer_lock.acquire(root)
    assert "no sign of life" in note
    lock.release()
    assert names(root) == {folder.OWNER}


def test_the_heart_beats_in_a_store(store, monkeypatch):
    root = store.bucket("heart")
    folder.claim_root(root)
    monkeypatch.setattr(writer_lock, "HEARTBEAT_SECONDS", 0.05)
    with writer_lock.acquire(root)[0] as lock:
        store.arm()
        deadline = time.monotonic() + 60
        while not any(request.startswith("PUT") and writer_lock.NAME in request for request in store.requests):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        lock.check()
    assert names(root) == {folder.OWNER}
