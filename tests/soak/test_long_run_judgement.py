"""The judgement of tests/soak/test_long_run.py: a planted leak is found, and noise is not taken for one."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.soak.long_run import Sample, judged, sample, slope, step_times, warm

STEPS, EVERY, SAVE, EVALUATION = 20_000, 100, 500, 250


def series(
    leaked_kib_a_step: float = 0.0, files_a_save: int = 0, threads_an_evaluation: int = 0, children_a_save: int = 0
) -> list[Sample]:
    """Samples of a run that warms up, saves and is noisy, with what leaks."""
    rng, samples = random.Random(1), []
    for step in range(EVERY, STEPS + 1, EVERY):
        saving = rng.random() < 0.2
        warming = 20_000 * min(step / 2000, 1.0)
        resident = 400_000 + warming + leaked_kib_a_step * step + rng.randrange(-800, 800) + 5_000 * saving
        handles = {"file": 8 + 2 * saving + files_a_save * (step // SAVE), "socket": 10}
        threads = 12 + saving + threads_an_evaluation * (step // EVALUATION)
        samples.append(Sample(step, int(resident), handles, threads, children_a_save * (step // SAVE)))
    return samples


def times(slower: float = 1.0) -> list[float]:
    """Of a run that takes `slower` times as long at its end, on a machine that is busy for a tenth of it."""
    rng = random.Random(2)
    return [
        0.03 * (1 + (slower - 1) * step / STEPS) * rng.uniform(0.9, 1.3) * (3 if 12_000 < step < 14_000 else 1)
        for step in range(STEPS)
    ]


@pytest.mark.parametrize(
    ("leak", "found"),
    [
        ({"leaked_kib_a_step": 10.0}, "resident memory"),
        ({"leaked_kib_a_step": 0.5}, "resident memory"),
        ({"files_a_save": 1}, "open files"),
        ({"threads_an_evaluation": 1}, "threads"),
        ({"children_a_save": 1}, "child processes"),
    ],
)
def test_each_leak_is_found_and_nothing_else(leak: dict[str, Any], found: str) -> None:
    said = judged(series(**leak), times())
    assert len(said) == 1 and said[0].startswith(found)


def test_a_noisy_run_that_keeps_nothing_is_flat_and_steps_that_become_slower_are_found() -> None:
    assert judged(series(), times()) == []
    assert len(judged(series(), times(slower=2.0))) == 1


def test_too_few_samples_or_steps_are_no_judgement_and_a_slope_is_that_of_most_points() -> None:
    for samples in (series()[:10], []):
        with pytest.raises(ValueError):
            warm(samples)
    with pytest.raises(ValueError):
        step_times([0.1] * 5)
    ys = [2.0 * x for x in range(20)]
    ys[3], ys[17] = 1e9, -1e9
    assert slope(range(20), ys) == pytest.approx(2.0)


def test_a_sample_sees_what_the_process_takes() -> None:
    before = sample(os.getpid(), 0)
    held = [open(os.devnull), open(__file__)]  # noqa: SIM115
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    block = mmap.mmap(-1, 32 << 20)  # and not what this process had kept of earlier memory
    block.write(os.urandom(1 << 20) * 32)
    try:
        after = sample(os.getpid(), 1)
    finally:
        child.communicate(b"\n")
        go_on.set()
        thread.join()
        for file in held:
            file.close()
    for kind in ("file", "device", "pipe"):
        assert after.handles[kind] == before.handles.get(kind, 0) + 1
    assert (after.threads, after.children) == (before.threads + 1, before.children + 1)
    assert after.resident_kib > before.resident_kib + len(block) // 2048
