"""The time of an optimizer step by how its state is stored: one weight, updated by each form in turn.

    python -m benchmarks.optimizer_step [--numel 16777216] [--rounds 15] [--threads 2]

A form that stores fewer bytes should be faster in proportion. The ratio is that of nanoseconds per byte that a step
reads and writes, over torch's fused AdamW on fp32 state, fastest round of each.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch

import megatron_moe  # noqa: F401  (adapts the engine to the machine before it is imported)
from megatron_moe.engine.adam import Adam
from megatron_moe.kernels import choice
from megatron_moe.optim.adam import PrecisionAwareAdam
from megatron_moe.precision.packed_state import StochasticRounding

FORMS = {
    "fp32 state, torch": None,
    "packed main weights, moments fp32": ("fp32", "fp32"),
    "packed main weights, moments bf16": ("bf16", "bf16"),
    "packed main weights, moments fp8": ("fp8", "fp8"),
    "packed main weights, moments int8": ("int8", "int8"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Time the forms and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.optimizer_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=2**24, help="elements of the weight (default: 2^24)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: 15)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    steps, moved = {}, {}
    for name, moments in FORMS.items():
        steps[name], moved[name] = _form(args.numel, moments)
    seconds = dict.fromkeys(FORMS, float("inf"))
    for _ in range(args.rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    first = next(iter(FORMS))
    print(f"{args.numel:,} elements, {args.threads} threads, {args.rounds} rounds; kernels: {choice.why_no_c() or 'C'}")
    print("\n| | bytes an element | ms | over fp32's | over fp32's, per byte |\n|---|---|---|---|---|")
    for name in FORMS:
        ratio = seconds[name] / seconds[first]
        per_byte = ratio * moved[first] / moved[name]
        print(f"| {name} | {moved[name]:.1f} | {seconds[name] * 1e3:.1f} | {ratio:.2f} | {per_byte:.2f} |")
    return 0


def _form(numel: int, moments: tuple[str, str] | None) -> tuple[Callable[[], object], float]:
    """Return a step of an optimizer, and the bytes of an element that it reads and writes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(numel, generator=generator)
    if moments is None:
        plain = Adam([weight], lr=1e-3, weight_decay=0.1)
        weight.grad = torch.randn(numel, generator=generator)
        plain.step()
        return plain.step, 28.0
    adam = PrecisionAwareAdam([weight], lr=1e-3, weight_decay=0.1, moment_dtypes=moments)
    adam.allocate()
    adam.pack_main_param(weight, weight.bfloat16())
    adam.place(weight, StochasticRounding(torch.arange(-(-numel // 4096)), 4096, 0, (0, 0)))
    weight.grad = torch.randn(numel, generator=generator)
    adam.step()
    stored = sum(tensor.numel() * tensor.element_size() for tensor in adam.state[weight].values())
    return adam.step, 4 + 2 * (2 + stored / numel)


if __name__ == "__main__":
    sys.exit(main())
