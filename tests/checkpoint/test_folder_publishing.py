"""A step is on the disk before it counts as saved; which steps go then, and that a sound one is always left."""

import errno
import itertools
import os
import shutil
from pathlib import Path

import pytest

from megatron_moe.checkpoint import folder
from megatron_moe.io.files import write_bytes
from tests.helpers.plain_steps import write_step


def test_a_file_is_on_the_disk_before_it_counts_as_written(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    write_step(tmp_path, 50)
    hidden = str(tmp_path / ".iter_0000050.saving")
    for name in ("__0_0.distcp", "rng/rank_00000.pt", "config.json", "state.json", "manifest.json", "rng", ""):
        assert f"{hidden}/{name}".rstrip("/") in synced, name
    assert synced.index(hidden) < synced.index(str(tmp_path)) < len(synced) - 1
    assert synced[-2:] == [str(tmp_path / f".{folder.LATEST}.new"), str(tmp_path)]


def test_a_step_that_is_larger_than_the_disk_or_of_a_folder_that_was_moved_away_is_not_begun(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        folder.open_hidden(tmp_path / "moved", 50)
    monkeypatch.setattr(folder, "free_bytes", lambda _: 99)
    with pytest.raises(OSError, match="not enough room") as caught:
        folder.open_hidden(tmp_path, 50, 100)
    assert caught.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []
    assert folder.open_hidden(tmp_path, 50, 99).is_dir()


def test_what_is_not_among_the_files_stops_the_publishing(tmp_path):
    hidden = folder.open_hidden(tmp_path, 50)
    entry = write_bytes(hidden / "__0_0.distcp", b"x")
    (hidden / "__1_0.distcp").write_text("nobody knows it")
    with pytest.raises(OSError, match="__1_0.distcp is not one of its files"):
        folder.publish(tmp_path, 50, {"__0_0.distcp": entry})
    absent = {"__0_0.distcp": entry, "__1_0.distcp": entry, "__2_0.distcp": entry}
    with pytest.raises(OSError, match="one folder that all ranks write to"):
        folder.publish(tmp_path, 50, absent)
    assert folder.steps(tmp_path) == []


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("moved", [True, False], ids=["moved", "not moved"])
def test_a_pointer_that_cannot_be_moved_or_is_not_on_the_disk_takes_the_step_back(
    tmp_path, monkeypatch, moved, earlier
):
    if earlier:
        write_step(tmp_path, 50)
    replace_text = folder.replace_text

    def refuse(path: Path, text: str, **options: bool) -> None:
        if moved:
            replace_text(path, text, **options)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder, "replace_text", refuse)
    with pytest.raises(OSError, match="Input/output"):
        write_step(tmp_path, 100)
    pointer = tmp_path / folder.LATEST
    assert folder.steps(tmp_path) == ([50] if earlier else [])
    assert pointer.read_text() == "50\n" if earlier else not pointer.exists()


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_damaged_or_incomplete_step_is_put_aside_for_a_sound_one(tmp_path, is_complete):
    step = write_step(tmp_path, 50, "first")
    (step / "__0_0.distcp").write_text("First")
    if not is_complete:
        (step / folder.MANIFEST).unlink()
    assert (write_step(tmp_path, 50, "again") / "__0_0.distcp").read_text() == "again"
    assert (tmp_path / "iter_0000050.bad" / "__0_0.distcp").read_text() == "First"


# ---- which steps go

SAVED = list(range(50, 501, 50))


@pytest.mark.parametrize(
    ("keep_last_k", "save_retain_interval", "left"),
    [
        (None, None, SAVED),
        (1, None, [500]),
        (None, 200, [200, 400, 500]),
        (3, 150, [150, 300, 350, 400, 450, 500]),
        (99, None, SAVED),
    ],
)
def test_multiples_stay_and_of_the_others_the_last(tmp_path, keep_last_k, save_retain_interval, left):
    rule = folder.retention(keep_last_k, save_retain_interval)
    for number in SAVED:
        write_step(tmp_path, number)
        assert folder.remove_surplus(tmp_path, rule, ()) == []
    assert folder.steps(tmp_path) == left
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".iter_")]


def test_the_newest_and_protected_steps_never_go():
    for keep, every in itertools.product((None, 0, 1, 2, 5), (None, 100, 150)):
        rule = folder.Retention(keep, every)
        for number in range(1, len(SAVED) + 1):
            sound = SAVED[:number]
            going = rule.surplus(sound, {sound[0]})
            assert sound[-1] not in going and sound[0] not in going


def test_a_damaged_step_is_neither_counted_nor_removed(tmp_path):
    for number in (50, 100, 150, 200):
        write_step(tmp_path, number)
    for number in (150, 200):
        (folder.step_folder(tmp_path, number) / "manifest.json").unlink()
    folder.remove_surplus(tmp_path, folder.Retention(keep_last=1), ())
    assert folder.steps(tmp_path) == [100, 150, 200]


def test_a_later_step_that_was_passed_over_does_not_count_as_the_newest(tmp_path):
    """Its sizes are right and its content is not: a run that went back behind it must keep what it saves."""
    for number in (50, 60, 100):
        write_step(tmp_path, number)
    folder.remove_surplus(tmp_path, folder.Retention(keep_last=1), {50}, published=60)
    assert folder.steps(tmp_path) == [50, 60, 100]
    write_step(tmp_path, 70)
    folder.remove_surplus(tmp_path, folder.Retention(keep_last=1), {50}, published=70)
    assert folder.steps(tmp_path) == [50, 70, 100]


def test_a_step_is_out_of_sight_before_its_first_file_goes_and_stays_where_it_cannot(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    for number in (50, 100):
        write_step(tmp_path, number)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        (note,) = folder.remove_surplus(tmp_path, folder.Retention(keep_last=1), ())
    assert "step 50" in note and "Permission denied" in note
    assert folder.steps(tmp_path) == [50, 100]
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: seen.append((path.name, folder.steps(tmp_path))))
    folder.remove_surplus(tmp_path, folder.Retention(keep_last=1), ())
    assert seen[-1] == (".iter_0000050.deleting", [100])


def test_what_dead_writers_left_goes_and_nothing_else(tmp_path):
    write_step(tmp_path, 50)
    for name in (".iter_0000100.saving", ".iter_0000040.deleting", "iter_0000030.bad", ".cache"):
        (tmp_path / name).mkdir()
    assert folder.remove_left_behind(tmp_path) == [".iter_0000040.deleting", ".iter_0000100.saving"]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"iter_0000050", "iter_0000030.bad", ".cache"}
    assert folder.remove_left_behind(tmp_path / "missing") == []
