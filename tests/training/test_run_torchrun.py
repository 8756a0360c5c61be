"""Real processes, real text: a run that is terminated, interrupted and killed goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.data.preprocess import PreprocessOptions, preprocess
from megatron_moe.report.run_info import read_info
from tests.helpers.launchers import Forked

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 28


def prepare(folder: Path) -> list[str]:
    """A small corpus of real text, tokenized; the flags to train on it."""
    texts = [path.read_text() for path in sorted((ROOT / "megatron_moe" / "checkpoint").glob("*.py"))]
    for split, part in {"train": texts[1:], "valid": texts[:2]}.items():
        with open(folder / f"{split}.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in part)
        preprocess(
            PreprocessOptions(
                (str(folder / f"{split}.jsonl"),), str(folder / split), tokenizer_type="ByteTokenizer", append_eod=True,
                workers=1,
            ),
            show_progress=False,
        )  # fmt: skip
    return [
        "--tokenizer-type", "ByteTokenizer", "--train-data-path", str(folder / "train_text_document"),
        "--valid-data-path", str(folder / "valid_text_document"), "--data-cache-path", str(folder / "cache"),
    ]  # fmt: skip


class Launch:
    """torchrun with two ranks, in a process group of its own as under a shell."""

    def __init__(self, flags: list[str], log: Path) -> None:
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "pretrain_moe.py", *flags,
        ]  # fmt: skip
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def wait(self, seconds: float = 600.0) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"torchrun did not end in {seconds} s:\n{self.output()}") from None

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(int(entry.name)) == self.process.pid:
                found.append(int(entry.name))
        return found

    def kill(self) -> None:
        for pid in (*self.ranks(), self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return None


def until(condition: Callable[[], Any], launch: Launch, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or launch.process.poll() is not None:
            output = launch.output()
            launch.kill()
            raise AssertionError(f"it never happened:\n{output}")
        time.sleep(0.05)


def steps(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file, at any moment."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and _state(pid) not in ("Z", None) for pid in pids)


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return None


@pytest.mark.slow
def test_a_run_that_is_stopped_three_ways_repeats_every_bit_of_an_undisturbed_one(rank_parent, tmp_path):
    data = prepare(tmp_path)
    base = [
        "--preset", "tiny", "--num-layers", "3", "--moe-layer-freq", "[0,1,1]", "--bf16",
        "--use-distributed-optimizer", "--expert-model-parallel-size", "2",
        "--hidden-dropout", "0.1", "--train-iters", str(ITERATIONS), "--lr-decay-style", "cosine",
        "--lr-warmup-iters", "5", "--eval-interval", "10", "--eval-iters", "1", *data,
    ]  # fmt: skip
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    files = ["--metrics-file", str(whole), "--summary-file", str(tmp_path / "whole.json")]
    undisturbed = Forked(rank_parent)  # as what goes on to the end after the stops: torchrun's part is how a run stops
    undisturbed.start([*base, *files], 2, ROOT, tmp_path / "0.log")
    assert undisturbed.wait(300) == 0, (tmp_path / "0.log").read_text()

    flags = [
        *base, "--metrics-file", str(parts), "--summary-file", str(tmp_path / "parts.json"), "--exit-signal-handler",
        "--save-interval", "4", "--save", str(tmp_path / "c"), "--load", str(tmp_path / "c"),
    ]  # fmt: skip
    for number, (how, after) in enumerate({signal.SIGTERM: 5, signal.SIGINT: 11, signal.SIGKILL: 17}.items(), start=1):
        launch = Launch(flags, tmp_path / f"{number}.log")
        until(lambda count=after: len(steps(parts)) >= count, launch)
        ranks = launch.ranks()
        assert len(ranks) == 2
        launch.process.send_signal(how)
        begin = time.monotonic()
        launch.wait(40)
        while not gone(ranks):
            assert time.monotonic() - begin < 40, f"{how.name} left ranks behind:\n{launch.output()}"
            time.sleep(0.05)
        reached = len(steps(parts))
        assert after <= reached < ITERATIONS, "the run was over before it could be stopped"
        newest = sorted((tmp_path / "c").glob("iter_*"))[-1].name
        if how is signal.SIGTERM:
            assert newest == f"iter_{reached:07d}", "SIGTERM saves where it stops"
        else:
            assert newest <= f"iter_{reached:07d}"
        words = {signal.SIGTERM: f"stopped at iteration {reached} by SIGTERM", signal.SIGINT: "interrupted"}
        assert words.get(how, "") in launch.output()
        # torchrun itself leaves with one; the ranks have nothing to add
        assert launch.output().count("Traceback") <= 1, launch.output()
    undisturbed.start(flags, 2, ROOT, tmp_path / "4.log")
    assert undisturbed.wait(300) == 0, (tmp_path / "4.log").read_text()

    expected, repeated = steps(whole), steps(parts)
    assert [step["iteration"] for step in repeated] == list(range(1, ITERATIONS + 1))
    for a, b in zip(expected, repeated):
        for name in ("loss_hex", "grad_norm_hex", "learning_rate", "tokens_per_expert", "expert_bias_max"):
            assert a[name] == b[name], f"iteration {a['iteration']}: {name}"
    endings = [one.get("ending") for one in read_info(parts)["attempts"]]
    assert endings == ["stopped by SIGTERM", "stopped by SIGINT", None, "finished"], "nobody records a SIGKILL"
    summaries = [json.loads((tmp_path / name).read_text()) for name in ("whole.json", "parts.json")]
    assert summaries[0]["valid_loss"] == summaries[1]["valid_loss"]
    assert summaries[1]["iterations"] == ITERATIONS
    assert summaries[1]["checkpoint"] == str(tmp_path / "c" / f"iter_{ITERATIONS:07d}")
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.5


@pytest.mark.slow
def test_a_mistake_is_told_once_and_every_rank_exits_with_status_2(tmp_path):
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    flags = ["--preset", "tiny", "--mock-data", "--vocab-size", "99", "--load", str(tmp_path)]
    launch = Launch(flags, tmp_path.parent / "mistake.log")
    assert launch.wait() != 0
    output = launch.output()
    assert output.count("is not a checkpoint folder") == 1
    assert "exitcode  : 2" in output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
