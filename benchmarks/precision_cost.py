"""What fp32, bf16 and fp16 cost, also with packed optimizer state: tokens a second, and bytes by what holds them.

    python -m benchmarks.precision_cost [--hidden 1024] [--layers 2] [--tokens 2048] [--rounds 3] [--threads 2]

Each dtype has a process of its own, so that peaks do not add up; rounds are interleaved, so that a busy neighbour slows
all of them. Weights, gradients, master weights and moments are counted tensor by tensor; activations are the distinct
storages that one micro-batch keeps for its backward pass; the peak is the process's resident memory above what it held
before the model was built. A short profile says which operations the time goes to.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as host
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parent.parent
_PACKED = {"bf16": True, "use_precision_aware_optimizer": True}
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "bf16, moments bf16": {**_PACKED, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "bf16, moments int8": {**_PACKED, "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"},
    "bf16, moments and gradients bf16": {**_PACKED, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    | {"grad_reduce_in_bf16": True},
}
KINDS = ("weights", "gradients", "masters", "moments", "activations")
_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison, or with --worker one dtype of it."""
    args = _parse(argv)
    if args.worker:
        return _work(args)
    words = [f"--{name}={getattr(args, name)}" for name in ("hidden", "layers", "tokens", "steps", "threads", "vocab")]
    results: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in DTYPES}
    for number in range(args.rounds):
        for dtype in DTYPES:
            print(f"round {number + 1} of {args.rounds}: {dtype}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks.precision_cost", "--worker", dtype, *words]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                return done.returncode
            results[dtype].append(json.loads(done.stdout.splitlines()[-1]))
    _show(args, results)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.precision_cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size (default: 1024)")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers, the first dense (default: 2)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per step, in sequences of 512 (default: 2048)")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary (default: 4096)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each process (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--json", help="write all measurements to this file")
    parser.add_argument("--worker", choices=DTYPES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """A DeepSeek-V3 in small: latent attention, 16 experts of which a token uses 4, one shared expert."""
    from megatron_moe.config.presets import PRESETS

    width = args.hidden
    return {
        **PRESETS["demo"],
        "num_layers": args.layers,
        "moe_layer_freq": f"[0]+[1]*{args.layers - 1}",
        "hidden_size": width,
        "ffn_hidden_size": 2 * width,
        "num_attention_heads": width // 64,
        "q_lora_rank": width // 4,
        "kv_lora_rank": width // 8,
        "moe_ffn_hidden_size": width // 2,
        "moe_shared_expert_intermediate_size": width // 2,
        "seq_length": 512,
        "micro_batch_size": args.tokens // 512,
        "global_batch_size": args.tokens // 512,
        "mock_data": True,
        "vocab_size": args.vocab,
        "bf16": False,
        **DTYPES[args.worker],
        "initial_loss_scale": 2.0**16,
        "health_interval": 0,
    }


def _built(args: argparse.Namespace) -> tuple[Any, Any, Callable[[], None], int]:
    """Build one dtype's model; return it, its optimizer, a step of it, and the memory's peak before it was built."""
    import torch

    import megatron_moe  # noqa: F401  (adapts the engine to the machine before it is imported)
    from megatron_moe import platform
    from megatron_moe.config.schema import build
    from megatron_moe.data.batches import batch_iterators
    from megatron_moe.data.datasets import build_datasets
    from megatron_moe.data.tokenizer_choice import build_tokenizer
    from megatron_moe.model.build import build_model
    from megatron_moe.optim.optimizer import build_optimizer, build_scheduler
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything
    from megatron_moe.training.step import connect, train_step

    torch.set_num_threads(args.threads)
    run = build(_flags(args))
    pg_collection = groups.initialize(run)
    seed_everything(run)
    before = platform.max_memory_bytes()
    model = build_model(run, pg_collection, run.derived.padded_vocab_size(args.vocab))
    optimizer = build_optimizer(run, model, pg_collection)
    scheduler = build_scheduler(run, optimizer)
    connect(model, optimizer)
    tokenizer = build_tokenizer(run.data, args.vocab)
    dataset, *_ = build_datasets(run, tokenizer, 1000, 0, 0, pg_collection=pg_collection)
    batches = batch_iterators(dataset, run, pg_collection=pg_collection)

    def step() -> None:
        result = train_step(
            model, optimizer, scheduler, batches, num_micro_batches=1, micro_batch_size=run.training.micro_batch_size,
            seq_length=512, pg_collection=pg_collection,
        )  # fmt: skip
        assert result.committed

    return model, optimizer, step, before


def _work(args: argparse.Namespace) -> int:
    """Train one dtype and print a JSON line: seconds of each step, bytes by kind, where the time goes."""
    import torch

    model, optimizer, step, before = _built(args)
    from megatron_moe import platform
    from megatron_moe.engine.optimizer import parts
    from megatron_moe.optim.optimizer import packing_adam
    from megatron_moe.parallel import groups

    weights = list(model[0].parameters())
    step()  # buffers are built, kernels chosen
    seconds = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    peak = platform.max_memory_bytes() - before
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    kept = _Kept(own)  # which keeps them alive through the backward pass, so the peak was read before
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        step()
    masters = [master for part in parts(optimizer) for master in part.get_parameters()]
    states = [item for part in parts(optimizer) for state in part.optimizer.state.values() for item in state.items()]
    of_masters = [value for name, value in states if name in ("low_bits", "carry_bits")]
    of_masters += [
        m for m in masters if packing_adam(optimizer, m) is None and m.untyped_storage().data_ptr() not in own
    ]
    measured = {
        "parameters": sum(weight.numel() for weight in weights),
        "seconds": seconds,
        "weights": _bytes(weights),
        "gradients": _bytes(weight.main_grad for weight in weights),
        "masters": _bytes(of_masters),
        "moments": _bytes(value for name, value in states if name not in ("low_bits", "carry_bits")),
        "activations": sum(kept.storages.values()),
        "peak": peak,
        "profile": _profile(step),
    }
    groups.destroy()
    print(json.dumps(measured))
    return 0


class _Kept:
    """Bytes of the distinct storages that autograd keeps, without the weights."""

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self.storages: dict[int, int] = {}
        self._alive: list[Any] = []  # a freed storage's address could be given to another

    def pack(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.storages[storage.data_ptr()] = storage.nbytes()
            self._alive.append(storage)
        return tensor


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_GROUPS = {
    "matrix products": ("mm", "bmm", "addmm", "linear"),
    "attention": ("scaled_dot_product",),
    "casts and copies": ("_to_copy", "copy_", "aten::to", "clone", "contiguous"),
    "optimizer": ("adam",),
}


def _profile(step: Any) -> dict[str, float]:
    """Share of one step's CPU time by kind of operation."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    times = dict.fromkeys([*_GROUPS, "everything else"], 0.0)
    for event in profile.key_averages():
        kind = next((k for k, names in _GROUPS.items() if any(n in event.key for n in names)), "everything else")
        times[kind] += event.self_cpu_time_total
    total = sum(times.values())
    return {kind: value / total for kind, value in times.items()}


def _show(args: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> None:
    import torch

    names = [name for name, there in torch.cpu.get_capabilities().items() if there is True]
    half = [name for name in names if "bf16" in name or "fp16" in name]
    first = results["fp32"][0]
    print(
        f"hidden {args.hidden}, {args.layers} layers, {first['parameters'] / 1e6:.1f} M parameters, {args.tokens} "
        f"tokens a step, {args.threads} threads, {args.rounds} rounds of {args.steps} steps; {host.machine()}, "
        f"half-precision instructions: {', '.join(half) or 'none'}; torch {torch.__version__}"
    )
    best = {d: min(s for r in rounds for s in r["seconds"]) for d, rounds in results.items()}
    middle = {d: statistics.median(s for r in rounds for s in r["seconds"]) for d, rounds in results.items()}
    held = {d: sum(rounds[0][kind] for kind in KINDS) for d, rounds in results.items()}
    print(f"\n| | {' | '.join(DTYPES)} |\n{'|---' * (len(DTYPES) + 1)}|")
    rows = [
        ("tokens/s, median", [f"{args.tokens / middle[d]:,.0f}" for d in DTYPES]),
        ("tokens/s over fp32's, median", [f"{middle['fp32'] / middle[d]:.2f}" for d in DTYPES]),
        ("tokens/s over fp32's, best", [f"{best['fp32'] / best[d]:.2f}" for d in DTYPES]),
        *((f"{kind}, MiB", [f"{results[d][0][kind] / _MIB:,.0f}" for d in DTYPES]) for kind in KINDS),
        ("all five, MiB", [f"{held[d] / _MIB:,.0f}" for d in DTYPES]),
        ("all five over fp32's", [f"{held[d] / held['fp32']:.2f}" for d in DTYPES]),
        ("peak above the start, MiB", [f"{min(r['peak'] for r in results[d]) / _MIB:,.0f}" for d in DTYPES]),
        *((f"time in {k}", [f"{results[d][0]['profile'][k]:.0%}" for d in DTYPES]) for k in first["profile"]),
    ]
    for name, cells in rows:
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
