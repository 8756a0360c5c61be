"""Where fp32, bf16, fp16, FP8 and packed optimizer state end: one training on the demo's corpus in each, from one seed.

    make demo                                       # prepares corpus, tokenizer and tokens in runs/demo
    python -m benchmarks.precision_losses [--train-iters 400] [--repeats 1] [-- flags for pretrain_moe.py]
    python -m benchmarks.precision_losses --dtypes bf16 fp8 --nudge bf16 fp8 --threads 1
    python -m benchmarks.precision_losses --dtypes fp32 "bf16, moments bf16" --orders --threads 1

A training is chaotic: a change in the last bit grows. How far two equally right runs end from each other is shown by
runs whose --adam-eps is one, two, ... percent larger (--repeats of them, by default of the first dtype), which is next
to nothing, and with --orders by fp32 runs that add the same gradients in other orders; a difference between dtypes says
something only where it is larger.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.demo_trainings import add_arguments, train

FLAGS = {
    "fp32": ["--no-bf16"],
    "bf16": ["--bf16"],
    "fp16": ["--no-bf16", "--fp16"],
    "fp8": ["--bf16", "--fp8-format", "e4m3"],
    "fp8 experts": ["--bf16", "--fp8-format", "e4m3", "--fp8-modules", "experts"],
    "fp8 hybrid": ["--bf16", "--fp8-format", "hybrid"],
    **{
        f"bf16, moments {name}": [
            *("--bf16", "--use-precision-aware-optimizer", "--exp-avg-dtype", first, "--exp-avg-sq-dtype", second)
        ]
        for name, first, second in (
            ("packed fp32", "fp32", "fp32"),
            ("bf16", "bf16", "bf16"),
            ("fp8", "fp8", "fp8"),
            ("int8", "int8", "int8"),
        )
    },
}
_ORDERS = {
    **{f"fp32, micro-batches of {size}": ["--no-bf16", "--micro-batch-size", str(size)] for size in (1, 2, 8)},
    "fp32, experts in a loop": ["--no-bf16", "--moe-expert-backend", "loop"],
}
_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Train one after another and print the table; exit status 2 where the demo's data is missing."""
    args = _parse(argv)
    runs = {name: FLAGS[name] for name in args.dtypes}
    for name in args.nudge or args.dtypes[:1]:
        for number in range(1, args.repeats + 1):
            runs[f"{name}, nudged {number}"] = [*FLAGS[name], "--adam-eps", f"1.{number:02}e-8"]
    if args.orders:
        runs |= _ORDERS
    results = train(args, runs, ranks=1, threads=args.threads)
    if isinstance(results, int):
        return results
    _show(args, results)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.precision_losses", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, "runs/precision")
    parser.add_argument("--dtypes", nargs="+", choices=FLAGS, default=["fp32", "bf16", "fp16"], help="what to train")
    parser.add_argument("--nudge", nargs="+", choices=FLAGS, help="which of these to nudge (default: the first)")
    parser.add_argument("--repeats", type=int, default=1, help="nudged runs of each, for the noise (default: 1)")
    parser.add_argument("--orders", action="store_true", help="also train fp32 in other orders of summation")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    return parser.parse_args(argv)


def _show(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    first = args.dtypes[0]
    oracle = results[first]["loss"]
    print(f"the demo's model and corpus, {args.train_iters} steps, {args.threads} threads")
    print(f"\n| | validation loss | over {first}'s | tokens/s, median | peak memory, MiB | skipped steps |")
    print("|---|---|---|---|---|---|")
    for name, result in results.items():
        print(
            f"| {name} | {result['loss']:.4f} | {result['loss'] / oracle - 1:+.2%} "
            f"| {result['tokens_per_second']:,.0f} | {result['memory'] / _MIB:,.0f} | {result['skipped']} |"
        )


if __name__ == "__main__":
    sys.exit(main())
