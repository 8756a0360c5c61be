"""What it costs that every step looks at its gradients, main weights and moments for NaN and infinity.

Run from the repository's root:

    python -m benchmarks.step_checks                       # half a minute on 2 cores
    python -m benchmarks.step_checks --hidden-size 256

One process trains; every other step leaves the look out, so that both kinds see the same machine. The ratio is that of
the medians of one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.report.records import StepRecord
from megatron_moe.report.sink import Sink
from megatron_moe.training import step
from megatron_moe.training.run import pretrain

LOOKS_PER_STEP = 2
"""Calls of `all_finite` in one step: gradients, and what the update starts from."""


class _Seconds(Sink):
    def __init__(self) -> None:
        self.of_steps: list[float] = []

    def step(self, record: StepRecord) -> None:
        self.of_steps.append(record.seconds)


def measure(hidden_size: int, steps: int, bf16: bool) -> dict[str, Any]:
    """Seconds of the steps that look and of those that do not, and the number of parameters."""
    run = build(
        {
            **PRESETS["tiny"],
            "mock_data": True,
            "tokenizer_type": "ByteTokenizer",
            "hidden_size": hidden_size,
            "ffn_hidden_size": 4 * hidden_size,
            "moe_ffn_hidden_size": hidden_size,
            "bf16": bf16,
            "train_iters": 2 * steps + 4,
            "eval_iters": 0,
            "health_interval": 0,
            "log_interval": 2 * steps + 4,
        }
    )
    seconds, look, calls = _Seconds(), step.all_finite, 0

    def every_other_step(tensors: Any, exactly: bool = False) -> Tensor:
        nonlocal calls
        calls += 1
        return look(tensors, exactly) if (calls - 1) // LOOKS_PER_STEP % 2 else torch.tensor(True)

    step.all_finite = every_other_step
    try:
        pretrain(run, also=(seconds,))
    finally:
        step.all_finite = look
    assert calls == LOOKS_PER_STEP * len(seconds.of_steps)
    counted = seconds.of_steps[4:]  # the first ones pay what is paid once
    return {
        "parameters": run.derived.parameter_count(run.derived.padded_vocab_size(257)),
        "looking": counted[1::2],
        "not_looking": counted[::2],
    }


def main(argv: list[str]) -> int:
    """Print the ratio. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=128, help="of the model, default 128")
    parser.add_argument("--steps", type=int, default=60, help="of each kind, default 60")
    parser.add_argument("--bf16", action="store_true", help="default: fp32")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    found = measure(options.hidden_size, options.steps, options.bf16)
    medians = {name: statistics.median(found[name]) for name in ("looking", "not_looking")}
    ratio = medians["looking"] / medians["not_looking"]
    versions = {name: version(name) for name in ("megatron-core", "torch")}
    if options.json:
        print(json.dumps({**found, "ratio": ratio, "threads": torch.get_num_threads(), "versions": versions}))
    else:
        print(", ".join(f"{name} {number}" for name, number in versions.items()))
        dtype = "bf16" if options.bf16 else "fp32"
        threads = torch.get_num_threads()
        print(f"{found['parameters']:,} parameters, {dtype}, {threads} threads, {options.steps} steps of each kind")
        print(f"a step that looks: {medians['looking'] * 1e3:.1f} ms, one that does not: "
              f"{medians['not_looking'] * 1e3:.1f} ms, ratio {ratio:.3f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
