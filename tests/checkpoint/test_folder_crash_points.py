"""A few of the crash points and refusals of `make soak`: what a save leaves when it ends in the middle."""

from collections.abc import Iterator

import pytest

from megatron_moe.checkpoint import folder
from tests.checkpoint.crash_points import KILLED, REFUSED, Fault, Trials, content, strace_is_missing, trial
from tests.checkpoint.crash_points import what_is_wrong as wrong
from tests.helpers.ranks import RankParent
from tests.helpers.rows import rows


@pytest.fixture(scope="module")
def trials(rank_parent: RankParent) -> Iterator[Trials]:
    if reason := strace_is_missing():
        pytest.skip(reason)
    with Trials(rank_parent) as trials:
        yield trials


# A save with retention renames .metadata, the step, the pointer, and the step that goes, in this order.
POINTS = [
    (Fault("rename", 2), False, 2),
    (Fault("rename", 3), True, 4),
    (Fault("unlinkat", 2), True, 4),
    (Fault("fsync", 1), False, 2),
    (Fault("rename", 3), False, 4),
    (Fault("rename", 4), False, 4),
]


@pytest.mark.parametrize(("point", "background", "newest"), rows(POINTS, test=POINTS[:3]))
def test_a_save_that_is_killed_leaves_a_whole_step_and_a_true_pointer(trials, tmp_path, point, background, newest):
    flags = {"save": str(tmp_path), "keep_last_k": 1, "async_save": background}
    assert trials.run(flags, stop_at=4, fault=point) == KILLED, trials.output()
    assert wrong(tmp_path, newest) == [] and max(folder.steps(tmp_path)) == newest


def test_a_run_that_was_killed_while_saving_goes_on_to_the_same_bits(trials, tmp_path):
    assert trials.run({"save": str(tmp_path / "undisturbed")}) == 0, trials.output()
    assert trial(trials, tmp_path / "killed", {"async_save": True}, 4, Fault("fsync", 3)) == []
    assert content(tmp_path / "killed", 6) == content(tmp_path / "undisturbed", 6)


def test_a_save_that_is_refused_by_the_system_ends_in_order(trials, tmp_path):
    point = Fault("rename", 3, "error=ENOSPC")
    assert trials.run({"save": str(tmp_path), "keep_last_k": 1}, stop_at=4, fault=point) == REFUSED, trials.output()
    assert wrong(tmp_path, 2) == [] and folder.steps(tmp_path) == [2]
    assert not list(tmp_path.glob(".iter_*")) and not (tmp_path / ".writer.lock").exists()


def test_a_file_that_grows_too_large_is_told_with_what_is_needed(trials, tmp_path):
    assert trials.run({"save": str(tmp_path)}, stop_at=4, file_limit=20_000) == REFUSED, trials.output()
    assert wrong(tmp_path, 2) == []
    for words in ("File too large", "__0_0.distcp", "the step takes", "are free at"):
        assert words in trials.output()
