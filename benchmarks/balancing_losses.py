"""Where trainings end, and how even their experts' load is, by what balances them: the demo's corpus, from one seed.

    make demo                                       # prepares corpus, tokenizer and tokens in runs/demo
    python -m benchmarks.balancing_losses [--train-iters 400] [-- flags for pretrain_moe.py]

The experts are not in groups. What a difference of losses is worth is in docs/reference/figures/precision.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.demo_trainings import add_arguments, train

FLAT = ["--moe-router-num-groups", "none", "--moe-router-group-topk", "none", "--no-moe-router-enable-expert-bias"]
KIND = "--moe-router-load-balancing-type"
QUANTILES = [*FLAT[:-1], KIND, "quantile_balancing", "--moe-aux-loss-coeff", "0"]
NONE = [*FLAT, KIND, "none", "--moe-aux-loss-coeff", "0"]
BALANCES = {
    "none": NONE,
    "signs": [*NONE[:4], *NONE[5:], "--moe-router-enable-expert-bias"],
    "aux_loss": [*FLAT, KIND, "aux_loss", "--moe-aux-loss-coeff", "0.01"],
    "quantiles": QUANTILES,
    "quantiles, ema 0.9": [*QUANTILES, "--moe-router-quantile-balancing-ema", "0.9"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train one after another and print the table; exit status 2 where the demo's data is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.balancing_losses", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, "runs/balancing")
    args = parser.parse_args(argv)
    results = train(args, BALANCES, ranks=1, threads=1)
    if isinstance(results, int):
        return results
    print(
        f"the demo's model and corpus, {args.train_iters} steps; load: the busiest expert's over the mean, worst layer"
    )
    print("\n| | validation loss | load, first quarter | load, last quarter |\n|---|---|---|---|")
    for name, result in results.items():
        lines = (Path(args.out) / name.replace(", ", "-").replace(" ", "-") / "metrics.jsonl").read_text("utf-8")
        loads = [load for line in lines.splitlines() if (load := json.loads(line).get("expert_load")) is not None]
        share = max(len(loads) // 4, 1)
        print(f"| {name} | {result['loss']:.4f} | {fmean(loads[:share]):.2f} | {fmean(loads[-share:]):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
