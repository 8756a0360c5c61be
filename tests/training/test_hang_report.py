"""The report on a hang names the rank that did not join a collective or waits for its device, and is never held up.

Records of NCCL's flight recorder are those of torch's dump (version 2.10), cut down to what a rank has in it after a
few steps. A rank that reads from the device is told from one that works by the instruction in which its thread stands.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.training import hang_report
from megatron_moe.training.hang_report import GroupProgress, RankStatus, behind, diagnose, progress, within
from tests.helpers.ranks import Child, RankParent
from tests.training.watched_job import hold_the_interpreter

WORLD, TP, DP = ("0", "default_pg", [0, 1, 2, 3]), ("1", "TENSOR_MODEL_PARALLEL_GROUP", [0, 1]), ("7", "dp", [0, 2])


def entry(group: tuple, number: int, **other: Any) -> dict[str, Any]:
    return {
        "pg_id": int(group[0]), "process_group": [group[0], group[1]], "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[8]], "input_dtypes": ["Float"], "state": "completed",
        "is_p2p": False, **other,
    }  # fmt: skip


def dump(*groups: tuple[tuple, int, int], last: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A rank's record: for each group, how many collectives it has begun and how many have ended there."""
    waiting = {"state": "scheduled", **(last or {})}
    record: dict[str, Any] = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}
    for group, begun, ended in groups:
        name, about, ranks = group
        record["pg_config"][name] = {"name": name, "desc": about, "ranks": str(ranks)}
        numbers = {"last_enqueued_collective": str(begun), "last_completed_collective": str(ended)}
        record["pg_status"][name] = numbers
        for number in range(max(1, begun - 3), begun + 1):
            record["entries"].append(entry(group, number, **(waiting if number > ended else {})))
    return {**record, **changes}


def test_a_ranks_record_is_read():
    sent = entry(WORLD, 99, is_p2p=True)
    record = dump((WORLD, 37, 36), (TP, 5, 5), (("9", "one", [0]), 3, 2))
    record["entries"].append(sent)
    assert progress(record) == (
        GroupProgress("0", "default_pg", (0, 1, 2, 3), 37, 36, "all_reduce of Float[8]"),
        GroupProgress("1", "TENSOR_MODEL_PARALLEL_GROUP", (0, 1), 5, 5, None),
    )
    without = dump((WORLD, 37, 36), pg_status={})
    assert progress(without)[0] == progress(record)[0]
    # With the recorder off there are numbers alone.
    off = dump((WORLD, 37, 36), entries=[], pg_status={"0": {"last_enqueued_collective": 37}})
    assert progress(off) == (GroupProgress("0", "default_pg", (0, 1, 2, 3), 37, None, None),)
    # The number of the last one that has ended may be behind what is known of each.
    behind_itself = dump((WORLD, 37, 37))
    behind_itself["pg_status"]["0"]["last_completed_collective"] = "36"
    assert progress(behind_itself)[0].ended == 37
    # An earlier group of the same name has come further.
    record["entries"][:0] = [entry(("0", "of an earlier run"), 1000)]
    assert progress(record)[0].begun == 37
    # Nothing has ended yet, and one that has been lost from the ring.
    assert progress(dump((WORLD, 2, -1)))[0].ended == 0
    assert progress(dump((WORLD, 40, 30)))[0].open is None


def said(*records: dict[str, Any]) -> Any:
    return behind({rank: progress(record) for rank, record in enumerate(records)})


def test_the_rank_that_did_not_join_is_named_with_the_collective():
    late = "did not join all_reduce of Float[8], number 37 of process group 0 (default_pg), in which ranks"
    assert said(*[dump((WORLD, n, 36)) for n in (37, 36, 37, 37)]) == ((1,), f"{late} 0, 2, 3 wait")
    assert said(*[dump((WORLD, n, 36)) for n in (37, 36, 37, 36)]) == ((1, 3), f"{late} 0, 2 wait")


def test_a_rank_that_waits_for_another_one_itself_is_not_to_blame():
    # 2 waits for 0 in dp; 0 waits for 1 in tp, where 1 left out one.
    who, late = said(dump((TP, 12, 11), (DP, 4, 4)), dump((TP, 11, 11)), dump((DP, 5, 4)))
    assert who == (1,) and "number 12 of process group 1 (TENSOR_MODEL_PARALLEL_GROUP), in which rank 0 wait" in late


def test_with_the_recorder_off_numbers_tell_who_is_behind():
    off = [dump((WORLD, n, 0), entries=[], pg_status={"0": {"last_enqueued_collective": n}}) for n in (37, 37, 36)]
    late = "did not join a collective, number 37 of process group 0 (default_pg), in which ranks 0, 1 wait"
    assert said(*off) == ((2,), late)
    # Nothing is said of ranks that are through.
    assert said(*off[:2]) is said(dump((WORLD, 37, 37)), dump((WORLD, 37, 37))) is behind({0: (), 1: ()}) is None


