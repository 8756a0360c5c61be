"""The command line of megatron-moe plan: plan a run, print and write the plan."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, replace
from megatron_moe.hf.config import filled_in
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.program import DONE, FAILED, run_program, say
from megatron_moe.platform import host
from megatron_moe_tools import compat
from megatron_moe_tools.plan.layouts import (
    RECOMPUTATION,
    Machine,
    legal,
    nearest_legal,
    quoted,
    recomputed,
    require_a_layout,
    spelled,
    vocabulary,
    with_batch,
)
from megatron_moe_tools.plan.report import comparison_report, fit_report, text_report

NAME = "megatron-moe plan"

_OF_SEARCH = {
    "node_bandwidth": "GB/s that a rank sends to its machine",
    "network_bandwidth": "GB/s that a rank sends to other machines",
    "host_bandwidth": "GB/s that a device exchanges with host memory",
    "memory_bandwidth": "GB/s that a device reads or writes of its own memory",
    "host_memory_gib": "memory of a machine, of which what is offloaded leaves a tenth",
}

_architecture = partial(filled_in, weights=False)  # no weight is read, so none has to be there

_logger = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags; all other flags are those of megatron-moe train."""
    p = Parser(
        prog=NAME,
        usage="%(prog)s --world-size N [--json FILE] [options] [the run's flags]",
        description="Plan a run: parameters, memory, traffic and speed of every rank, without starting any of them.",
        epilog="Exit status: 0 planned; 1 nothing fits --fit; 2 a mistake in the flags, or a layout that cannot be. "
        "Other flags, such as --preset deepseek-v3 --pipeline-model-parallel-size 16, are those of megatron-moe train.",
        allow_abbrev=False,
    )
    p.add_argument("--world-size", type=_positive(int), required=True, metavar="N", help="number of ranks")
    p.add_argument("--json", metavar="FILE", help="write the plan as JSON")
    p.add_argument(
        "--device",
        choices=host.DEVICE_KINDS,
        default=Machine.device,
        help=f"device that the run is planned for (default: {Machine.device})",
    )
    p.add_argument(
        "--gpus-per-node", type=_positive(int), default=8, metavar="N", help="ranks of one machine (default: 8)"
    )
    p.add_argument("--device-memory-gib", type=_positive(float), metavar="X", help="memory of a device (default: 80)")
    p.add_argument(
        "--fit",
        type=_positive(float),
        metavar="GIB",
        help="look for the fastest layout that leaves a tenth of a device of GIB free, and plan it; layout flags that "
        "are given are kept",
    )
    for name, what in _OF_SEARCH.items():
        default = getattr(Machine, name)
        p.add_argument(
            f"--{name.replace('_', '-')}",
            type=_positive(float),
            metavar="X",
            help=f"for --fit: {what} (default: {default:g})",
        )
    p.add_argument(
        "--mfu",
        type=_positive(float),
        default=0.4,
        metavar="X",
        help="assumed share of the peak (default: 0.4)",
    )
    p.add_argument(
        "--imbalance",
        type=_positive(float),
        default=1.0,
        metavar="X",
        help="rows that a rank's experts get, over the mean (default: 1)",
    )
    p.add_argument("--alternatives", type=int, default=5, metavar="N", help="layouts nearby to show (default: 5)")
    return p


def main(argv: list[str]) -> int:
    """Print the plan and return the exit status."""
    return run_program(NAME, _main, argv, rank=0)


def _main(argv: list[str]) -> int:
    flags, rest = parser().parse_known_args(argv)
    require_writable("--json", flags.json)
    if flags.mfu > 1:
        raise ConfigError(f"--mfu {flags.mfu:g}: is a share of the peak, at most 1; e.g. --mfu 0.4")
    if flags.imbalance < 1:
        raise ConfigError(f"--imbalance {flags.imbalance:g}: is the most over the mean; use 1 or more")
    if flags.alternatives < 0:
        raise ConfigError(f"--alternatives {flags.alternatives}: is a number of layouts; 0 shows none")
    _require_one_size(flags)
    given = compat.parse(rest, _architecture, flags.world_size)
    run = _traceable(given)
    for note in run.warnings:
        say(note)
    vocabulary(run)
    if flags.fit is None:
        _check(run, flags.world_size)
    with warnings.catch_warnings(), _progress():
        # The engine's advice is for those who wrote its configuration.
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        plan = _plan(run, flags) if flags.fit is None else _fit(run, rest, flags)
    if flags.json is not None:
        replace_json(Path(flags.json), plan)
        say(f"wrote {flags.json}")
    return DONE if flags.fit is None or plan["fit"]["fits"] else FAILED


