"""A long run holds no more at its end than at its beginning: memory, handles, threads, children, time and files.

20,000 steps of a tiny MoE on two ranks with all that goes on around training: evaluations, checkpoints in the
background with retention, metrics, TensorBoard, health, the picture. None of the ranks is named as slow.
`tests/soak/long_run.py` judges.
"""

import contextlib
import json
import statistics
from pathlib import Path

import psutil

from megatron_moe.checkpoint.folder import steps
from tests.helpers import kills
from tests.helpers.launchers import Torchrun
from tests.soak.conftest import Figure, Scaled
from tests.soak.long_run import Sample, growth, judged, sample, step_times, warm

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
    more = f"--log-interval 10 --save-interval {SAVE_EVERY} --async-save --keep-last-k {KEPT} "
    more += "--tensorboard-dir tensorboard --plot-file plot.png --summary-file summary.json --console plain "
    more += "--log-straggler"
    argv = kills.flags(iterations, *kills.LAYOUTS["EP2"][1], *more.split(), eval_interval=EVALUATE_EVERY)
    argv[argv.index("--health-interval") + 1] = "20"
    return argv


def sampled(launcher: Torchrun, folder: Path, iterations: int) -> tuple[dict[int, list[Sample]], int]:
    """Run to the end; return the samples of each rank, and the most checkpoints that lay there at once."""
    launcher.start(flags(iterations), 2, folder, folder / "log.txt")
    assert kills.until_lines(launcher, folder / "metrics.jsonl", 1) is None, kills.tail(folder)
    samples: dict[int, list[Sample]] = {0: [], 1: []}
    every, next_at, iteration, most, waited = max(1, iterations // SAMPLES), 1, 0, 0, 0.0
    lines = open(folder / "metrics.jsonl", "rb")  # noqa: SIM115 (what was read before is not read again)
    while (status := launcher.wait(0.02)) is None:
        new = lines.read().count(b"\n")
        iteration, waited = iteration + new, 0.0 if new else waited + 0.02
        if waited > STALLED:
            launcher.kill(None)
            raise AssertionError(f"no step for {STALLED:.0f} s after {iteration}")
        if iteration < next_at or iteration > iterations - every:  # at the end the picture is drawn
            continue
        next_at = iteration + every
        most = max(most, len(steps(folder / "checkpoints")))
        for rank, pid in enumerate(launcher.ranks()):
            with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):  # it has just ended
                samples[rank].append(sample(pid, iteration))
    assert status == 0, kills.tail(folder)
    return samples, most


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
    wrong = [f"rank {rank}: {what}" for rank, of_rank in samples.items() for what in judged(of_rank, seconds)]
    events = [json.loads(line) for line in (tmp_path / "metrics.events.jsonl").read_text().splitlines()]
    alarms = [event["text"] for event in events if event["kind"] == "slow" and not event["ended"]]
    wrong += alarms  # both ranks have the same to do
    files = {name: [tmp_path / name, *(tmp_path / name).rglob("*")] for name in MOST_BYTES}
    per_step = {name: sum(path.stat().st_size for path in files[name]) / iterations for name in files}
    wrong += [
        f"{name}: {per_step[name]:.0f} bytes a step" for name, most in MOST_BYTES.items() if per_step[name] > most
    ]
    # One more while the next is published, before the oldest is cleared away.
    if most_checkpoints > KEPT + 1 or len(steps(tmp_path / "checkpoints")) != KEPT:
        wrong.append(f"{most_checkpoints} checkpoints at once, {len(steps(tmp_path / 'checkpoints'))} at the end")
    figure(
        "A long run", trials=1, failures=len(wrong), steps=iterations, samples=len(samples[0]),
        median_step_ms=1e3 * statistics.median(seconds), most_checkpoints=most_checkpoints,
        slow_ranks=len(alarms),
        bytes_per_step={name: round(number) for name, number in per_step.items()}, found=wrong,
        table="\n" + table(samples, step_times(seconds)),
    )  # fmt: skip
    assert [line["iteration"] for line in lines] == list(range(1, iterations + 1))
    assert wrong == []