def test_ranks_that_brought_different_collectives_are_shown():
    other = dump((WORLD, 37, 36), last={"profiling_name": "nccl:_all_gather_base"})
    who, text = said(dump((WORLD, 37, 36)), other)
    assert who == () and "different collectives as number 37 of process group 0" in text
    assert text.endswith("rank 0: all_reduce of Float[8]; rank 1: _all_gather_base of Float[8]")
    # To an all-to-all each brings what it has.
    uneven = [dump((WORLD, 37, 36), last={"profiling_name": "nccl:all_to_all", "input_sizes": [[n]]}) for n in (3, 5)]
    assert said(*uneven)[1].startswith("all ranks have joined all_to_all of Float[3], number 37")


@pytest.mark.parametrize("record", [{}, {"pg_config": {}, "pg_status": {}, "entries": [{"pg_id": 1}]}, [], None])
def test_a_record_of_another_format_is_said_and_no_error(record):
    groups, why = within(60.0, lambda: record)
    assert groups == () and why.startswith("NCCL's flight recorder cannot be read: ")


def test_a_recorder_that_does_not_answer_is_not_waited_for():
    asked, answered = threading.Event(), threading.Event()

    def dump_late() -> dict[str, Any]:
        asked.set()
        answered.wait()
        return {}

    assert within(0.1, dump_late) == ((), "NCCL's flight recorder did not answer within 0.1 s")
    assert asked.wait(60.0) and not answered.is_set()
    answered.set()
    assert within(60.0, lambda: {"pg_config": {}, "pg_status": {}}) == ((), "NCCL's flight recorder is empty")


def asks_a_recorder_that_holds_the_interpreter(_: Any) -> None:
    within(0.1, hold_the_interpreter)


def test_a_recorder_that_holds_the_interpreter_ends_the_process(rank_parent: RankParent, tmp_path: Path) -> None:
    target = "tests.training.test_hang_report:asks_a_recorder_that_holds_the_interpreter"
    pids = rank_parent.fork([Child(target, None, str(tmp_path / "log"))])
    assert rank_parent.statuses(pids, 300.0) == [1]
    assert "hold_the_interpreter" in (tmp_path / "log").read_text()


class Blocked:
    """Something like a tensor on a device that stands still: what reads it waits in C, without a frame."""

    shape, dtype = (1,), "float32"

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.release = lock.release
        self.item = self.tolist = self.cpu = self.synchronize = self.nonzero = self.wait = self.other = lock.acquire
        type(self).__bool__ = lock.acquire  # type: ignore[attr-defined]
        type(self).__float__ = lock.acquire  # type: ignore[attr-defined]


def condition(x: Any) -> None:
    if x:
        time.sleep(0)


def work(x: Any) -> None:
    x.wait()


CASES: dict[str, tuple[Callable[[Any], Any], str | None, str | None]] = {
    # What reads; what is said of it on a device, and without one.
    "item": (lambda x: print(str(abs(-1)), x.item(), max(1, 2), end=""), "item, for the device", None),
    "condition": (condition, "a condition, for the device", None),
    "negation": (lambda x: not x, "a condition, for the device", None),
    "number": (lambda x: float(x), "float, for the device", None),
    "stream": (lambda x: x.synchronize(), "synchronize, for the device", "synchronize, for the device"),
    "work": (work, "a wait in work", "a wait in work"),
    "other": (lambda x: (x.other(True), "x.item()"), None, None),
    "several lines": (
        lambda x: dict(
            a=1,
            b=x.tolist(),
        ),
        "tolist, for the device",
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_thread_that_reads_from_the_device_waits_for_it(case):
    (read, *wanted), blocked = CASES[case], Blocked()

    def quietly() -> None:
        with contextlib.suppress(TypeError):  # what a lock returns is no float
            read(blocked)

    thread = threading.Thread(target=quietly)
    thread.start()
    said: list[str | None] = []
    deadline = time.monotonic() + 60
    try:
        while said != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
            frame = sys._current_frames()[thread.ident]
            if frame.f_code is read.__code__:  # and then it still has to come to the instruction
                stack = [(one, line, one.f_lasti) for one, line in traceback.walk_stack(frame)]
                said = [hang_report.activity_of(stack, on_device).waits_in for on_device in (True, False)]
    finally:
        blocked.release()
        thread.join()
    assert said == wanted


def test_an_error_that_is_raised_where_the_device_is_read_is_the_ranks_own():
    class Broken:
        item = iter(()).__next__

    with pytest.raises(StopIteration) as error:
        Broken().item()
    assert hang_report.of_error(error.value).waits_in is None


def test_ranks_that_all_wait_for_their_devices_are_not_blamed_for_the_place():
    def status(rank: int, at: str) -> RankStatus:
        return RankStatus(rank, "doing", "iteration 3", at, "item, for the device", without_groups="it is off")

    text = diagnose({0: status(0, "a.py:1 in f"), 1: status(1, "a.py:1 in f"), 2: status(2, "b.py:7 in g")}, {}, {})
    assert text.startswith("all ranks wait for their devices: which one is behind is not known (it is off). ")
    assert "rank 2: waiting in item, for the device, at b.py:7 in g" in text
    working = RankStatus(1, "doing", "iteration 3", "data.py:3 in read")
    text = diagnose({0: status(0, "a.py:1 in f"), 1: working}, {}, {})
    assert text.startswith("rank 1 did not come to what the others wait for: at data.py:3 in read")
