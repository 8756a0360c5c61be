"""Where AdamW and Muon end at several learning rates: trainings on the demo's corpus, from one seed.

    make demo                                       # prepares corpus, tokenizer and tokens in runs/demo
    python -m benchmarks.optimizer_losses [--rates 1e-3 2e-3 4e-3] [--train-iters 400] [-- flags for pretrain_moe.py]

Each optimizer is compared at its own best rate. What a difference is worth is in
docs/reference/figures/precision.md: five orders of summation spread one training's loss over 0.12 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.demo_trainings import add_arguments, train

PACKED = ["--use-precision-aware-optimizer", "--exp-avg-sq-dtype", "bf16", "--exp-avg-dtype"]
OPTIMIZERS = {
    "AdamW": [],
    "Muon": ["--optimizer", "muon"],
    "Muon, fp32": ["--optimizer", "muon", "--muon-fp32-matmul-prec", "highest"],
    "Muon, Nesterov": ["--optimizer", "muon", "--muon-nesterov"],
    "Muon, per head": ["--optimizer", "muon", "--muon-split-qkv-per-head"],
    **{f"Muon, {dtype} momentum": ["--optimizer", "muon", *PACKED, dtype] for dtype in ("bf16", "int8", "fp8")},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train one after another and print the table; exit status 2 where the demo's data is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.optimizer_losses", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, "runs/optimizers")
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=["AdamW", "Muon"], help="what to compare"
    )
    parser.add_argument("--rates", nargs="+", default=["1e-3", "2e-3", "4e-3", "8e-3"], help="peak learning rates")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    args = parser.parse_args(argv)
    runs = {
        f"{name}, {rate}": [*OPTIMIZERS[name], "--lr", rate, "--min-lr", str(float(rate) / 10)]
        for name in args.optimizers
        for rate in args.rates
    }
    results = train(args, runs, ranks=1, threads=args.threads)
    if isinstance(results, int):
        return results
    print(f"the demo's model and corpus, {args.train_iters} steps; validation loss in nats per token")
    print(f"\n| | {' | '.join(args.rates)} | tokens/s over {args.optimizers[0]}'s |")
    print("|---" * (len(args.rates) + 2) + "|")
    speed = {
        name: sum(results[f"{name}, {rate}"]["tokens_per_second"] for rate in args.rates) for name in args.optimizers
    }
    for name in args.optimizers:
        losses = [f"{results[f'{name}, {rate}']['loss']:.4f}" for rate in args.rates]
        print(f"| {name} | {' | '.join(losses)} | {speed[name] / speed[args.optimizers[0]]:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
