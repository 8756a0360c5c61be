"""Runs that are killed with SIGKILL at random times and started again until they are done. Nothing else may change.

`killed_job` is the trial: it starts a job, kills all of its ranks or one of them at a uniformly random time, starts it
again with the same flags, and so on. `undisturbed_job` and `differences` are oracle E of docs/internals/reliability.md.

`launchers.py` starts the ranks.
"""

import json
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import manifest
from megatron_moe.checkpoint.folder import step_folder, steps
from tests.helpers.launchers import Launcher

CLOCKS = set("seconds tokens_per_second model_tflops mfu seconds_left memory_bytes time run_id attempt".split())
"""Fields of metrics.jsonl that tell of the machine and of when it ran, not of the training."""

HOW_TO_SAVE = (
    *("save_interval", "async_save", "keep_last_k", "save_retain_interval", "distributed_timeout_minutes"),
    *("local_save", "local_save_interval", "save", "load", "metrics_file"),
)
"""Settings in which the oracle may differ: when, where and how a run is saved must not change what it computes."""
BELONG = {".megatron_moe_checkpoints", ".local_steps", "latest_checkpointed_iteration.txt", "faults"}
"""What lies in a folder of checkpoints beside its steps."""

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    # name -> ranks, flags
    "DP2": (2, ["--use-distributed-optimizer"]),
    "TP2": (2, TP2),
    "EP2": (2, ["--expert-model-parallel-size", "2", "--use-distributed-optimizer"]),
    "PP2": (2, ["--pipeline-model-parallel-size", "2"]),
    "ZeRO 2": (2, ["--data-parallel-sharding-strategy", "optim_grads"]),
    "ZeRO 3 x EP2": (4, ["--use-torch-fsdp2", "--expert-model-parallel-size", "2"]),
    "TP2xEP2": (4, [*TP2, "--expert-model-parallel-size", "2"]),
}


@dataclass
class Kill:
    """One kill: when, of whom, how far the log was then, where the next incarnation began, and what lay in the folder:
    how many steps that can be loaded, and what is wrong with any that is visible."""

    seconds: float
    rank: int | None
    reached: int
    resumed: int = -1
    loadable: int = 0
    defects: list[str] = field(default_factory=list)


@dataclass
class Job:
    """A job that came to its end: all lines that any incarnation wrote, and its folder."""

    folder: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0

    def final(self) -> list[dict[str, Any]]:
        """The joined log."""
        return [json.loads(line) for line in raw_lines(self.folder / "metrics.jsonl")]

    def step(self) -> Path:
        """The last step."""
        return max((self.folder / "checkpoints").glob("iter_*"))

    def lost(self) -> int:
        """The most iterations that any kill cost."""
        return max((kill.reached - kill.resumed for kill in self.kills if kill.resumed >= 0), default=0)


def flags(iterations: int, *more: str, eval_interval: int = 8) -> list[str]:
    """A tiny MoE with sigmoid routing, bias and dropout in bf16 on made-up tokens; all paths are relative."""
    return [
        "--preset", "tiny", "--mock-data", "--tokenizer-type", "ByteTokenizer", "--bf16", "--num-layers", "2",
        "--moe-layer-freq", "[0]+[1]", "--seq-length", "16", "--hidden-size", "32", "--global-batch-size", "4",
        "--micro-batch-size", "1", "--hidden-dropout", "0.1", "--lr-decay-style", "cosine", "--lr-warmup-iters", "3",
        "--eval-interval", str(eval_interval), "--eval-iters", "1", "--health-interval", "0",
        "--train-iters", str(iterations),
        "--metrics-file", "metrics.jsonl", "--save", "checkpoints", "--load", "checkpoints", *more,
    ]  # fmt: skip


def undisturbed_job(launcher: Launcher, folder: Path, argv: list[str], world_size: int) -> Job:
    """The oracle: no kill, and one save, at the end."""
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    launcher.start(argv, world_size, folder, folder / "log.txt")
    status = launcher.wait(240)
    assert status == 0, f"status {status}:\n{tail(folder)}"
    job = Job(folder, seconds=time.monotonic() - began)
    job.lines = job.final()
    return job


def killed_job(
    launcher: Launcher,
    folder: Path,
    argv: list[str],
    world_size: int,
    rng: random.Random,
    *,
    kills: int,
    moment: Callable[[int], int | None],
) -> Job:
    """Start, kill, start again; after `kills` kills, or when it ends before the next one, the job has come to its end.

    Args:
        moment: waits for the time of the kill of that number; returns the job's status if it ends before.
    """
    folder.mkdir(exist_ok=True)
    job = Job(folder)
    began = time.monotonic()
    written: list[bytes] = []
    while True:
        launcher.start(argv, world_size, folder, folder / "log.txt")
        started = time.monotonic()
        is_killed = len(job.kills) < kills
        status = moment(len(job.kills)) if is_killed else launcher.wait(240)
        if status is None:
            assert is_killed, f"it did not end:\n{tail(folder)}"
            rank = rng.choice([None, rng.randrange(world_size)])
            launcher.kill(rank)
        lines = raw_lines(folder / "metrics.jsonl")
        fresh = [json.loads(line) for line in lines if line not in written]  # clocks make each one of a kind
        written = lines
        if fresh:
            for kill in job.kills:
                kill.resumed = fresh[0]["iteration"] - 1 if kill.resumed < 0 else kill.resumed
        job.lines += fresh
        if status is None:
            reached = json.loads(lines[-1])["iteration"] if lines else 0
            job.kills.append(Kill(time.monotonic() - started, rank, reached, -1, *steps_in(folder / "checkpoints")))
            continue
        assert status == 0, f"status {status} after {len(job.kills)} kills:\n{tail(folder)}"
        job.seconds = time.monotonic() - began
        return job


