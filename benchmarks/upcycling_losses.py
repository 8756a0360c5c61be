"""Where a dense model ends that is trained on, and mixtures of experts that are made of it, on as many tokens.

    make demo                              # prepares corpus, tokenizer and tokens in runs/demo
    python -m benchmarks.upcycling_losses [--train-iters 200]

All begin with the same weights, a new optimizer and the same order of the data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DENSE = "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention"
DENSE += " --num-query-groups 2 --qk-layernorm --min-lr 4e-4 --lr-warmup-iters 20"
BALANCE = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
KINDS = {
    "8 copies, 2 per token": "--num-experts 8 --moe-router-topk 2",
    "16 halves, 4 per token": "--num-experts 16 --moe-router-topk 4 --moe-upcycling-granularity 2",
    "the MLP shared, 8 halves, 2 per token": "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 192"
    " --moe-shared-expert-intermediate-size 384",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train one after another and print the table; exit status 2 where the demo's data is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.upcycling_losses", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="runs/demo", help="folder of `make demo` (default: runs/demo)")
    parser.add_argument("--out", default="runs/upcycling", help="folder for the trainings, not there yet")
    parser.add_argument("--train-iters", type=int, default=200, help="steps of each training (default: 200)")
    args = parser.parse_args(argv)
    data, out = Path(args.data), Path(args.out)
    if not (data / "data" / "train_text_document.bin").exists():
        print(f"--data {data}: no tokens there; run `make demo` first, or name its folder", file=sys.stderr)
        return 2
    common = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{data}/tokenizer/python.model"]
    for split in ("train", "valid"):
        common += [f"--{split}-data-path", f"{data}/data/{split}_text_document"]
    common += f"--data-cache-path {data}/data/cache --seq-length 256 --micro-batch-size 8 --global-batch-size 8".split()
    common += f"--eval-iters 16 --train-iters {args.train_iters} --lr 2e-3".split()
    after = "--use-checkpoint-args --seed 7 --min-lr 2e-4 --lr-warmup-iters 10".split()
    dense = _trained(out / "dense", [*common, *DENSE.split(), "--save", f"{out}/dense"])
    losses = {"dense, before": dense}
    losses["dense"] = _trained(out / "continued", [*common, *after, "--load", f"{out}/dense", "--finetune"])
    for name, kind in KINDS.items():
        made = out / name.replace(", ", "-").replace(" ", "-")
        convert = f"convert --from native --to native --load {out}/dense --save {made} --upcycle {kind}"
        _run(["-m", "megatron_moe", *convert.split()])
        losses[name] = _trained(made, [*common, *after, "--load", str(made), *BALANCE.split()])
    print("\n| | validation loss |\n|---|---|")
    for name, loss in losses.items():
        print(f"| {name} | {loss:.4f} |")
    return 0


def _trained(folder: Path, flags: list[str]) -> float:
    """Train and return the validation loss."""
    summary = folder.with_name(f"{folder.name}.json")
    _run(["pretrain_moe.py", *flags, "--summary-file", str(summary)])
    return float(json.loads(summary.read_text(encoding="utf-8"))["valid_loss"])


def _run(words: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
