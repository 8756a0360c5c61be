"""A step is on the disk before it counts as saved, and a refusal says what is needed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_moe.checkpoint import errors, folder, publish
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


def test_a_refusal_for_want_of_room_says_how_much_is_needed_and_free(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))
    words = errors.refusal(full, tmp_path, 1_500_000_000)
    assert str(tmp_path / "x") in words and "takes 1.5 GB (1500000000 bytes)" in words
    assert f"are free at {tmp_path}" in words and " bytes) are free" in words
    assert "takes" not in errors.refusal(OSError(errno.EIO, "Input/output error", "x"), tmp_path, 1)


def test_a_step_that_is_larger_than_the_disk_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "free_bytes", lambda _: 99)
    with pytest.raises(OSError, match="not enough room") as caught:
        publish.open_hidden(tmp_path, 50, 100)
    assert caught.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []
    assert publish.open_hidden(tmp_path, 50, 99).is_dir()


def test_a_folder_that_was_moved_away_is_not_made_anew(tmp_path):
    with pytest.raises(FileNotFoundError):
        publish.open_hidden(tmp_path / "moved", 50)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_among_the_files_stops_the_publishing(tmp_path):
    hidden = publish.open_hidden(tmp_path, 50)
    entry = write_bytes(hidden / "__0_0.distcp", b"x")
    (hidden / "__1_0.distcp").write_text("nobody knows it")
    with pytest.raises(OSError, match="__1_0.distcp is not one of its files"):
        publish.publish(tmp_path, 50, {"__0_0.distcp": entry})
    absent = {"__0_0.distcp": entry, "__1_0.distcp": entry, "__2_0.distcp": entry}
    with pytest.raises(OSError, match="one folder that all ranks write to"):
        publish.publish(tmp_path, 50, absent)
    assert folder.steps(tmp_path) == []


def test_a_pointer_that_cannot_be_moved_takes_the_step_back(tmp_path, monkeypatch):
    write_step(tmp_path, 50)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(publish, "replace_text", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_step(tmp_path, 100)
    assert folder.steps(tmp_path) == [50] and (tmp_path / folder.LATEST).read_text() == "50\n"


@pytest.mark.parametrize("earlier", [True, False])
def test_a_pointer_that_is_moved_but_not_on_the_disk_is_taken_back_with_the_step(tmp_path, monkeypatch, earlier):
    if earlier:
        write_step(tmp_path, 50)
    replace_text = publish.replace_text

    def refuse(path: Path, text: str, **options: bool) -> None:
        replace_text(path, text, **options)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(publish, "replace_text", refuse)
    with pytest.raises(OSError, match="Input/output"):
        write_step(tmp_path, 100)
    assert folder.steps(tmp_path) == ([50] if earlier else [])
    assert (tmp_path / folder.LATEST).exists() == earlier
    assert not earlier or (tmp_path / folder.LATEST).read_text() == "50\n"


def test_a_step_whose_content_is_damaged_makes_way_for_a_sound_one(tmp_path):
    step = write_step(tmp_path, 50, "first")
    (step / "__0_0.distcp").write_text("First")
    assert (write_step(tmp_path, 50, "again") / "__0_0.distcp").read_text() == "again"
    assert (tmp_path / "iter_0000050.bad" / "__0_0.distcp").read_text() == "First"


@pytest.mark.parametrize(("text", "named"), [("", "nothing"), ("700\n", "700")])
def test_a_pointer_that_is_empty_or_names_no_step_is_told_and_decides_nothing(tmp_path, text, named):
    step = write_step(tmp_path, 50)
    (tmp_path / folder.LATEST).write_text(text)
    found, (note,) = folder.find_step(tmp_path, None)
    assert found == step and f"names step {named}; the newest complete step is 50" in note
    write_step(tmp_path, 100)
    assert (tmp_path / folder.LATEST).read_text() == "100\n"
