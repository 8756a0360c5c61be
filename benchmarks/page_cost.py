"""Measure the page of a long, made-up run: python -m benchmarks.page_cost [STEPS [LAYERS [EXPERTS [EVERY]]]].

It prints the size of metrics and page, the CPU seconds of reading and writing, and what opening it takes in Chromium.
By default the run has 100,000 steps of 58 layers with 256 experts, counted and measured at every 100th: 130 MB in a
temporary folder.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from random import Random

import psutil

from megatron_moe.io.texts import size_text
from megatron_moe_tools.report.page import write_page
from megatron_moe_tools.report.run_state import RunState
from tests.report import chromium

OF_A_LAYER = ("effective_experts", "flip_rate", "margin_mean", "margin_p5", "max_logit", "bias_min", "bias_max")
NUMBERS = ("grad_norm", "tokens_per_second", "model_tflops", "mfu", "expert_load", "expert_bias_max", "memory_bytes")


def write_run(folder: Path, steps: int, layers: int, experts: int, every: int) -> Path:
    """Write metrics.jsonl, whose numbers have all their digits, and as many long events as a page takes; return it.

    In the last layer, the last expert gets no token.
    """
    random, numbered = Random(1), range(3, 3 + layers)
    table = {str(layer): [random.randrange(1, 999) for _ in range(experts)] for layer in numbered}
    table[str(numbered[-1])][-1] = 0
    counts = json.dumps(table)
    health = json.dumps({"layers": {str(layer): {name: random.random() for name in OF_A_LAYER} for layer in numbered}})
    file = folder / "metrics.jsonl"
    with open(file, "w") as lines:
        for iteration in range(1, steps + 1):
            one = {"iteration": iteration, "loss": 3 + 5 * math.exp(-5 * iteration / steps) + 0.1 * random.random()}
            one.update(learning_rate=1e-3 * random.random(), tokens=4096, seconds=0.5 + 0.1 * random.random())
            one.update({name: random.random() for name in NUMBERS}, skipped=False)
            rest = f'"tokens_per_expert": {counts}, "health": {health}' if iteration % every == 0 else '"health": null'
            lines.write(f"{json.dumps(one)[:-1]}, {rest}}}\n")
    fault = json.dumps({"iteration": steps, "kind": "fault", "text": "x" * 3000, "time": "2026-01-01T00:00:00+00:00"})
    (folder / "metrics.events.jsonl").write_text(f"{fault}\n" * 600)
    return file


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of those it started that are still there."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def main(arguments: list[str]) -> None:
    steps, layers, experts, every = [int(word) for word in arguments] + [100_000, 58, 256, 100][len(arguments) :]
    with tempfile.TemporaryDirectory() as name:
        file, page = write_run(Path(name), steps, layers, experts, every), Path(name) / "report.html"
        state = RunState(file)
        times = [time.process_time()]
        for what in (state.update, state.update, lambda: write_page(page, [state], ["run"])):
            what()
            times.append(time.process_time())
        first, again, write = (after - before for before, after in pairwise(times))
        print(f"metrics {size_text(file.stat().st_size)}, page {size_text(page.stat().st_size)}")
        print(f"CPU: first reading {first:.2f} s, reading nothing new {1000 * again:.2f} ms, writing {write:.2f} s")
        browser = chromium.Page(Path(name) / "profile")
        browser.size(1300, 1000)
        for _ in range(3):
            before = _cpu_seconds(browser.pid)
            took = browser.open(page)
            used = _cpu_seconds(browser.pid) - before
            print(f"opening: {took:.2f} s, {used:.2f} CPU s; load average {os.getloadavg()[0]:.1f}")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
