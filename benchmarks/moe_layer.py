"""`make bench`: one MoE layer, forward and backward, ours beside the engine's, transformers' and torchtitan's.

All contestants get the same weights, input, output gradient and routing. Each has to match an fp32 oracle in its
output and all its gradients before it is timed. Rounds are interleaved, so that a busy neighbour slows everybody, and
the order turns from round to round. The yardstick is the bound: the layer's six matrix products as dense ones.
"""

from __future__ import annotations

import argparse
import os
import platform as host
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# Before torch: a thread that waits must not spin on a core that another one could use.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

import megatron_moe  # noqa: F401  (adapts the engine to the machine before it is imported)
from benchmarks.contestants import Bound, Contestant, Skipped, ours, transformers_layer
from benchmarks.engine_layer import engine_grouped, engine_sequential
from benchmarks.measures import Clock, append, draw, operations_and_peak
from benchmarks.plain_layer import plain_layer
from benchmarks.problem import Problem, Shape, make_problem, oracle, relative_error
from benchmarks.torchtitan_layer import torchtitan_layer
from megatron_moe import platform
from megatron_moe.config import schema
from megatron_moe.io.files import replace_json
from megatron_moe.kernels import choice
from megatron_moe.kernels.choice import why_no_triton
from megatron_moe.parallel import groups
from megatron_moe.platform import cpu_half_gemm
from megatron_moe.report.run_info import versions

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-5}
"""Largest relative error against the oracle; bf16 itself rounds to 2^-9 = 0.002, several times along the way."""
BOUND = "bound"


def contestants(pg_collection: Any) -> dict[str, tuple[str, Callable[[Problem], Contestant]]]:
    """Name -> (what it is, how to build it)."""
    sequential = partial(partial, engine_sequential, pg_collection=pg_collection)
    return {
        BOUND: ("six dense torch.mm of equal FLOPs", Bound),
        "ours": ("megatron_moe MoELayer, grouped_mm", partial(ours, backend="grouped_mm")),
        "ours_loop": ("megatron_moe MoELayer, loop", partial(ours, backend="loop")),
        "engine_alltoall": ("megatron-core SequentialMLP, alltoall", sequential(dispatcher="alltoall", fused=False)),
        "engine_fused": ("megatron-core SequentialMLP, fused SwiGLU", sequential(dispatcher="alltoall", fused=True)),
        "engine_allgather": ("megatron-core SequentialMLP, allgather", sequential(dispatcher="allgather", fused=False)),
        "engine_grouped": (
            "megatron-core GroupedMLP, gmm replaced",
            partial(engine_grouped, pg_collection=pg_collection),
        ),
        "hf_grouped_mm": (
            "transformers DeepseekV3MoE, grouped_mm",
            partial(transformers_layer, implementation="grouped_mm"),
        ),
        "hf_eager": ("transformers DeepseekV3MoE, eager", partial(transformers_layer, implementation="eager")),
        "plain": ("plain torch, compiled SwiGLU", plain_layer),
        "torchtitan": ("torchtitan MoE", torchtitan_layer),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a contestant gives a wrong answer."""
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    shape = Shape(args.tokens, args.hidden, args.experts, args.topk, args.ffn, args.shared)
    device = platform.device()
    problem = make_problem(shape, DTYPES[args.dtype], device, args.seed)
    pg_collection = groups.initialize(schema.Run())
    try:
        entries = contestants(pg_collection)
        unknown = sorted(set(args.contestants or ()) - set(entries))
        if unknown:
            print(f"--contestants {' '.join(unknown)}: not one of {', '.join(entries)}", file=sys.stderr)
            return 2
        names = [name for name in entries if name == BOUND or not args.contestants or name in args.contestants]
        facts = _facts(args, shape, device)
        for key, value in facts.items():
            print(f"{key:<9} {value}")
        ready, errors, skipped = _admit(problem, {name: entries[name] for name in names}, TOLERANCE[args.dtype])
        counts = {name: operations_and_peak(contestant) for name, contestant in ready.items()}
        passes = _race(ready, args.rounds, args.warmup, Clock(args.cpu_time))
        times = {name: [both for _, both in pairs] for name, pairs in passes.items()}
        rows = _rows(passes, {name: entries[name][0] for name in ready}, shape, counts)
        _print_table(rows)
        if args.history:
            append(args.history, {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **facts, "results": rows})
        if args.plot:
            draw(args.plot, rows, f"One MoE layer, {args.dtype}, {args.threads} threads")
        wrong = [name for name in names if name in skipped and skipped[name].startswith("WRONG")]
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            replace_json(args.json, {**facts, "results": rows, "errors": errors, "skipped": skipped, "seconds": times})
            print(f"wrote {args.json}")
        return 1 if wrong else 0
    finally:
        groups.destroy()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    default = Shape()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe_layer", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each contestant")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each contestant before those")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="only these, beside the bound (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--history", type=Path, metavar="FILE", help="add facts and results to FILE, a line of JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results into FILE, e.g. bench.png")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count this process's processor seconds, which other programs disturb less; for --threads 1",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("tokens", "hidden", "experts", "topk", "ffn", "shared"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    return parser.parse_args(argv)


def _facts(args: argparse.Namespace, shape: Shape, device: torch.device) -> dict[str, Any]:
    facts = {
        "shape": str(shape),
        "dtype": args.dtype,
        "device": f"{device}: "
        + (torch.cuda.get_device_name() if platform.has_cuda() else f"{os.cpu_count()} x {_processor()}"),
        "threads": args.threads,
        "clock": "processor seconds of this process" if args.cpu_time else "wall clock",
        "kernels": _kernels(),
        "rounds": args.rounds,
        "load": f"{os.getloadavg()[0]:.1f} before the start (other programs on this machine, last minute)",
        "versions": ", ".join(f"{name} {version}" for name, version in (versions() | _competitors()).items()),
    }
    if cpu_half_gemm.multiply_in_fp32(torch.empty(0, dtype=DTYPES[args.dtype], device=device)):
        facts["note"] = (
            "no bf16 instructions are used here: torch's products, and with them the bound, are so slow that "
            "everything else hardly shows; --dtype fp32 tells more here"
        )
    return facts


def _kernels() -> str:
    """Which form of an operation computes in our layer."""
    if platform.has_cuda():
        reason = why_no_triton()
        return "Triton" if reason is None else f"torch ({reason})"
    reason = choice.why_no_c()
    return "C" if reason is None else f"torch ({reason})"


def _processor() -> str:
    """The name of the processor, as Linux knows it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return host.machine()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in fields.items()}
    return found.get("model name", host.machine())


