"""What `make bench` measures: times, operations, peak memory; the history file and the picture."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import Contestant
from benchmarks.launches import Launches
from megatron_moe import platform
from megatron_moe.kernels.choice import launches_seen_by
from megatron_moe_tools.plan.meta_tracer import LiveBytes


def operations_and_peak(contestant: Contestant) -> tuple[int, int]:
    """Return the operations of one step, and the peak of its bytes.

    Operations are those of torch that are no views, and our kernels in Triton: on a GPU they are its launches, where a
    grouped product is two. On a CPU they are those of torch's form, since what C does is not seen.

    Bytes are on a GPU those that were allocated beyond what was there before, on a CPU those of all tensors that
    operations returned, also where these are views of weights.
    """
    launches, live = Launches(), LiveBytes()
    with ExitStack() as stack:
        if platform.has_cuda():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            stack.enter_context(live)
        stack.enter_context(launches)
        stack.enter_context(launches_seen_by(launches.seen))
        contestant.step()
    peak = torch.cuda.max_memory_allocated() - before if platform.has_cuda() else live.peak
    contestant.clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # torch.compile leaves alone for good what it has met under a mode
    return sum(one.launches for one in launches.found), peak


class Clock:
    """Times the two passes of a step in seconds.

    Args:
        cpu: whether to count the seconds that processors worked for this process, which other programs disturb less
            than the time of day. With several threads that is the work of all of them.
    """

    def __init__(self, cpu: bool) -> None:
        self._now = time.process_time if cpu else time.perf_counter

    def passes(self, contestant: Contestant) -> tuple[float, float]:
        """Run a step; return the seconds of its forward pass and of both."""
        platform.synchronize()
        start = self._now()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if platform.has_cuda() else []
        for event in events[:1]:
            event.record()
        contestant.forward()
        for event in events[1:]:  # a GPU is not waited for between the passes: the host runs ahead
            event.record()
        middle = self._now()
        contestant.backward()
        platform.synchronize()
        end = self._now()
        contestant.clear()
        return (events[0].elapsed_time(events[1]) / 1e3 if events else middle - start), end - start


def append(history: Path, entry: dict[str, Any]) -> None:
    """Add a line to a file of JSON lines."""
    history.parent.mkdir(parents=True, exist_ok=True)
    with history.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def draw(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Draw the fastest step of each contestant against the bound, forward and backward."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [row["what"] for row in rows]
    forward, backward = ([row[key] for row in rows] for key in ("forward_ms", "backward_ms"))
    axes.barh(names, forward, color="#2563a8", label="forward")
    axes.barh(names, backward, left=forward, color="#8fb4dd", label="backward")
    for place, (row, end) in enumerate(zip(rows, _ends(forward, backward), strict=True)):
        axes.text(end, place, f" {row['x_bound_min']:.2f} x", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="ms, fastest step; at the bars: x the six products alone", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _ends(forward: list[float], backward: list[float]) -> Iterator[float]:
    for first, second in zip(forward, backward, strict=True):
        yield first + second
