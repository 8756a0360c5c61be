"""The flags of tools/doctor.py, one visit in order, and its exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_moe.config import cli, derived, rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, flatten, replace
from megatron_moe.conversion.architecture import filled_in
from megatron_moe.doctor.assemble import Whole, assemble
from megatron_moe.doctor.compare import FP32, compare
from megatron_moe.doctor.launch import RankFailure, Ranks
from megatron_moe.doctor.layouts import Choice, Layout, alone, choose
from megatron_moe.doctor.measure import Request
from megatron_moe.doctor.report import Finding, Report, details, line
from megatron_moe.doctor.shrink import PADDED_VOCABULARY, changes, small
from megatron_moe.doctor.smell import smells
from megatron_moe.report.files import replacing
from megatron_moe.report.summary import versions
from megatron_moe.training.audit import audited_run

SAME, DIFFERENT, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
DEFAULT = ["--preset", "demo"]
# Scores of two layouts differ by some 1e-7; a choice that is decided by less than this says nothing about a layout.
CLEAR_MARGIN = 1e-5
_SEEDS = 6
_LARGEST_WORLD = 1 << 20

Tell = Callable[[str], None]


def parser() -> argparse.ArgumentParser:
    """What the doctor does; all other flags are those of pretrain_moe.py."""
    p = argparse.ArgumentParser(
        prog="doctor.py",
        usage="doctor.py [--json FILE] [--layouts NAME ...] [--ranks 4|8] [pretrain_moe.py's flags]",
        description="Does this model train the same under every layout? A small copy of it makes some steps on gloo "
        "ranks of this machine, and everything that comes out is compared with one process.",
        epilog="Exit status: 0 all layouts agree; 1 one differs or fails; 2 a mistake in the flags. Other flags, such "
        "as --preset NAME or --config FILE, are those of pretrain_moe.py (default: --preset demo). Flags of a layout "
        "say which kinds of parallelism are in use; without any, all are tried.",
        allow_abbrev=False,
    )
    p.add_argument("--json", metavar="FILE", help="write the report as JSON")
    p.add_argument("--layouts", nargs="+", default=[], metavar="NAME", help="only these; with * as a wildcard")
    p.add_argument("--ranks", type=int, choices=(4, 8), default=4, help="largest layout (default: 4)")
    p.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps of each layout (default: 3)")
    p.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="a layout that takes longer has hung [s] (default: 120)",
    )
    p.add_argument("--list", action="store_true", help="list the layouts and stop")
    return p


def main(argv: list[str]) -> int:
    """Visit, report, say the verdict. Returns the exit code."""
    words, rest = parser().parse_known_args(argv)
    try:
        if words.steps < 1 or words.timeout <= 0:
            raise ConfigError(f"--steps {words.steps} --timeout {words.timeout:g}: both have to be above 0")
        if words.json is not None and not Path(words.json).resolve().parent.is_dir():
            raise ConfigError(f"--json {words.json}: the folder does not exist; create it")
        own = cli.parse(rest or DEFAULT, filled_in)
        _check_own(own)
        copy = small(own)
        choice = choose(own, copy, words.ranks, words.layouts)
        if words.list:
            print("\n".join(layout.name for layout in choice.layouts))
            return SAME
        report = visit(own, copy, choice, words.steps, words.timeout, _tell)
    except ConfigError as error:
        print(f"doctor.py: error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    except RankFailure as error:
        _tell(f"the oracle, one process, could not be measured:\n{error}")
        return DIFFERENT
    except KeyboardInterrupt:
        print("doctor.py: interrupted; its processes are ended, nothing was written", file=sys.stderr, flush=True)
        return INTERRUPTED
    for text in details(report):
        _tell(text)
    if words.json is not None:
        with replacing(Path(words.json)) as file:
            file.write(json.dumps(report.as_dict(), indent=1))
        _tell(f"wrote {words.json}")
    return DIFFERENT if report.failed else SAME


def visit(own: Run, copy: Run, choice: Choice, steps: int, seconds: float, tell: Tell) -> Report:
    """Measure the oracle and every layout, compare each as soon as it is there.

    Raises:
        RankFailure: the oracle itself could not be measured.
    """
    began, layouts = time.monotonic(), choice.layouts
    ranks = max(layout.ranks for layout in layouts)
    shrunk = changes(own, copy)
    size = "num_layers hidden_size num_experts seq_length global_batch_size".split()
    tell(f"a small copy in fp32: {', '.join(f'{name} {flatten(copy)[name]}' for name in size)}")
    if choice.reduced_from:
        tell(f"the layout in use ({choice.reduced_from}), at size 2 and at most {ranks} ranks")
    tell(f"starting {ranks} processes for {len(layouts)} layouts; nothing leaves this machine, no GPU is used")
    with Ranks(ranks, seconds) as pool:
        oracle, request = _oracle(pool, alone(copy), steps, tell)
        about = {
            "flags": _changed(own),
            "layout_in_use": choice.reduced_from,
            "shrunk": {name: list(pair) for name, pair in shrunk.items()},
            "steps": steps,
            "data_seed": request.data_seed,
            "tolerances": dataclasses.asdict(FP32),
            "versions": versions(),
            "oracle": {
                "losses": [step["loss"] for step in oracle.steps],
                "gradient_norms": [step["grad_norm"] for step in oracle.steps],
                "smallest_margin": None if math.isinf(oracle.smallest_margin) else oracle.smallest_margin,
            },
        }
        report = Report(about, refused=choice.refused)
        oracles = {True: (oracle, request)}
        for number, layout in enumerate(layouts, start=1):
            if layout.masked not in oracles:
                oracles[False] = _oracle(pool, alone(copy), steps, tell, masked=False)
            finding = _examine(pool, *oracles[layout.masked], copy, layout)
            report.findings.append(finding)
            tell(line(number, len(layouts), finding))
    for layout, rule in choice.refused:
        tell(f"not tried: {layout.name}: {rule}")
    tell(f"{time.monotonic() - began:.0f} s")
    return report


def _oracle(pool: Ranks, run: Run, steps: int, tell: Tell, masked: bool = True) -> tuple[Whole, Request]:
    """One process's result, on the first samples whose every choice of experts is a clear one."""
    rules.check(run, 1)
    best: tuple[Whole, Request] | None = None
    for seed in range(_SEEDS):
        request = Request(run, PADDED_VOCABULARY, steps, tuple(range(1, steps + 1)), seed, masked)
        whole = assemble(pool.measure(request, 1))
        if best is None or whole.smallest_margin > best[0].smallest_margin:
            best = whole, request
        if whole.smallest_margin >= CLEAR_MARGIN:
            break
    assert best is not None
    margin = best[0].smallest_margin
    closest = "" if math.isinf(margin) else f"; the closest choice of an expert is decided by {margin:.1e}"
    losses = ", ".join(f"{step['loss']:.5f}" for step in best[0].steps)
    tell(f"the oracle, one process{'' if masked else ', a loss on every token'}: losses {losses}{closest}")
    if margin < CLEAR_MARGIN:
        tell(f"that is less than {CLEAR_MARGIN:g}: counts may differ by a choice without any fault of a layout")
    return best


def _examine(pool: Ranks, oracle: Whole, request: Request, copy: Run, layout: Layout) -> Finding:
    began = time.monotonic()
    run = replace(copy, **layout.flags)
    asked = dataclasses.replace(request, run=run)
    try:
        whole = assemble(pool.measure(asked, layout.ranks))
    except RankFailure as failure:
        return Finding(layout, time.monotonic() - began, error=str(failure))
    comparison = compare(whole, oracle)
    fits = smells(whole, oracle, comparison, one_process=layout.ranks == 1)
    return Finding(layout, time.monotonic() - began, comparison, fits)


def _check_own(own: Run) -> None:
    """Refuse what a real start would refuse, on the smallest number of ranks that the flags allow."""
    filled = audited_run(own)
    sizes = [derived.model_ranks(filled), derived.expert_ranks(filled)]
    if min(sizes) < 1 or max(sizes) > _LARGEST_WORLD:
        sizes = [1]  # the rules about single numbers refuse it
    rules.check(filled, math.lcm(*sizes))


def _changed(run: Run) -> dict[str, object]:
    defaults = flatten(Run())
    return {name: value for name, value in flatten(run).items() if value != defaults[name]}


def _tell(text: str) -> None:
    print(text, flush=True)
