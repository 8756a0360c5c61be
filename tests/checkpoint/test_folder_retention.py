"""Which steps go, and that a sound one is always left. No torch."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest

from megatron_moe.checkpoint import folder, publish
from tests.helpers.plain_steps import write_step

SAVED = list(range(50, 501, 50))


@pytest.mark.parametrize(
    ("keep_last_k", "save_retain_interval", "left"),
    [
        (None, None, SAVED),
        (3, None, [400, 450, 500]),
        (1, None, [500]),
        (None, 200, [200, 400, 500]),
        (2, 200, [200, 400, 450, 500]),
        (3, 150, [150, 300, 350, 400, 450, 500]),
        (99, None, SAVED),
    ],
)
def test_multiples_stay_and_of_the_others_the_last(tmp_path, keep_last_k, save_retain_interval, left):
    rule = publish.retention(keep_last_k, save_retain_interval)
    for number in SAVED:
        write_step(tmp_path, number)
        assert publish.remove_surplus(tmp_path, rule, ()) == []
    assert folder.steps(tmp_path) == left
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".iter_")]


def test_the_newest_and_protected_steps_never_go():
    for keep, every in itertools.product((None, 0, 1, 2, 5), (None, 100, 150)):
        rule = publish.Retention(keep, every)
        for number in range(1, len(SAVED) + 1):
            sound = SAVED[:number]
            going = rule.surplus(sound, {sound[0]})
            assert sound[-1] not in going and sound[0] not in going


def test_a_damaged_step_is_neither_counted_nor_removed(tmp_path):
    for number in (50, 100, 150, 200):
        write_step(tmp_path, number)
    for number in (150, 200):
        (folder.step_folder(tmp_path, number) / "manifest.json").unlink()
    publish.remove_surplus(tmp_path, publish.Retention(keep_last=1), ())
    assert folder.steps(tmp_path) == [100, 150, 200]


def test_a_later_step_that_was_passed_over_does_not_count_as_the_newest(tmp_path):
    """Its sizes are right and its content is not: a run that went back behind it must keep what it saves."""
    for number in (50, 60, 100):
        write_step(tmp_path, number)
    publish.remove_surplus(tmp_path, publish.Retention(keep_last=1), {50}, published=60)
    assert folder.steps(tmp_path) == [50, 60, 100]
    write_step(tmp_path, 70)
    publish.remove_surplus(tmp_path, publish.Retention(keep_last=1), {50}, published=70)
    assert folder.steps(tmp_path) == [50, 70, 100]


def test_a_step_is_out_of_sight_before_its_first_file_goes(tmp_path, monkeypatch):
    write_step(tmp_path, 50)
    write_step(tmp_path, 100)
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: seen.append((path.name, folder.steps(tmp_path))))
    publish.remove_surplus(tmp_path, publish.Retention(keep_last=1), ())
    assert seen[-1] == (".iter_0000050.deleting", [100])


def test_a_step_that_cannot_be_removed_is_told_and_the_save_stands(tmp_path, monkeypatch):
    write_step(tmp_path, 50)
    write_step(tmp_path, 100)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    (note,) = publish.remove_surplus(tmp_path, publish.Retention(keep_last=1), ())
    assert "step 50" in note and "Permission denied" in note
    assert folder.steps(tmp_path) == [50, 100]


def test_what_dead_writers_left_goes_and_nothing_else(tmp_path):
    write_step(tmp_path, 50)
    for name in (".iter_0000100.saving", ".iter_0000040.deleting", "iter_0000030.bad", ".cache"):
        (tmp_path / name).mkdir()
    assert publish.remove_left_behind(tmp_path) == [".iter_0000040.deleting", ".iter_0000100.saving"]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"iter_0000050", "iter_0000030.bad", ".cache"}
    assert publish.remove_left_behind(tmp_path / "missing") == []
