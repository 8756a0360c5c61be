"""A long run holds no more at its end than at its beginning: memory, handles, threads, children, time and files.

20,000 steps of a tiny MoE on two ranks with all that goes on around training: evaluations, checkpoints in the
background with retention, metrics, TensorBoard, health, the picture. `tests/soak/long_run.py` judges; that it finds
a leak is held by tests/soak/test_long_run_judgement.py.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from megatron_moe.checkpoint.folder import steps
from tests.helpers.launchers import Torchrun
from tests.soak.conftest import Figure, Scaled
from tests.soak.long_run import Bounds, Sample, growth, judged, sample, step_times, warm

STEPS, SAMPLES, KEPT = 20_000, 200, 2
# Saves and evaluations are frequent, so that each happens as often as in months of a real run.
SAVE_EVERY, EVALUATE_EVERY = 50, 50
STALLED = 600.0
"""Seconds without a step after which the run is taken to hang."""
# What glibc keeps for each thread of a save is not judged: up to eight arenas a core.
ARENAS = {"MALLOC_ARENA_MAX": "2"}
# Bytes per step that the files may take. They are linear in the steps, and in layers x experts: 1 x 4 here.
MOST_BYTES = {"metrics.jsonl": 1500, "metrics.eval.jsonl": 10, "log.txt": 60, "tensorboard": 2500}


def flags(iterations: int) -> list[str]:
    return [
        "--preset", "tiny", "--mock-data", "--tokenizer-type", "ByteTokenizer", "--bf16", "--num-layers", "2",
        "--moe-layer-freq", "[0]+[1]", "--seq-length", "16", "--hidden-size", "32", "--global-batch-size", "2",
        "--micro-batch-size", "1", "--lr-decay-style", "cosine", "--use-distributed-optimizer",
        "--expert-model-parallel-size", "2", "--train-iters", str(iterations), "--log-interval", "10",
        "--eval-interval", str(EVALUATE_EVERY), "--eval-iters", "1", "--health-interval", "20",
        "--save", "checkpoints", "--save-interval", str(SAVE_EVERY), "--async-save", "--keep-last-k", str(KEPT),
        "--metrics-file", "metrics.jsonl", "--tensorboard-dir", "tensorboard", "--plot-file", "plot.png",
        "--summary-file", "summary.json", "--console", "plain",
    ]  # fmt: skip


class Lines:
    """Counts the lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self.number = path, 0, 0

    def count(self) -> int:
        """Return the whole lines so far; what was read before is not read again."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._read)
                new = file.read()
            self._read += len(new)
            self.number += new.count(b"\n")
        return self.number


def sampled(launcher: Torchrun, folder: Path, iterations: int) -> tuple[dict[int, list[Sample]], int]:
    """Run to the end; return the samples of each rank, and the most checkpoints that lay there at once."""
    launcher.start(flags(iterations), 2, folder, folder / "log.txt")
    done, samples, most, waited = Lines(folder / "metrics.jsonl"), {0: [], 1: []}, 0, 0.0  # type: ignore[var-annotated]
    every, next_at = max(1, iterations // SAMPLES), 1
    while (status := launcher.wait(0.02)) is None:
        before, iteration = done.number, done.count()
        waited = 0.0 if iteration > before else waited + 0.02
        if waited > STALLED:
            launcher.kill(None)
            raise AssertionError(f"no step for {STALLED:.0f} s after {iteration}")
        if iteration < next_at or iteration > iterations - every:  # at the end the picture is drawn
            continue
        next_at = iteration + every
        most = max(most, len(steps(folder / "checkpoints")))
        for rank, pid in enumerate(launcher.ranks()):
            try:
                samples[rank].append(sample(pid, iteration))
            except FileNotFoundError:
                continue  # it has just ended
    assert status == 0, (folder / "log.txt").read_text()[-4000:]
    return samples, most


def bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(one.stat().st_size for one in path.rglob("*"))


def table(samples: dict[int, list[Sample]], times: list[float]) -> str:
    rows = []
    for rank, of_rank in samples.items():
        kept = warm(of_rank)
        first, last = (one.resident_kib / 1024 for one in (kept[0], kept[-1]))
        counted = zip(*((sum(one.handles.values()), one.threads, one.children) for one in kept))
        ranges = " | ".join(f"{min(values)} to {max(values)}" for values in counted)
        rows.append(f"| {rank} | {first:.0f} to {last:.0f} MiB, {growth(of_rank):+.0f} KiB | {ranges} |")
    head = "| rank | resident, growth per 1,000 steps | handles | threads | children |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows) + "\nstep time by window, ms: " + ", ".join(f"{1e3 * one:.1f}" for one in times)


def test_a_long_run_is_flat(tmp_path: Path, scaled: Scaled, figure: Figure) -> None:
    iterations = scaled(STEPS, at_least=500)
    samples, most_checkpoints = sampled(Torchrun(ARENAS), tmp_path, iterations)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines]
    wrong = [f"rank {rank}: {what}" for rank, of_rank in samples.items() for what in judged(of_rank, seconds, Bounds())]
    per_step = {name: bytes_of(tmp_path / name) / iterations for name in MOST_BYTES}
    wrong += [
        f"{name}: {per_step[name]:.0f} bytes a step" for name, most in MOST_BYTES.items() if per_step[name] > most
    ]
    # One more while the next is published, before the oldest is cleared away.
    if most_checkpoints > KEPT + 1 or len(steps(tmp_path / "checkpoints")) != KEPT:
        wrong.append(f"{most_checkpoints} checkpoints at once, {len(steps(tmp_path / 'checkpoints'))} at the end")
    figure(
        "A long run", trials=1, failures=len(wrong), steps=iterations, samples=len(samples[0]),
        median_step_ms=1e3 * statistics.median(seconds), most_checkpoints=most_checkpoints,
        bytes_per_step={name: round(number) for name, number in per_step.items()}, found=wrong,
        table="\n" + table(samples, step_times(seconds)),
    )  # fmt: skip
    assert [line["iteration"] for line in lines] == list(range(1, iterations + 1))
    assert wrong == []
