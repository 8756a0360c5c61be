"""The command line of megatron-moe doctor: measure the oracle and every layout, compare them, report."""

from __future__ import annotations

import argparse
import math
import threading
from pathlib import Path

from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import with_made_up_data
from megatron_moe.hf.config import filled_in
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.program import run_program, say
from megatron_moe_tools import compat
from megatron_moe_tools.doctor.default_layouts import default_choice, model
from megatron_moe_tools.doctor.layouts import choose
from megatron_moe_tools.doctor.small_copy import small_copy
from megatron_moe_tools.launch.local_ranks import RankFailure

NAME = "megatron-moe doctor"

SAME, DIFFERENT = 0, 1
_LARGEST_WORLD = 1 << 20


def parser() -> argparse.ArgumentParser:
    """Return the parser of the doctor's own flags; all other flags are those of megatron-moe train."""
    p = Parser(
        prog=NAME,
        usage="%(prog)s [--json FILE] [--layouts NAME ...] [--ranks 4|8] [the run's flags]",
        description="Does this model train the same under every layout? A small copy of it makes some steps on gloo "
        "ranks of this machine, and everything that comes out is compared with one process.",
        epilog="Exit status: 0 all layouts agree; 1 one differs or fails; 2 a mistake in the flags. Other flags, such "
        "as --preset NAME or --config FILE, are those of megatron-moe train: without any, models that have every "
        "feature between them are tried, in fp32, bf16 and fp16. Flags of a layout say which kinds of parallelism are "
        "in use; without any, all are tried.",
        allow_abbrev=False,
    )
    p.add_argument("--json", metavar="FILE", help="write the report as JSON")
    p.add_argument("--layouts", nargs="+", default=[], metavar="NAME", help="try only these; * is a wildcard")
    p.add_argument("--ranks", type=int, choices=(4, 8), default=4, help="ranks of the largest layout (default: 4)")
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
    """Check the layouts, report, and return the exit status."""
    return run_program(NAME, _main, argv, interrupted="interrupted; its processes are ended, nothing was written")


def _main(argv: list[str]) -> int:
    flags, rest = parser().parse_known_args(argv)
    if flags.steps < 1 or not 0 < flags.timeout <= threading.TIMEOUT_MAX:
        raise ConfigError(f"--steps {flags.steps} --timeout {flags.timeout:g}: both have to be above 0, and finite")
    require_writable("--json", flags.json)
    if rest:
        own = compat.parse(rest, filled_in)
        # The rules of a real start, on the smallest number of ranks that the flags allow.
        filled = with_made_up_data(own)
        sizes = [filled.derived.model_ranks, filled.derived.expert_ranks]
        if min(sizes) < 1 or max(sizes) > _LARGEST_WORLD:
            sizes = [1]  # the rules about single numbers refuse it
        rules.check(filled, math.lcm(*sizes))
        copy = small_copy(own)
        if own.precision.fp8_format is not None:
            say(f"--fp8-format {own.precision.fp8_format}: is not compared; the small copy multiplies in fp32")
        choice = choose(own, copy, flags.ranks, flags.layouts)
    else:
        own, copy = model("demo")
        choice = default_choice(flags.ranks, flags.layouts)
    if flags.list:
        say("\n".join(layout.name for layout in choice.layouts))
        return SAME
    # Not before the flags are right: loading torch takes seconds.
    from megatron_moe_tools.doctor.examine import check_layouts
    from megatron_moe_tools.doctor.report import details

    try:
        report = check_layouts(own, copy, choice, flags.steps, flags.timeout, say)
    except RankFailure as error:
        say(f"the oracle, one process, could not be measured:\n{error}")
        return DIFFERENT
    for text in details(report):
        say(text)
    if flags.json is not None:
        replace_json(Path(flags.json), report.as_dict())
        say(f"wrote {flags.json}")
    return DIFFERENT if report.failed else SAME
