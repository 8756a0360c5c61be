"""Output layer and cross entropy: memory and time of the engine's, of our plain path, of ours and torch's in one.

    python -m benchmarks.linear_cross_entropy

Each contestant runs in processes of its own, one step at a time, in turn. Memory is the peak resident size of the
process (the kernel's VmHWM) above what it was with weight, input and libraries loaded, so gradients count. Time is the
fastest step, forward and backward. All get the same numbers, and the same gradient per token from above.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

# Before torch: a thread that waits must not spin on a core that another one could use.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from torch import Tensor

import megatron_moe  # noqa: F401  (adapts the engine to the machine before it is imported)
from megatron_moe.config.schema import Run
from megatron_moe.model.cross_entropy import cross_entropy, linear_cross_entropy
from megatron_moe.parallel import groups
from megatron_moe.platform import cpu_half_gemm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Losses = Callable[[Tensor, Tensor, Tensor], Tensor]


def engines() -> Losses:
    """What the engine's GPTModel does: all logits, then its vocabulary-parallel cross entropy."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    groups.initialize(Run())
    return lambda hidden, weight, labels: vocab_parallel_cross_entropy(cpu_half_gemm.linear(hidden, weight), labels)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What a run does without --cross-entropy-loss-fusion: all logits, then our cross entropy."""
    return cross_entropy(cpu_half_gemm.linear(hidden, weight), labels)


def torchs_own() -> Losses:
    """torch.nn.functional.linear_cross_entropy in chunks as torch chooses them."""
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, labels: F.linear_cross_entropy(
        hidden, weight, labels, reduction="none", options=options
    )


CONTESTANTS: dict[str, Callable[[], Losses]] = {
    "engine": engines,
    "plain": lambda: plain,
    "fused": lambda: linear_cross_entropy,
    "torch": torchs_own,
}


def one_step(losses: Losses, tokens: int, vocab: int, hidden_size: int, dtype: torch.dtype) -> tuple[float, float]:
    """MiB above the start, and seconds, of one step in this process; nothing may have been computed in it before."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:  # drawn in their dtype: no wider copy may raise the peak beforehand
        return torch.empty(shape, dtype=dtype).normal_(generator=generator)

    def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        result = losses(hidden.requires_grad_(), weight.requires_grad_(), labels)
        result.backward(torch.full_like(result, 1 / tokens))

    step(numbers(8, 16), numbers(64, 16), torch.randint(0, 64, (8,), generator=generator))  # loads what it needs
    hidden, weight = numbers(tokens, hidden_size), numbers(vocab, hidden_size) * hidden_size**-0.5
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    before = _resident_kib("VmRSS")
    start = time.perf_counter()
    step(hidden, weight, labels)
    seconds = time.perf_counter() - start
    return (_resident_kib("VmHWM") - before) / 1024, seconds


def _resident_kib(which: str) -> int:
    """VmRSS, the resident size, or VmHWM, its peak. That of getrusage is no use: it starts at the parent's size."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(which))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per dtype and contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--chunk-tokens", type=int, help="of the fused loss; default: as a run has it")
    parser.add_argument("--rounds", type=int, default=3, help="processes per contestant")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--one", choices=CONTESTANTS, help="one step in this process: prints MiB and seconds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.one:
        losses = CONTESTANTS[options.one]()
        if options.chunk_tokens and options.one == "fused":
            losses = partial(losses, chunk_tokens=options.chunk_tokens)
        dtype = DTYPES[options.precision[0]]
        mib, seconds = one_step(losses, options.tokens, options.vocab, options.hidden, dtype)
        print(mib, seconds)
        return 0
    print(f"{options.tokens} tokens, {options.vocab} rows, width {options.hidden}, {options.threads} threads")
    print(f"{'':<14}{'peak MiB':>10}{'of plain':>10}{'seconds':>10}{'of plain':>10}")
    for precision in options.precision:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in CONTESTANTS}
        for _ in range(options.rounds):
            for way in CONTESTANTS:
                found[way].append(_in_a_process(way, precision, options))
        best = {way: (max(m for m, _ in steps), min(s for _, s in steps)) for way, steps in found.items()}
        for way, (mib, seconds) in best.items():
            against = f"{mib / best['plain'][0]:>10.2f}{seconds:>10.2f}{seconds / best['plain'][1]:>10.2f}"
            print(f"{precision + ' ' + way:<14}{mib:>10.0f}{against}")
    return 0


def _in_a_process(way: str, precision: str, options: argparse.Namespace) -> tuple[float, float]:
    sizes = ("--tokens", options.tokens, "--vocab", options.vocab, "--hidden", options.hidden)
    command = [sys.executable, "-m", "benchmarks.linear_cross_entropy", "--one", way, "--precision", precision]
    command += [str(word) for word in (*sizes, "--threads", options.threads)]
    if options.chunk_tokens:
        command += ["--chunk-tokens", str(options.chunk_tokens)]
    mib, seconds = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return float(mib), float(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
