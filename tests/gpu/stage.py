"""What a stage is given: the device, a way to say what it is doing, and the checks that it records.

A check that is recorded is on disk at once, so that a stage which is cut or crashes leaves what it has found.
"""

import contextlib
import itertools
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

PASS, FAIL, IMPOSSIBLE = "pass", "fail", "not possible here"
STATUSES = (PASS, FAIL, IMPOSSIBLE)


class Stage:
    """One stage while it runs, in its own process.

    Args:
        notes: the file that checks and progress go to, a JSON object a line.
        folder: for files of the stage; it exists.
        dry: whether the device is imagined, in the CPU's memory.
        seconds: the stage's time; one that may be long asks `left`.
    """

    def __init__(self, notes: Path, folder: Path, dry: bool, seconds: float) -> None:
        self.notes, self.folder, self.dry = notes, folder, dry
        self._file = open(notes, "a", encoding="utf-8")  # noqa: SIM115 (it is open as long as the process is there)
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @property
    def device(self) -> Any:
        """The first CUDA device; with `dry` the CPU that stands for it."""
        return torch.device("cpu" if self.dry else "cuda:0")

    def doing(self, what: str) -> None:
        self._write({"doing": what})

    def check(self, name: str, status: str, reason: str = "", **figures: Any) -> None:
        """Record a check with what was measured, and why it has its status."""
        assert status in STATUSES, status
        bound = figures.pop("bound", None)
        figures = {key: _plain(value) for key, value in figures.items()}
        self._write({"name": name, "status": status, "reason": reason, "figures": figures, "bound": _plain(bound)})

    def within(self, name: str, measured: float, bound: float, reason: str = "", **figures: Any) -> None:
        """Record a check that passes if `measured` is at most `bound`; NaN is not."""
        status = PASS if measured <= bound else FAIL
        self.check(name, status, reason, measured=measured, bound=bound, **figures)

    def holds(self, name: str, fact: object, reason: str = "", **figures: Any) -> None:
        """Record a check that passes if `fact` is true; `reason` is what is wrong if it is not."""
        self.check(name, PASS if fact else FAIL, "" if fact else reason, **figures)

    def impossible(self, name: str, reason: str) -> None:
        self.check(name, IMPOSSIBLE, reason)

    def figure(self, name: str, reason: str = "", **figures: Any) -> None:
        """Record figures without a bound."""
        self.check(name, PASS, reason, **figures)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Run the block; what it raises is a failed check of this name, and the stage goes on."""
        self.doing(name)
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            where = "".join(traceback.format_tb(error.__traceback__)[-4:])
            self.check(name, FAIL, f"{text[:1500]}\n{where}")

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def milliseconds(stage: Stage, run: Callable[[int], object], repeats: int, warmup: int = 2) -> float:
    """Return the median milliseconds of a call of `run(number)`, by CUDA events; in a dry run by the host's clock.

    The host queues all calls before it waits, as a training step does.
    """
    for number in range(warmup):
        run(number)
    torch.cuda.synchronize()
    if stage.dry:
        times = []
        for number in range(repeats):
            began = time.perf_counter()
            run(warmup + number)
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for number in range(repeats):
        run(warmup + number)
        events[number + 1].record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))
