"""Where fp32, bf16 and fp16 end: one training on the demo's corpus in each, from one seed, beside each other.

    make demo                                       # prepares corpus, tokenizer and tokens in runs/demo
    python -m benchmarks.precision_losses [--train-iters 400] [--repeats 1] [-- flags for pretrain_moe.py]

A training is chaotic: a change in the last bit grows. How far two equally right runs end from each other is shown by
fp32 runs whose --adam-eps is one, two, ... percent larger (--repeats of them), which is next to nothing; a difference
between dtypes says something only where it is larger.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {"fp32": ["--no-bf16"], "bf16": ["--bf16"], "fp16": ["--no-bf16", "--fp16"]}
_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Train one after another and print the table; exit status 2 where the demo's data is missing."""
    args = _parse(argv)
    data = Path(args.data)
    if not (data / "data" / "train_text_document.bin").exists():
        print(f"--data {data}: no tokens there; run `make demo` first, or name its folder", file=sys.stderr)
        return 2
    runs = dict(FLAGS)
    for number in range(1, args.repeats + 1):
        runs[f"fp32, nudged {number}"] = ["--no-bf16", "--adam-eps", f"1.{number:02}e-8"]
    results = {}
    for name, flags in runs.items():
        print(f"training {name} ({len(results) + 1} of {len(runs)})", file=sys.stderr, flush=True)
        folder = Path(args.out) / name.replace(", ", "-").replace(" ", "-")
        done = _train(args, data, folder, flags)
        if done:
            return done
        results[name] = _read(folder)
    _show(args, results)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.precision_losses", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="runs/demo", help="folder of `make demo` (default: runs/demo)")
    parser.add_argument("--out", default="runs/precision", help="folder for the trainings (default: runs/precision)")
    parser.add_argument("--train-iters", type=int, default=400, help="optimizer steps of each (default: 400)")
    parser.add_argument("--eval-iters", type=int, default=100, help="global batches of the evaluation (default: 100)")
    parser.add_argument("--repeats", type=int, default=1, help="nudged fp32 runs, for the noise (default: 1)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("extra", nargs="*", help="more flags for pretrain_moe.py, after --")
    return parser.parse_args(argv)


def _train(args: argparse.Namespace, data: Path, folder: Path, flags: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["pretrain_moe.py", "--preset", "demo", *flags]
    command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{data}/tokenizer/python.model"]
    command += ["--train-data-path", f"{data}/data/train_text_document"]
    command += ["--valid-data-path", f"{data}/data/valid_text_document", "--data-cache-path", f"{data}/data/cache"]
    command += ["--train-iters", str(args.train_iters), "--eval-iters", str(args.eval_iters), "--log-interval", "20"]
    command += ["--metrics-file", f"{folder}/metrics.jsonl", "--summary-file", f"{folder}/summary.json", *args.extra]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "passive"}
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        print(f"failed, see {folder}/log.txt", file=sys.stderr)
    return done.returncode


def _read(folder: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "loss": json.loads((folder / "summary.json").read_text(encoding="utf-8"))["valid_loss"],
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in steps),
        "memory": max(step["memory_bytes"] for step in steps),
        "skipped": sum(step["skipped"] for step in steps),
    }


def _show(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    oracle = results["fp32"]["loss"]
    print(f"the demo's model and corpus, {args.train_iters} steps, {args.threads} threads")
    print("\n| | validation loss | over fp32's | tokens/s, median | peak memory, MiB | skipped steps |")
    print("|---|---|---|---|---|---|")
    for name, result in results.items():
        print(
            f"| {name} | {result['loss']:.4f} | {result['loss'] / oracle - 1:+.2%} "
            f"| {result['tokens_per_second']:,.0f} | {result['memory'] / _MIB:,.0f} | {result['skipped']} |"
        )


if __name__ == "__main__":
    sys.exit(main())
