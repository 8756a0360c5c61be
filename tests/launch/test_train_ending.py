"""How ranks ended, as the launcher says it: one paragraph, and the exit status of the rank that failed first."""

import signal
from types import SimpleNamespace

import pytest

from megatron_moe.io import launched
from megatron_moe_tools.train import Ending, RankEnd, of_failures


def failure(status: int, timestamp: int = 0) -> SimpleNamespace:
    return SimpleNamespace(pid=100 - status, exitcode=status, timestamp=timestamp)


def test_the_rank_that_a_signal_killed_is_the_first_and_gives_the_status(tmp_path):
    ending = of_failures({0: failure(1), 1: failure(-signal.SIGKILL, timestamp=5)})
    assert ending.status == 128 + signal.SIGKILL
    text = ending.text(tmp_path)
    assert text.startswith("rank 1 on ") and "(process 109) was killed by SIGKILL" in text
    assert "rank 0 ended with status 1" in text and "\n" not in text

    # Of ranks that ended by themselves the earliest is the first.
    assert of_failures({0: failure(1, timestamp=7), 1: failure(3, timestamp=2)}).status == 3


def test_the_conclusion_of_the_ranks_is_part_of_the_paragraph_and_what_was_said_is_not_said_again(tmp_path):
    (tmp_path / launched.CONCLUSION).write_text("the job of 2 ranks is ended: rank 1 is gone")
    (tmp_path / "stacks_rank_00000.txt").write_text("")
    text = Ending((RankEnd(1, 7, -9),)).text(tmp_path)
    assert "The job of 2 ranks is ended: rank 1 is gone" in text and str(tmp_path) in text
    (tmp_path / launched.REPORTED).write_text("error: x")
    ending = Ending((RankEnd(0, 7, 2),))
    assert ending.text(tmp_path) == "" and ending.status == 2


@pytest.mark.parametrize(
    ("ending", "status", "names"),
    [
        (Ending(), 0, ""),
        (Ending((RankEnd(0, 7, 130),), by_signal=signal.SIGINT), 130, ""),
        (Ending((RankEnd(0, 7, -15),), by_signal=signal.SIGTERM), 143, "without a checkpoint"),
        (Ending(problem="the nodes did not meet"), 1, "did not meet"),
        (Ending(problem="ended by SIGTERM", by_signal=signal.SIGTERM), 143, "SIGTERM"),
    ],
)
def test_other_endings(ending, status, names, tmp_path):
    text = ending.text(tmp_path)
    assert ending.status == status and names in text and bool(text) == bool(names)


def test_a_text_is_left_for_a_launcher_only(tmp_path, monkeypatch):
    monkeypatch.delenv(launched.FOLDER, raising=False)
    assert not launched.leave(launched.CONCLUSION, "x")
    monkeypatch.setenv(launched.FOLDER, str(tmp_path))
    assert launched.leave(launched.CONCLUSION, "x") and (tmp_path / launched.CONCLUSION).read_text() == "x"
    monkeypatch.setenv(launched.FOLDER, str(tmp_path / "gone"))
    assert not launched.leave(launched.CONCLUSION, "x")
