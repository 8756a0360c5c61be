"""What the tests of re-sharding and resuming share: layouts, a small model on real tokens, and comparing steps."""

import json
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.helpers import trained_steps
from tests.helpers.trained_steps import OPTIMIZERS, SMALL, VOCABULARY, differing, tensors

TINY = {
    **SMALL,
    "moe_layer_freq": "[1,1]",
    "mock_data": False,
    "vocab_size": VOCABULARY,
    "tokenizer_type": "NullTokenizer",
    "global_batch_size": 8,
    "split": "1,0,0",
}


def layout(tp: int = 1, pp: int = 1, ep: int = 1, **more: Any) -> dict[str, Any]:
    flags = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    return {**flags, "sequence_parallel": tp > 1, **more}


# (TP, PP, EP) -> ranks and flags
LAYOUTS: dict[tuple[int, int, int], tuple[int, dict[str, Any]]] = {
    sizes: (sizes[0] * sizes[1] * sizes[2], layout(*sizes))
    for sizes in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4))
}

MODES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16, distributed": OPTIMIZERS["bf16, distributed"]}


def corpus(folder: Path, documents: int = 64, seed: int = 3) -> str:
    """The prefix of a small indexed dataset of random ids."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = numpy.random.default_rng(seed)
    prefix = str(folder / "corpus")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(documents):
        document = random.integers(0, VOCABULARY, random.integers(30, 200))
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


# ---- on the ranks


def trained(flags: dict[str, Any]) -> dict[str, Any]:
    """A whole run; its summary."""
    return trained_steps.trained({**TINY, **flags})


def moved(flags: dict[str, Any]) -> list[dict[str, Any]]:
    """A run that saves what it loaded before it trains, and nothing else; the exact records of its own steps."""
    return trained_steps.moved({**TINY, **flags})


def refusal(flags: dict[str, Any]) -> str:
    """What a run is refused with."""
    return trained_steps.refusal({**TINY, **flags})


# ---- reading steps back


def plain_values(step: Path) -> dict[str, Any]:
    """What the optimizer keeps beside its tensors (steps, learning rates, loss scale), by its place."""
    values, _ = tree_flatten_with_path(torch.load(step / "common.pt", weights_only=False))
    return {keystr(place): value.tolist() if isinstance(value, torch.Tensor) else value for place, value in values}


def state_of(step: Path) -> dict[str, Any]:
    return json.loads((step / "state.json").read_text())


COUNTERS = ("iteration", "consumed_samples", "skipped_iterations", "scheduler", "records", "data", "tokenizer")


def compared(step: Path, copy: Path, known: dict[str, torch.Tensor] | None = None) -> list[str]:
    """What differs between a step and the same step saved by another layout, in words. known: the step's tensors."""
    found = [f"tensor {key}" for key in differing(tensors(step) if known is None else known, tensors(copy))]
    one, two = plain_values(step), plain_values(copy)
    found += [f"value {place}" for place in sorted(one.keys() | two.keys()) if one.get(place) != two.get(place)]
    first, second = state_of(step), state_of(copy)
    return found + [f"state {name}" for name in COUNTERS if first[name] != second[name]]


def next_step_differs(recorded: dict[str, Any], now: dict[str, Any], *, to_the_bit: bool, fp32: bool) -> list[str]:
    """What is wrong with the step after a move, held against the same step of the run that was not moved."""
    if to_the_bit:
        return [name for name in recorded if recorded[name] != now[name]]
    wrong = [name for name in ("iteration", "data_hash", "learning_rate_hex", "skipped") if recorded[name] != now[name]]
    loss, other = float.fromhex(recorded["loss_hex"]), float.fromhex(now["loss_hex"])
    if abs(loss - other) > (1e-6 if fp32 else 1e-3) * abs(loss):
        wrong.append(f"loss {other}, not moved {loss}")
    return wrong


def lines(metrics_file: Path) -> list[dict[str, Any]]:
    """The exact records of a metrics file."""
    from megatron_moe.report.jsonl import read_steps
    from megatron_moe.report.records import exact

    return [exact(record) for record in read_steps(metrics_file)]


def incarnations(gloo: Any, folder: Path, ranks: int, flags: dict[str, Any], lengths: list[int]) -> list[str]:
    """A run in as many pieces as there are `lengths` (steps of each), held against the same run in one piece.

    Every other piece believes to be the last: its --train-iters ends with it, and the next one makes the run longer.

    Returns:
        What differs: lines of the log, tensors and values of the last step.
    """
    total = sum(lengths)
    flags = {**flags, "train_iters": total, "lr_decay_iters": total}
    whole, pieces = folder / "whole", folder / "pieces"
    files = {"save": str(whole), "metrics_file": str(folder / "whole.jsonl")}
    gloo.run_within(300 + 10.0 * total, ranks, trained, flags={**flags, **files})
    part = {**flags, "save": str(pieces), "metrics_file": str(folder / "pieces.jsonl"), "keep_last_k": 2}
    done = 0
    for number, length in enumerate(lengths):
        done += length
        load = {"load": str(pieces)} if number else {}
        end = {"exit_interval": done} if number % 2 else {"train_iters": done}
        gloo.run(ranks, trained, flags={**part, **load, **end})
    one, two = lines(folder / "whole.jsonl"), lines(folder / "pieces.jsonl")
    found = [] if len(one) == len(two) == total else [f"{len(two)} lines instead of {len(one)}"]
    found += [f"line of iteration {a['iteration']}" for a, b in zip(one, two) if a != b]
    name = f"iter_{total:07d}"
    return found + compared(whole / name, pieces / name)
