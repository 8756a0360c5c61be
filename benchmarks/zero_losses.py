"""Where ZeRO's stages and ZeRO++ end: the demo's model trained with each switch, beside plain data parallelism.

    make demo                                  # prepares corpus, tokenizer and tokens in runs/demo
    python -m benchmarks.zero_losses [--dtypes bf16 fp16] [--train-iters 400] [-- flags for pretrain_moe.py]

Four ranks on this machine; with a secondary partition two of them count as one. A training is chaotic: a change in the
last bit grows. How far equally right runs end from each other is shown by plain runs whose --adam-eps is a percent more
or less, which is next to nothing; the others are set against the mean of the three. There is no run with a secondary
partition alone: it trains bit for bit as stage 3 does (tests/model/test_fully_sharded_quantized_ranks.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.demo_trainings import add_arguments, train

RANKS = 4
BATCH = ["--micro-batch-size", "2"]
DTYPES = {"bf16": ["--bf16"], "fp16": ["--no-bf16", "--fp16"]}
PLAIN = ["--no-use-distributed-optimizer", "--data-parallel-sharding-strategy", "no_shard"]
STAGE_3 = ["--data-parallel-sharding-strategy", "optim_grads_params"]
WEIGHTS, MACHINES = ["--zero-quantized-weights"], ["--zero-hpz-partition-size", "2"]
INT8, INT4 = ["--zero-quantized-gradients", "int8"], ["--zero-quantized-gradients", "int4"]
PLAIN_RUNS = {
    "plain": PLAIN,
    "plain, epsilon larger": [*PLAIN, "--adam-eps", "1.01e-8"],
    "plain, epsilon smaller": [*PLAIN, "--adam-eps", "0.99e-8"],
}
RUNS = {
    "stage 3": STAGE_3,
    "quantised weights": [*STAGE_3, *WEIGHTS],
    "int8 gradients": [*STAGE_3, *INT8],
    "int4 gradients": [*STAGE_3, *INT4],
    "all, int8": [*STAGE_3, *WEIGHTS, *MACHINES, *INT8],
    "all, int4": [*STAGE_3, *WEIGHTS, *MACHINES, *INT4],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train one after another and print a table a dtype; exit status 2 where the demo's data is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.zero_losses", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, "runs/zero")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="runs beside the plain ones")
    args = parser.parse_args(argv)
    for dtype in args.dtypes:
        flags = PLAIN_RUNS | {name: RUNS[name] for name in args.only}
        runs = {f"{dtype}, {name}": [*BATCH, *DTYPES[dtype], *own] for name, own in flags.items()}
        results = train(args, runs, ranks=RANKS, threads=1)
        if isinstance(results, int):
            return results
        _show(args, results, [f"{dtype}, {name}" for name in PLAIN_RUNS])
    return 0


def _show(args: argparse.Namespace, results: dict[str, dict[str, Any]], plain: Sequence[str]) -> None:
    mean = statistics.mean(results[name]["loss"] for name in plain)
    print(f"\nthe demo's model and corpus, {args.train_iters} steps, {RANKS} ranks\n")
    print("| | validation loss | over the mean of plain | skipped steps |\n|---|---|---|---|")
    for name, result in results.items():
        print(f"| {name} | {result['loss']:.4f} | {result['loss'] / mean - 1:+.2%} | {result['skipped']} |")


if __name__ == "__main__":
    sys.exit(main())
