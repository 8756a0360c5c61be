"""One job per folder: who is refused, who is taken over, and who finds out. No torch."""

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_moe.checkpoint import lock as writer_lock
from megatron_moe.checkpoint.lock import LostLockError, acquire
from megatron_moe.config.errors import ConfigError


@pytest.fixture
def me() -> writer_lock.LockOwner:
    return writer_lock._me()


def put(root: Path, holder: writer_lock.LockOwner, minutes_ago: float = 0) -> None:
    path = root / writer_lock.NAME
    path.write_text(json.dumps(asdict(holder)))
    then = time.time() - 60 * minutes_ago
    os.utime(path, (then, then))


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def taken_over(root: Path) -> str:
    """What a job is told that takes a lock over, and gives it back."""
    lock, (note,) = acquire(root)
    lock.check()
    lock.release()
    assert left(root) == []
    return note


def test_a_second_job_is_refused_with_the_first_ones_name(tmp_path):
    with acquire(tmp_path)[0]:
        with pytest.raises(ConfigError) as error:
            acquire(tmp_path)
        for words in (f"--save {tmp_path}", f"process {os.getpid()} on ", "Save to another folder", "remove "):
            assert words in str(error.value)
        assert left(tmp_path) == [writer_lock.NAME]
    assert left(tmp_path) == []


def test_a_lock_of_a_dead_process_of_this_host_is_taken_over_and_said(tmp_path, me):
    child = os.fork()
    if child == 0:
        acquire(tmp_path)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert left(tmp_path) == [writer_lock.NAME]
    note = taken_over(tmp_path)
    assert "took over" in note and "that process is dead" in note
    # a process number that was given again is another process
    put(tmp_path, replace(me, started=me.started - 1, token="other"))
    assert "dead" in taken_over(tmp_path)


def test_another_host_is_believed_alive_until_its_heart_has_stopped_for_long(tmp_path, me):
    away = replace(me, host="far", boot="other", token="other")
    put(tmp_path, away, minutes_ago=writer_lock.STALE_MINUTES - 1)
    with pytest.raises(ConfigError, match=r"on far.*lapses 5 minutes"):
        acquire(tmp_path)
    put(tmp_path, away, minutes_ago=writer_lock.STALE_MINUTES + 1)
    assert "no sign of life for 6 minutes" in taken_over(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"boot": "before"}, "the host was started again"),
        ({"namespace": "pid:[1]"}, None),  # another container: its processes are not to be seen
        ({"host": "far", "job": "7", "restarts": 0}, "the same job was requeued"),
        ({"host": "far", "job": "7", "restarts": 1}, None),  # another step of the very same job
        ({"host": "far", "job": "8", "restarts": 0}, None),
    ],
)
def test_who_is_taken_for_dead_without_waiting(tmp_path, me, monkeypatch, change, said):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    put(tmp_path, replace(me, token="other", **change))
    if said is None:
        with pytest.raises(ConfigError, match="another job writes there"):
            acquire(tmp_path)
    else:
        assert said in taken_over(tmp_path)


def test_a_clock_that_goes_back_does_not_make_a_living_job_look_dead(tmp_path, me, monkeypatch):
    put(tmp_path, replace(me, host="far", token="other"), minutes_ago=-60 * 24)
    with pytest.raises(ConfigError, match="another job writes there"):
        acquire(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(writer_lock, "HEARTBEAT_SECONDS", 0.01)
    (tmp_path / writer_lock.NAME).unlink()
    with acquire(tmp_path)[0] as lock:
        lock.check()


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_lock, "HEARTBEAT_SECONDS", 0.01)
    path = tmp_path / writer_lock.NAME
    with acquire(tmp_path)[0]:
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 60
        while path.stat().st_mtime < 1000:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_lock_that_is_no_lock_is_one_until_it_is_old(tmp_path):
    path = tmp_path / writer_lock.NAME
    path.touch()
    with pytest.raises(ConfigError, match="an unknown one"):
        acquire(tmp_path)
    os.utime(path, (1, 1))
    assert "unknown job" in taken_over(tmp_path)


def test_a_job_that_was_taken_over_or_whose_folder_is_gone_finds_out(tmp_path, me):
    root = tmp_path / "a"
    root.mkdir()
    lock, _ = acquire(root)
    put(root, replace(me, host="far", token="other"))
    with pytest.raises(LostLockError, match="taken over by process"):
        lock.check()
    lock.release()
    assert left(root) == [writer_lock.NAME]
    (root / writer_lock.NAME).unlink()
    lock, _ = acquire(root)
    (root / writer_lock.NAME).unlink()
    with pytest.raises(LostLockError, match="is gone: somebody removed it"):
        lock.check()
    shutil.move(root, tmp_path / "b")
    with pytest.raises(LostLockError, match="moved or deleted"):
        lock.check()
    lock.release()


def test_what_killed_jobs_left_beside_the_lock_is_removed_and_a_living_rival_tries_again(tmp_path, monkeypatch):
    for name, content in (("before it wrote", ""), ("before its link", json.dumps(asdict(writer_lock._me())))):
        (tmp_path / f"{writer_lock.NAME}.{name}").write_text(content)
    link, times = os.link, []

    def link_of_a_rival(aside: Path, path: Path) -> None:
        times.append(aside)
        if len(times) == 1:
            aside.unlink()
        link(aside, path)

    monkeypatch.setattr(os, "link", link_of_a_rival)
    with acquire(tmp_path)[0] as lock:
        lock.check()
        assert left(tmp_path) == [writer_lock.NAME]
        assert len(times) == 2


def test_of_many_that_take_over_at_once_one_wins(tmp_path, me):
    together = threading.Barrier(8)

    def compete(_: int) -> writer_lock.WriterLock | None:
        together.wait()
        try:
            return acquire(tmp_path)[0]
        except ConfigError:
            return None

    for _ in range(6):
        put(tmp_path, replace(me, started=1, token="dead"))
        with ThreadPoolExecutor(8) as rivals:
            (won,) = filter(None, rivals.map(compete, range(8)))
        won.check()
        won.release()
        assert left(tmp_path) == []
