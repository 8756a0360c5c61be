"""Trainings of the demo's model on its corpus, one after another, for benchmarks that compare where they end."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options that `train` reads."""
    parser.add_argument("--data", default="runs/demo", help="folder of `make demo` (default: runs/demo)")
    parser.add_argument("--out", default=out, help=f"folder for the trainings (default: {out})")
    parser.add_argument("--train-iters", type=int, default=400, help="optimizer steps of each (default: 400)")
    parser.add_argument("--eval-iters", type=int, default=100, help="global batches of the evaluation (default: 100)")
    parser.add_argument("extra", nargs="*", help="more flags for pretrain_moe.py, after --")


def train(
    args: argparse.Namespace, runs: dict[str, list[str]], ranks: int, threads: int
) -> dict[str, dict[str, Any]] | int:
    """Train and return the results by name, or an exit status: 2 where the demo's data is missing.

    A training that `args.out` has with the same flags is not repeated.

    Args:
        runs: name -> flags of pretrain_moe.py.
        ranks, threads: processes of each training, and threads of each process.
    """
    data = Path(args.data)
    if not (data / "data" / "train_text_document.bin").exists():
        print(f"--data {data}: no tokens there; run `make demo` first, or name its folder", file=sys.stderr)
        return 2
    results = {}
    for name, flags in runs.items():
        print(f"training {name} ({len(results) + 1} of {len(runs)})", file=sys.stderr, flush=True)
        folder = Path(args.out) / name.replace(", ", "-").replace(" ", "-")
        done = _train(_command(args, data, folder, flags, ranks), folder, threads)
        if done:
            return done
        results[name] = _read(folder)
    return results


def _command(args: argparse.Namespace, data: Path, folder: Path, flags: list[str], ranks: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["pretrain_moe.py", "--preset", "demo", *flags]
    command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{data}/tokenizer/python.model"]
    command += ["--train-data-path", f"{data}/data/train_text_document"]
    command += ["--valid-data-path", f"{data}/data/valid_text_document", "--data-cache-path", f"{data}/data/cache"]
    command += ["--train-iters", str(args.train_iters), "--eval-iters", str(args.eval_iters), "--log-interval", "20"]
    command += ["--metrics-file", f"{folder}/metrics.jsonl", "--summary-file", f"{folder}/summary.json", *args.extra]
    return command


def _train(command: list[str], folder: Path, threads: int) -> int:
    stamp = folder / "command.json"
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == command:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        print(f"failed, see {folder}/log.txt", file=sys.stderr)
    else:
        stamp.write_text(json.dumps(command), encoding="utf-8")
    return done.returncode


def _read(folder: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "loss": json.loads((folder / "summary.json").read_text(encoding="utf-8"))["valid_loss"],
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in steps),
        "memory": max(step["memory_bytes"] for step in steps),
        "skipped": sum(step["skipped"] for step in steps),
    }