def _competitors() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("transformers", "torchtitan"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _admit(
    problem: Problem, entries: dict[str, tuple[str, Callable[[Problem], Contestant]]], tolerance: float
) -> tuple[dict[str, Contestant], dict[str, dict[str, float]], dict[str, str]]:
    """Build everybody and let those race who match the oracle: (contestants, errors by name, reasons by name)."""
    truth = oracle(problem)
    ready: dict[str, Contestant] = {}
    errors: dict[str, dict[str, float]] = {}
    skipped: dict[str, str] = {}
    print(f"\nrelative error against the fp32 oracle (at most {tolerance:g})")
    for name, (_, build) in entries.items():
        try:
            contestant = build(problem)
        except Skipped as reason:
            skipped[name] = str(reason)
            print(f"  {name:<17} skipped: {reason}")
            continue
        contestant.step()
        results = contestant.results()
        errors[name] = {key: relative_error(results[key], truth[key]) for key in truth if results}
        contestant.clear()
        if results:
            print(f"  {name:<17} " + "  ".join(f"{key} {error:.1e}" for key, error in errors[name].items()))
        wrong = [key for key, error in errors[name].items() if not error <= tolerance]
        if wrong:
            skipped[name] = f"WRONG: {', '.join(wrong)} beyond {tolerance:g}"
            print(f"  {name:<17} {skipped[name]}; it does not race")
        else:
            ready[name] = contestant
    return ready, errors, skipped


def _race(ready: dict[str, Contestant], rounds: int, warmup: int, clock: Clock) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each timed forward pass and step, by contestant; a round has a step of everybody, in turning order."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    names = list(ready)
    for number in range(warmup + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            passes = clock.passes(ready[name])
            if number >= warmup:
                times[name].append(passes)
    return times


def _rows(
    passes: dict[str, list[tuple[float, float]]],
    titles: dict[str, str],
    shape: Shape,
    counts: dict[str, tuple[int, int]],
) -> list[dict[str, Any]]:
    """Return a row for each contestant, the fastest first; its passes are those of its fastest step."""
    steps = {name: [both for _, both in pairs] for name, pairs in passes.items()}
    bound_median, bound_min = statistics.median(steps[BOUND]), min(steps[BOUND])
    rows = []
    for name, pairs in passes.items():
        median = statistics.median(steps[name])
        best, forward = min((both, first) for first, both in pairs)
        rows.append(
            {
                "name": name,
                "what": titles[name],
                "median_ms": 1e3 * median,
                "min_ms": 1e3 * best,
                "forward_ms": 1e3 * forward,
                "backward_ms": 1e3 * (best - forward),
                "tokens_per_second": shape.tokens / median,
                "gflops": shape.flops / best / 1e9,
                "x_bound_median": median / bound_median,
                "x_bound_min": best / bound_min,
                "operations": counts[name][0],
                "peak_bytes": counts[name][1],
            }
        )
    return sorted(rows, key=lambda row: row["x_bound_min"])


def _print_table(rows: list[dict[str, Any]]) -> None:
    titles = ("median ms", "min ms", "forward", "backward", "GFLOP/s", "x bound", "(min)", "ops", "peak MiB")
    widths = (10, 9, 9, 9, 9, 9, 7, 7, 9)
    print("\n" + " " * 42 + "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)))
    for row in rows:
        print(
            f"{row['what']:<42}{row['median_ms']:>10.1f}{row['min_ms']:>9.1f}{row['forward_ms']:>9.1f}"
            f"{row['backward_ms']:>9.1f}{row['gflops']:>9.0f}{row['x_bound_median']:>9.2f}{row['x_bound_min']:>7.2f}"
            f"{row['operations']:>7}{row['peak_bytes'] / 2**20:>9.0f}"
        )
    print("x bound: median step / median step of the bound; (min): the same of the fastest steps. Where other programs")
    print("want the cores too, read that column. Forward, backward and GFLOP/s are of the fastest step, too.")
    print("ops: torch's operations and our Triton kernels in a step; on a CPU ops and peak are of torch's form.")


if __name__ == "__main__":
    raise SystemExit(main())
