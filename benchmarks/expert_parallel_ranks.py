"""What one rank of `benchmarks.expert_parallel` measures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from benchmarks.contestants import Bound, ours
from benchmarks.engine_layer import engine_sequential
from benchmarks.measures import Clock
from benchmarks.moe_layer import DTYPES, TOLERANCE
from benchmarks.problem import Shape, make_problem, oracle, relative_error
from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.parallel import groups


def measure(argument: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Time every contestant on this rank.

    Returns:
        By name: seconds of each step, error: the largest relative one against the oracle, tolerance.
    """
    run = Run()
    world = dist.get_world_size()
    pg_collection = groups.initialize(replace(run, parallel=replace(run.parallel, expert_model_parallel_size=world)))
    try:
        problem, truth = _own_part(argument, dist.get_rank(), world)
        ready = {
            "six dense torch.mm of equal FLOPs": Bound(problem),
            "megatron_moe MoELayer, grouped_mm": ours(problem, "grouped_mm", pg_collection),
            "megatron-core SequentialMLP": engine_sequential(problem, "alltoall", False, pg_collection),
        }
        found = {
            name: {"seconds": [], "error": _error(contestant, truth), "tolerance": TOLERANCE[argument["dtype"]]}
            for name, contestant in ready.items()
        }
        clock = Clock(cpu=False)
        for number in range(argument["warmup"] + argument["rounds"]):
            for name, contestant in ready.items():
                dist.barrier()
                _, seconds = clock.passes(contestant)
                if number >= argument["warmup"]:
                    found[name]["seconds"].append(seconds)
        return found
    finally:
        groups.destroy()


def _own_part(argument: dict[str, Any], rank: int, world: int) -> tuple[Any, dict[str, Any]]:
    """Return this rank's tokens and experts of a problem that all ranks solve together, and what the oracle says."""
    shape = Shape(**argument["shape"])
    together = replace(shape, tokens=world * shape.tokens)
    whole = make_problem(together, DTYPES[argument["dtype"]], platform.device())
    truth = oracle(whole)
    mine = {name: getattr(whole, name).chunk(world)[rank] for name in ("x", "grad_output", "w1", "w2")}
    known = {name: truth[name].chunk(world)[rank] for name in ("y", "dx", "dw1", "dw2")}
    return replace(whole, shape=shape, **mine), known


def _error(contestant: Any, truth: dict[str, Any]) -> float:
    """The largest error of a step over the oracle's values, 0 for the bound."""
    contestant.step()
    results = contestant.results()
    contestant.clear()
    return max((relative_error(results[key], truth[key]) for key in truth if results), default=0.0)
