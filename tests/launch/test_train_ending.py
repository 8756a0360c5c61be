"""How ranks ended, as the launcher says it: one paragraph, and the exit status of the rank that failed first."""

import signal
from types import SimpleNamespace

from megatron_moe.io import launched
from megatron_moe_tools.launch.node_ranks import Ending, RankEnd, of_failures


def failure(status: int, timestamp: int = 0) -> SimpleNamespace:
    return SimpleNamespace(pid=100 - status, exitcode=status, timestamp=timestamp)


def test_the_rank_that_a_signal_killed_or_else_the_earliest_gives_the_status():
    assert of_failures({0: failure(1), 1: failure(-signal.SIGKILL, timestamp=5)}).status == 128 + signal.SIGKILL
    assert of_failures({0: failure(1, timestamp=7), 1: failure(3, timestamp=2)}).status == 3
    assert Ending((RankEnd(0, 7, -15),), by_signal=signal.SIGINT).status == 130  # torch has ended a slower rank


def test_the_conclusion_of_the_ranks_is_part_of_the_paragraph_and_what_was_said_is_not_said_again(tmp_path):
    (tmp_path / launched.CONCLUSION).write_text("the job of 2 ranks is ended: rank 1 is gone")
    (tmp_path / "stacks_rank_00000.txt").write_text("")
    text = Ending((RankEnd(1, 7, -9),)).text(tmp_path)
    assert "The job of 2 ranks is ended: rank 1 is gone" in text and str(tmp_path) in text
    (tmp_path / launched.REPORTED).write_text("error: x")
    ending = Ending((RankEnd(0, 7, 2),))
    assert ending.text(tmp_path) == "" and ending.status == 2
    alone = Ending(problem="the nodes did not meet")
    assert alone.text(tmp_path) == "the nodes did not meet" and alone.status == 1


def test_a_text_is_left_for_a_launcher_only(tmp_path, monkeypatch):
    monkeypatch.delenv(launched.FOLDER, raising=False)
    assert not launched.leave(launched.CONCLUSION, "x")
    monkeypatch.setenv(launched.FOLDER, str(tmp_path))
    assert launched.leave(launched.CONCLUSION, "x") and (tmp_path / launched.CONCLUSION).read_text() == "x"
    monkeypatch.setenv(launched.FOLDER, str(tmp_path / "gone"))
    assert not launched.leave(launched.CONCLUSION, "x")
