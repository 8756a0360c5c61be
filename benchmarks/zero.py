"""ZeRO's stages and ZeRO++: the bytes a rank holds and sends, and what quantising does to gradients and losses.

    python -m benchmarks.zero [--ranks 4] [--per-machine 2] [--hidden 256] [--layers 4] [--json FILE]

Ranks are processes of this machine; `--per-machine` of them count as one machine. Weights, gradients, masters and
moments are counted tensor by tensor and stand beside the planner's figures; the peak is that of the last of a few
steps, of everything that torch allocated. Sent bytes are those of the tensors that are given to the collectives. Each
quantised gather and reduction of a few steps is compared with the same one in fp64: the error of a unit's numbers over
their norm, and the largest error of a number over what its roundings to half a step allow; beside it the error of what
a rank sends, rounded to the nearest and at random.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_moe.config.presets import PRESETS
from megatron_moe_tools.launch.local_ranks import LocalRanks

STAGES = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
WEIGHTS, INT8, INT4 = (
    {"zero_quantized_weights": True},
    {"zero_quantized_gradients": "int8"},
    {"zero_quantized_gradients": "int4"},
)
_STEPS = 10
_ROUNDINGS = ("nearest", "stochastic")
KINDS = ("weights", "gradients", "masters", "moments")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print all tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.zero", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the largest job (default: 4)")
    parser.add_argument("--per-machine", type=int, default=2, help="ranks that count as one machine (default: 2)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="layers, the first dense (default: 4)")
    parser.add_argument("--json", help="write all measurements to this file")
    args = parser.parse_args(argv)
    from benchmarks.zero_ranks import measure

    with LocalRanks(measure, args.ranks, seconds=600, threads=1) as ranks:
        found = {"memory": _memory(args, ranks), "sent": _sent(args, ranks), "errors": _errors(args, ranks)}
    if args.json is not None:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def _flags(args: argparse.Namespace, stage: int, **more: Any) -> dict[str, Any]:
    """A DeepSeek-V3 in small whose state dominates: short sequences, a small vocabulary."""
    width = args.hidden
    return {
        **PRESETS["tiny"],
        "num_layers": args.layers,
        "moe_layer_freq": f"[0]+[1]*{args.layers - 1}",
        "hidden_size": width,
        "ffn_hidden_size": 2 * width,
        "num_attention_heads": 4,
        "moe_ffn_hidden_size": width // 2,
        "moe_shared_expert_intermediate_size": width // 2,
        "seq_length": 32,
        "micro_batch_size": 1,
        "global_batch_size": args.ranks,
        "vocab_size": 256,
        "mock_data": True,
        "health_interval": 0,
        "use_distributed_optimizer": False,
        "data_parallel_sharding_strategy": STAGES[stage],
        **more,
    }


def _measured(args: argparse.Namespace, ranks: LocalRanks, number: int, flags: dict[str, Any], **more: Any) -> Any:
    argument = {"flags": flags, "steps": 2, "per_machine": args.per_machine, "errors": False, **more}
    return ranks.call(argument, number)[0]


def _memory(args: argparse.Namespace, ranks: LocalRanks) -> list[dict[str, Any]]:
    from megatron_moe.config.schema import build
    from megatron_moe_tools.plan.plan import rank_memory
    from megatron_moe_tools.plan.tracing import trace_ranks

    rows: list[dict[str, Any]] = []
    columns = [f"{name:>11}" for name in (*KINDS, "all")]
    print(f"{'bytes of a rank, bf16':<22}{''.join(columns)} of plain plan/it        peak of plain")
    number = 1
    while number <= args.ranks:
        plain: dict[str, Any] = {}
        for stage in STAGES:
            flags = _flags(args, stage, bf16=True)
            row = _measured(args, ranks, number, flags)
            run = build(flags)
            (trace,) = trace_ranks(run, number, run.derived.padded_vocab_size(256), device="cpu", imbalance=1.0)
            planned = rank_memory(run, trace, number)
            row |= {"ranks": number, "stage": stage, "all": sum(row[kind] for kind in KINDS)}
            row["plan"] = planned.weights + planned.gradients + planned.optimizer
            plain = plain or row
            shown = "".join(f"{row[kind]:11,}" for kind in KINDS)
            print(
                f"{number} ranks, stage {stage:<8} {shown} {row['all']:10,} {row['all'] / plain['all']:8.3f}"
                f" {row['plan'] / row['all']:7.3f} {row['peak']:11,} {row['peak'] / plain['peak']:8.3f}"
            )
            rows.append(row)
        number *= 2
    return rows


def _sent(args: argparse.Namespace, ranks: LocalRanks) -> list[dict[str, Any]]:
    machine = {"zero_hpz_partition_size": args.per_machine}
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("fp32, stage 2", 2, {}),
        ("fp32, stage 3", 3, {}),
        ("fp32, quantised weights", 3, WEIGHTS),
        ("fp32, int8 gradients", 3, INT8),
        ("fp32, int4 gradients", 3, INT4),
        ("bf16, stage 3", 3, {"bf16": True}),
        ("bf16, quantised weights", 3, {"bf16": True, **WEIGHTS}),
        ("bf16, secondary partition", 3, {"bf16": True, **machine}),
        ("bf16, all, int8", 3, {"bf16": True, **WEIGHTS, **INT8, **machine}),
        ("bf16, all, int4", 3, {"bf16": True, **WEIGHTS, **INT4, **machine}),
    ]
    rows: list[dict[str, Any]] = []
    print(
        f"\nsent by a rank of {args.ranks} in a step        all-gather reduce-scatter    all-to-all  to another machine"
    )
    for name, stage, more in cases:
        sent = _measured(args, ranks, args.ranks, _flags(args, stage, **more))["sent"]
        away = sum(size for kind, size in sent.items() if kind.endswith("away"))
        shown = "".join(f"{sent.get(kind, 0):15,}" for kind in ("all-gather", "reduce-scatter", "all-to-all"))
        print(f"{name:<30} {shown} {away:15,}")
        rows.append({"case": name, **sent, "to another machine": away})
    return rows


def _errors(args: argparse.Namespace, ranks: LocalRanks) -> list[dict[str, Any]]:
    machine = {"zero_hpz_partition_size": args.per_machine}
    cases: dict[str, dict[str, Any]] = {
        "int8, one machine": INT8,
        "int4, one machine": INT4,
        "int8, machines": {**INT8, **machine},
        "int4, machines": {**INT4, **machine},
        "all, int8": {**WEIGHTS, **INT8, **machine},
        "all, int4": {**WEIGHTS, **INT4, **machine},
    }
    columns = [f"{name:>14}" for name in ("weights", "of its bound", "gradients", "of its bound", *_ROUNDINGS)]
    print(f"\nlargest error of {_STEPS} steps, bf16{''.join(columns)}")
    rows = []
    for name, more in cases.items():
        flags = _flags(args, 3, bf16=True, **more)
        every = ranks.call(
            {"flags": flags, "steps": _STEPS, "per_machine": args.per_machine, "errors": True}, args.ranks
        )
        kinds = ("weights", "weights of bound", "gradients", "gradients of bound", *_ROUNDINGS)
        row = {kind: max(rank["errors"].get(kind, 0.0) for rank in every) for kind in kinds}
        print(f"{name:<30}" + "".join(f"{row[kind]:14.4f}" for kind in kinds))
        rows.append({"case": name, **row})
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
