"""A file that is replaced is the old one or the new one, whatever happens when; several appear in order."""

import json
import os
from pathlib import Path

import pytest

from megatron_moe.io import files


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the system for the names on the disk, in order."""
    seen: list[tuple[str, str]] = []
    fsync, replace, unlink = os.fsync, os.replace, Path.unlink

    def synced(descriptor: int) -> None:
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        seen.append(("rename", str(target)))
        replace(source, target)

    def removed(path: Path, missing_ok: bool = False) -> None:
        seen.append(("unlink", str(path)))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(Path, "unlink", removed)
    return seen


@pytest.mark.parametrize("sole_writer", [False, True])
def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, calls, sole_writer):
    path = tmp_path / "summary.json"
    path.write_text("old")
    files.replace_text(path, "new", sole_writer=sole_writer)
    aside = tmp_path / (".summary.json.new" if sole_writer else f".summary.json.{os.getpid()}.new")
    assert calls == [("fsync", str(aside)), ("rename", str(path)), ("fsync", str(tmp_path))]
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_refusal_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")

    def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    if failing != "write":
        monkeypatch.setattr(os, failing, refuse)
    with pytest.raises(OSError, match="no space"), files.replacing(path, "wb") as file:
        file.write(b"half of the new one")
        if failing == "write":
            refuse()
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.bin"]


def test_what_a_killed_sole_writer_left_is_overwritten(tmp_path):
    (tmp_path / ".x.new").write_text("left behind, and longer than the new one")
    files.replace_text(tmp_path / "x", "new", sole_writer=True)
    assert (tmp_path / "x").read_text() == "new" and os.listdir(tmp_path) == ["x"]


def test_json_has_no_word_for_numbers_that_are_not_finite(tmp_path):
    content = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, 3: None}
    files.replace_json(tmp_path / "x", content)
    assert json.loads((tmp_path / "x").read_text()) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "3": None}


def test_files_that_belong_together_are_on_the_disk_before_the_first_appears_and_appear_in_order(tmp_path, calls):
    (tmp_path / "aside").mkdir()
    (tmp_path / "idx").write_text("old")
    pairs = [(tmp_path / "aside" / name, tmp_path / name) for name in ("bin", "json", "idx")]
    for source, _ in pairs:
        source.write_text("new")
    files.publish_files(pairs, [tmp_path / "idx"])
    assert calls == [
        *(("fsync", str(source)) for source, _ in pairs),
        ("unlink", str(tmp_path / "idx")),
        *(("rename", str(place)) for _, place in pairs),
        ("fsync", str(tmp_path)),
    ]
    assert [place.read_text() for _, place in pairs] == ["new"] * 3 and not os.listdir(tmp_path / "aside")
