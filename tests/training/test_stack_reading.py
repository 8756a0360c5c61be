"""A rank that reads from the device is told from one that works, by the instruction in which its thread stands."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_moe.training import stack_reading
from megatron_moe.training.hang_report import RankStatus, diagnose


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
                stack = stack_reading.outwards(frame)
                said = [stack_reading.activity_of(stack, on_device).waits_in for on_device in (True, False)]
    finally:
        blocked.release()
        thread.join()
    assert said == wanted


def test_an_error_that_is_raised_where_the_device_is_read_is_the_ranks_own():
    class Broken:
        item = iter(()).__next__

    with pytest.raises(StopIteration) as error:
        Broken().item()
    assert stack_reading.of_error(error.value).waits_in is None


def test_ranks_that_all_wait_for_their_devices_are_not_blamed_for_the_place():
    def status(rank: int, at: str) -> RankStatus:
        return RankStatus(rank, "doing", "iteration 3", at, "item, for the device", without_groups="it is off")

    text = diagnose({0: status(0, "a.py:1 in f"), 1: status(1, "a.py:1 in f"), 2: status(2, "b.py:7 in g")}, {}, {})
    assert text.startswith("all ranks wait for their devices: which one is behind is not known (it is off). ")
    assert "rank 2: waiting in item, for the device, at b.py:7 in g" in text
    working = RankStatus(1, "doing", "iteration 3", "data.py:3 in read")
    text = diagnose({0: status(0, "a.py:1 in f"), 1: working}, {}, {})
    assert text.startswith("rank 1 did not come to what the others wait for: at data.py:3 in read")