def until_lines(launcher: Launcher, metrics: Path, number: int) -> int | None:
    """Wait until a metrics file has so many lines. The job's status if it ends before."""
    deadline = time.monotonic() + 600
    while len(raw_lines(metrics)) < number:
        if (status := launcher.wait(0.02)) is not None:
            return status
        assert time.monotonic() < deadline
    return None


def differences(job: Job, oracle: Job, interval: int) -> list[str]:
    """Where a killed job differs from the undisturbed one, in words: oracle E.

    Every line that any incarnation wrote against the oracle's line of that iteration, but for clocks; the joined log
    and its evaluations; the last step file by file, so weights, moments, masters, expert_bias, counters, random states
    and the data's position; the work that a kill cost, in iterations at most `interval`; that every step which is
    visible is whole, and that one is there once one was; what lies in the folder at the end.
    """
    found = []
    expected = {line["iteration"]: _without_clocks(line) for line in oracle.lines}
    for line in job.lines:
        found += _fields_that_differ(_without_clocks(line), expected.get(line["iteration"], {}), line["iteration"])
    if [line["iteration"] for line in job.final()] != sorted(expected):
        found.append(f"iterations of the joined log: {[line['iteration'] for line in job.final()]}")
    evaluations = [
        [_without_clocks(json.loads(line)) for line in raw_lines(one.folder / "metrics.eval.jsonl")]
        for one in (job, oracle)
    ]
    if evaluations[0] != evaluations[1]:
        found.append(f"evaluations {evaluations[0]}, not {evaluations[1]}")
    found += _files_that_differ(job.step(), oracle.step())
    if job.lost() > interval:
        found.append(f"a kill cost {job.lost()} iterations, more than {interval}: {job.kills}")
    published = False
    for kill in job.kills:
        found += kill.defects
        if published and not kill.loadable:
            found.append(f"no loadable step was left: {kill}")
        published |= kill.loadable > 0
    left = {path.name for path in (job.folder / "checkpoints").iterdir()} - BELONG
    if left := sorted(name for name in left if not name.startswith("iter_")):
        found.append(f"left in the folder: {left}")
    return found


def steps_in(root: Path) -> tuple[int, list[str]]:
    """How many steps can be loaded, every file hashed, and the defects of visible steps and of the pointer."""
    sound, defects = 0, []
    for number in steps(root):
        step = step_folder(root, number)
        defect = manifest.structure_defect(step) or manifest.content_defect(step, manifest.read(step).files)
        if defect is None:
            sound += 1
        else:
            defects.append(f"{step.name}: it {defect}")
    pointer = root / "latest_checkpointed_iteration.txt"
    if pointer.exists() and (named := pointer.read_text().strip()) not in map(str, steps(root)):
        defects.append(f"the pointer names {named!r}, and there is no such step")
    return sound, defects


def _files_that_differ(step: Path, other: Path) -> list[str]:
    if step.name != other.name:
        return [f"last step {step.name}, not {other.name}"]
    files, wanted = (json.loads((folder / "manifest.json").read_text())["files"] for folder in (step, other))
    differing = [name for name in sorted(files.keys() | wanted.keys()) if files.get(name) != wanted.get(name)]
    return [f"{step.name}/{name} differs" for name in differing if not _same_content(step / name, other / name)]


def _same_content(file: Path, other: Path) -> bool:
    """For files whose bytes may differ: config.json names the oracle's way of saving, and two of the engine's are no
    function of their content: `.metadata` holds a random id of the save and its folder, in common.pt equal strings are
    one object or two."""
    if not (file.exists() and other.exists()):
        return False
    if file.name == ".metadata":
        indices = [pickle.loads(one.read_bytes()) for one in (file, other)]
        for index in indices:
            index.storage_meta.save_id = index.storage_meta.checkpoint_id = None
        return indices[0] == indices[1]
    if file.name == "config.json":
        configs = [json.loads(one.read_text()) for one in (file, other)]
        return not [name for name in configs[0] if configs[0][name] != configs[1].get(name) and name not in HOW_TO_SAVE]
    if file.name == "common.pt":
        import torch

        # Of floats that are not NaN repr tells every bit.
        one, two = (repr(torch.load(path, weights_only=True)) for path in (file, other))
        return one == two
    return False


def _fields_that_differ(line: dict[str, Any], wanted: dict[str, Any], iteration: int) -> list[str]:
    names = [name for name in line.keys() | wanted.keys() if line.get(name) != wanted.get(name)]
    return [f"iteration {iteration}: {name} {line.get(name)}, not {wanted.get(name)}" for name in names]


def _without_clocks(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in CLOCKS}


def raw_lines(path: Path) -> list[bytes]:
    """The complete lines of a file; none where there is no file."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def tail(folder: Path) -> str:
    return (folder / "log.txt").read_text(errors="replace")[-4000:]
