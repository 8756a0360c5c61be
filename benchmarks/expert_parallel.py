"""One MoE layer over the ranks of an expert-parallel group with gloo, ours beside the engine's and the bound.

    python -m benchmarks.expert_parallel [--ranks 2] [--tokens 2048] [--dtype bf16] [--rounds 30]

Ranks are processes of this machine with one thread each; tokens are those of a rank. Everyone has to match an fp32
oracle before it is timed. Ranks start a step together, and the slowest one's time counts. The bound is that of a rank's
own tokens, without any exchange.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import fields

from benchmarks.problem import Shape
from megatron_moe_tools.launch.local_ranks import LocalRanks


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; exit status 1 if somebody gives a wrong answer."""
    from benchmarks.expert_parallel_ranks import measure

    args = _parse(argv)
    shape = {name: getattr(args, name) for name in ("tokens", "hidden", "experts", "topk", "ffn", "shared")}
    argument = {"shape": shape, "dtype": args.dtype, "rounds": args.rounds, "warmup": args.warmup}
    with LocalRanks(measure, args.ranks, seconds=1800, threads=1) as ranks:
        found = ranks.call(argument, args.ranks)
    print(f"{args.ranks} ranks, {args.dtype}, each {Shape(**shape)}")
    print(f"{'':<36}{'median ms':>10}{'min ms':>8}{'x bound':>9}{'(min)':>7}  largest error")
    wrong = False
    bound: list[float] = []
    for name in found[0]:
        times = [max(step) for step in zip(*(one[name]["seconds"] for one in found), strict=True)]
        error = max(one[name]["error"] for one in found)
        wrong |= not error <= found[0][name]["tolerance"]
        bound = bound or times
        print(
            f"{name:<36}{1e3 * statistics.median(times):>10.1f}{1e3 * min(times):>8.1f}"
            f"{statistics.median(times) / statistics.median(bound):>9.2f}{min(times) / min(bound):>7.2f}  {error:.1e}"
        )
    return int(wrong)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expert_parallel", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each contestant")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each contestant before those")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    for field in fields(Shape):
        if field.type == "int":
            default = 2048 if field.name == "tokens" else field.default
            parser.add_argument(f"--{field.name}", type=int, default=default)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
