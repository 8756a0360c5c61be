"""What `--log-straggler` costs a step.

Run from the repository's root:

    torchrun --nproc-per-node 2 -m benchmarks.stragglers
    torchrun --nproc-per-node 2 -m benchmarks.stragglers --hidden-size 256

Blocks of steps are watched and not watched in turn, so that both kinds see the same machine. The ratio of the steps'
times is printed, and that of the processor's time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.training import run as training_run
from megatron_moe.training.callback import Step
from megatron_moe.training.callbacks.stragglers import PartClock, Stragglers
from megatron_moe.training.step import StepResult

BLOCK = 10
"""Steps that are watched, or not, one after the other."""


class Alternating(Stragglers):
    """Watches every other block of steps."""

    seconds: dict[str, list[float]] = {"watched": [], "not_watched": []}  # noqa: RUF012 (of the one run)
    processor_seconds: dict[str, list[float]] = {"watched": [], "not_watched": []}  # noqa: RUF012

    def before_step(self, step: Step) -> None:
        self._is_watched = step.iteration // BLOCK % 2 == 1
        if step.iteration % BLOCK == 0 or step.iteration == 1:
            self._take()
            self.close()
            self._clock = PartClock(on_device=False)
            if self._is_watched:
                self._clock.start()
        self._began = time.perf_counter(), time.process_time()

    def after_step(self, step: Step, result: StepResult) -> None:
        if self._is_watched:
            super().after_step(step, result)
        if step.iteration >= BLOCK:  # the first ones pay what is paid once
            kind = "watched" if self._is_watched else "not_watched"
            self.seconds[kind].append(time.perf_counter() - self._began[0])
            self.processor_seconds[kind].append(time.process_time() - self._began[1])


def measure(hidden_size: int, steps: int) -> dict[str, Any]:
    """Seconds of both kinds of steps on this rank, and the number of parameters."""
    run = build(
        {
            **PRESETS["tiny"],
            "mock_data": True,
            "tokenizer_type": "ByteTokenizer",
            "hidden_size": hidden_size,
            "ffn_hidden_size": 4 * hidden_size,
            "moe_ffn_hidden_size": hidden_size,
            "train_iters": 2 * steps + BLOCK - 1,
            "eval_iters": 0,
            "health_interval": 0,
            "log_interval": 2 * steps + BLOCK,
            "log_straggler": True,
        }
    )
    usual, training_run.Stragglers = training_run.Stragglers, Alternating  # type: ignore[misc]
    try:
        training_run.pretrain(run)
    finally:
        training_run.Stragglers = usual  # type: ignore[misc]
    parameters = run.derived.parameter_count(run.derived.padded_vocab_size(257))
    return {"parameters": parameters, "seconds": Alternating.seconds, "processor": Alternating.processor_seconds}


def main(argv: list[str]) -> int:
    """Print the ratios of this rank. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=128, help="of the model, default 128")
    parser.add_argument("--steps", type=int, default=200, help="of each kind, default 200")
    options = parser.parse_args(argv)
    found = measure(options.hidden_size, options.steps)
    shown = {"parameters": found["parameters"], "threads": torch.get_num_threads(), "steps": options.steps}
    for name in ("seconds", "processor"):
        watched, not_watched = (statistics.median(found[name][kind]) for kind in ("watched", "not_watched"))
        shown[name] = {"watched": watched, "not_watched": not_watched, "ratio": watched / not_watched}
    shown["versions"] = {name: version(name) for name in ("megatron-core", "torch")}
    print(json.dumps(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