def _require_one_size(flags: argparse.Namespace) -> None:
    """Refuse a second size of the device, and what is read by the search alone without one."""
    if flags.fit is not None and flags.device_memory_gib is not None:
        raise ConfigError(
            f"--fit {flags.fit:g}, --device-memory-gib {flags.device_memory_gib:g}: both are the memory of a device; "
            "keep --fit to look for a layout, or the other to plan the one that is given"
        )
    for name in _OF_SEARCH:
        value = getattr(flags, name)
        if flags.fit is None and value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value:g}: is read where layouts are compared by their time; add --fit "
                f"{Machine.memory_gib:g}, or drop it"
            )


def _fit(run: Run, rest: list[str], flags: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of the fastest layout that fits, or of the least; print it with the flags that ask for it."""
    run, machine = with_batch(run, flags.world_size), _machine(run, flags)
    require_a_layout(run, flags.world_size, machine)
    from megatron_moe_tools.plan.fit import fitted_plan

    fitted, plan = fitted_plan(run, flags.world_size, machine, flags.alternatives, {})
    added = spelled(compat.parse(rest, _architecture, flags.world_size), fitted)
    # What is printed is what was planned: the same parser reads it, and the rules allow it.
    again = compat.parse([*rest, *added], _architecture, flags.world_size)
    assert spelled(again, fitted) == [], (added, spelled(again, fitted))
    rules.check_layout(again, flags.world_size)
    plan["fit"]["flags"] = [*rest, *added]
    print(fit_report(plan, quoted([*rest, *added])), end="", flush=True)
    return plan


def _machine(run: Run, flags: argparse.Namespace) -> Machine:
    """Return the machines that the flags describe."""
    return Machine(
        device=flags.device,
        gpus_per_node=flags.gpus_per_node,
        memory_gib=flags.fit or flags.device_memory_gib or Machine.memory_gib,
        peak_tflops=run.logging.peak_tflops or Machine.peak_tflops,
        mfu=flags.mfu,
        imbalance=flags.imbalance,
        **{name: getattr(flags, name) or getattr(Machine, name) for name in _OF_SEARCH},
    )


def _traceable(run: Run) -> Run:
    """Return `run` with our own parts in place of those that cannot be traced without their tensors' values."""
    changes: dict[str, Any] = {}
    if run.model.transformer_impl != "local":
        changes |= {"transformer_impl": "local", "attention_softmax_in_fp32": True}
    if run.moe.num_experts is not None and run.moe.moe_expert_backend in ("te", "loop"):
        changes["moe_expert_backend"] = "grouped_mm"
    if run.precision.fp8_format is not None:
        say(f"--fp8-format {run.precision.fp8_format}: is planned as emulated, with its buffers; speed is that of bf16")
    if changes:
        words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items() if value is not True)
        say(f"planned with {words}: parameters and traffic are the same, memory and speed of other kernels are not")
    return replace(run, **changes)


def _check(run: Run, world_size: int) -> None:
    """Apply the rules for that many ranks; a refusal names neighbouring layouts that they allow."""
    try:
        rules.check_layout(run, world_size)
    except ConfigError as error:
        near = nearest_legal(run, world_size, 5)
        shown = "".join(f"\n  {words}" for words, _ in near)
        raise ConfigError(
            f"{error}" + (f"\nnearest legal layouts, each by what changes:{shown}" if near else "")
        ) from None


def _plan(run: Run, flags: argparse.Namespace) -> dict[str, Any]:
    """Return the plan; its text is printed as soon as it is known, that of the comparisons after it."""
    # Not before the flags are right: loading torch and the engine takes seconds.
    from megatron_moe_tools.plan.plan import make_plan, peak_gib, ranked, recommended_stage

    machine = _machine(run, flags)
    known: dict[Any, Any] = {}
    plan = make_plan(run, flags.world_size, machine, known)
    print(text_report(plan), end="", flush=True)
    _logger.info("comparing recomputation, routing and layouts nearby")
    plan["recomputation"] = {
        kind: peak_gib(other, flags.world_size, machine, known)
        for kind in RECOMPUTATION
        if legal(other := recomputed(run, kind), flags.world_size)
    }
    plan["imbalances"] = {}
    if run.moe.num_experts is not None and run.parallel.expert_model_parallel_size > 1:
        for imbalance in (flags.imbalance, 2 * flags.imbalance):
            plan["imbalances"][f"{imbalance:g}"] = peak_gib(run, flags.world_size, machine, known, imbalance)
    plan["alternatives"] = (
        ranked(run, flags.world_size, machine, flags.alternatives, known) if flags.alternatives > 0 else []
    )
    plan["zero"] = recommended_stage(run, flags.world_size, machine, known)
    print(comparison_report(plan), end="", flush=True)
    return plan


@contextmanager
def _progress() -> Iterator[None]:
    """Print what the planner logs to stderr: a line at the beginning of each stage."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{NAME}: %(message)s"))
    package = logging.getLogger(__package__)
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)


def _positive(kind: type) -> Any:
    def convert(text: str) -> Any:
        number = kind(text)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: must be above 0")
        return number

    convert.__name__ = kind.__name__
    return convert
