"""What a process holds while a run goes on, read from /proc, and a judgement of whether it grows.

`sample` looks at a rank once; `judged` says what of a series of samples is not flat. A slope is Theil and Sen's, the
median of the slopes of all pairs: a few samples that lie far out, of a save or of another job on the machine, do not
move it, and a growth that is there all the time does.
"""

import itertools
import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

WARM_UP = 0.25
"""The part of a run that is not judged: buffers, caches and the allocator's arenas fill."""
WINDOWS = 10
"""Spans of steps whose median times are compared."""
MOST_GROWTH_KIB = 4500.0
"""Growth of the resident memory behind the warm-up, whatever the number of steps: 3 MiB came and went there. Over
20,000 steps that is a leak of 300 bytes a step."""
MOST_STEP_TIME = 1.25
"""The last window's median step time over the first's."""


@dataclass(frozen=True)
class Sample:
    """What a process held after `iteration` steps of its run; children are its own and theirs."""

    iteration: int
    resident_kib: int
    handles: dict[str, int]
    """Open file descriptors by kind: file, socket, pipe, anon_inode, device."""
    threads: int
    children: int


def sample(pid: int, iteration: int) -> Sample:
    """Look at a process; FileNotFoundError or psutil.NoSuchProcess where it has ended."""
    process = psutil.Process(pid)
    handles: Counter[str] = Counter()
    for link in os.scandir(f"/proc/{pid}/fd"):
        try:
            handles[_kind(os.readlink(link.path))] += 1
        except FileNotFoundError:  # closed since the folder was listed
            continue
    resident, children = process.memory_info().rss // 1024, process.children(recursive=True)
    return Sample(iteration, resident, dict(handles), process.num_threads(), len(children))


def _kind(target: str) -> str:
    if target.startswith("/"):
        return "device" if target.startswith("/dev/") else "file"
    return target.split(":", 1)[0]


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the median slope of all pairs of points; the xs differ."""
    pairs = itertools.combinations(zip(xs, ys, strict=True), 2)
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def warm(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples behind the warm-up; ValueError where there are too few to judge by."""
    if not samples:
        raise ValueError("no samples")
    first, last = samples[0].iteration, samples[-1].iteration
    kept = [one for one in samples if one.iteration >= first + WARM_UP * (last - first)]
    if len(kept) < 2 * WINDOWS:
        raise ValueError(f"{len(kept)} samples behind the warm-up; {2 * WINDOWS} are needed")
    return kept


def growth(samples: Sequence[Sample]) -> float:
    kept = warm(samples)
    return 1000 * slope([one.iteration for one in kept], [one.resident_kib for one in kept])


def step_times(seconds: Sequence[float]) -> list[float]:
    kept = seconds[int(WARM_UP * len(seconds)) :]
    if len(kept) < WINDOWS:
        raise ValueError(f"{len(kept)} steps behind the warm-up; {WINDOWS} are needed")
    edges = [round(number * len(kept) / WINDOWS) for number in range(WINDOWS + 1)]
    return [statistics.median(kept[a:b]) for a, b in itertools.pairwise(edges)]


def judged(samples: Sequence[Sample], seconds: Sequence[float]) -> list[str]:
    """Return what grows, in words, by one rank's samples and the seconds of each step; nothing where all is flat.

    A leak worth the name is in every step, save or evaluation, so that handles, threads and children may not grow at
    all: what a save or an evaluation takes is given back, and the least of a window of samples is compared.
    """
    kept, found = warm(samples), []
    grown = growth(samples)
    if grown * (kept[-1].iteration - kept[0].iteration) / 1000 > MOST_GROWTH_KIB:
        found.append(f"resident memory grows by {grown:.0f} KiB per 1,000 steps")
    kinds = sorted({kind for one in kept for kind in one.handles})
    counted: dict[str, Callable[[Sample], int]] = {
        **{f"open {kind}s": (lambda one, kind=kind: one.handles.get(kind, 0)) for kind in kinds},
        "threads": lambda one: one.threads,
        "child processes": lambda one: one.children,
    }
    for name, count in counted.items():
        # The least of the first and of the last third of the samples.
        before, after = (min(map(count, part)) for part in (kept[: len(kept) // 3], kept[-(len(kept) // 3) :]))
        if after > before:
            found.append(f"{name} grow from {before} to {after}")
    times = step_times(seconds)
    # Medians of three windows: the machine may be slower for one of them.
    before, after = statistics.median(times[:3]), statistics.median(times[-3:])
    if after > MOST_STEP_TIME * before:
        found.append(f"a step takes {after / before:.2f} times as long at the end")
    return found
