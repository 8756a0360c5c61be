"""The command line of megatron-moe preflight: run the checks, print the table, write the JSON."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.launch import launched_world, rank_that_prints
from megatron_moe.hf.config import filled_in
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.program import DONE, FAILED, note, run_program, say
from megatron_moe.report.run_info import versions
from megatron_moe_tools import compat
from megatron_moe_tools.preflight.findings import DEFAULTS, FAIL, Finding, Thresholds, as_dict, table, worst

NAME = "megatron-moe preflight"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags; all other flags are those of megatron-moe train."""
    p = Parser(
        prog=NAME,
        usage="%(prog)s [--json FILE] [options] [the run's flags]",
        description="Can this node, or under torchrun all nodes of a job, train? Checks software, GPUs, limits, disk, "
        "and what ranks have to have in common, within about a minute, and says what works instead.",
        epilog="All nodes: torchrun ... -m megatron_moe preflight. Exit status: 0 no check failed; 1 one did; 2 a "
        "mistake in the flags (torchrun makes 1 of it). Other flags, such as --preset NAME, --save DIR or --config "
        "FILE, are those of megatron-moe train: with them the kernels of the model's sizes and the folder of its "
        "checkpoints are checked too.",
        allow_abbrev=False,
    )
    p.add_argument("--json", metavar="FILE", help="write the findings as JSON")
    p.add_argument("--only", nargs="+", default=[], metavar="CHECK", help="run only these checks")
    p.add_argument("--inside", type=_positive, metavar="GB/S", help="expected bus bandwidth per GPU inside a node")
    p.add_argument("--across", type=_positive, metavar="GB/S", help="expected bus bandwidth per GPU between nodes")
    p.add_argument(
        "--least-share",
        type=_positive,
        default=DEFAULTS.least_share,
        metavar="X",
        help=f"share of the expected bandwidth below which a check fails (default: {DEFAULTS.least_share:g})",
    )
    p.add_argument(
        "--least-write",
        type=_positive,
        default=DEFAULTS.least_write,
        metavar="MB/S",
        help=f"speed of writing to --save's folder below which to warn (default: {DEFAULTS.least_write:g})",
    )
    return p


def main(argv: list[str]) -> int:
    """Check, report, and return the exit status. Under torchrun every rank calls this, and rank 0 prints."""
    return run_program(NAME, _main, argv)


def _main(argv: list[str]) -> int:
    began = time.monotonic()
    flags, rest = parser().parse_known_args(argv)
    if _rank() == 0:  # which writes it; its folder need not be on the other nodes
        require_writable("--json", flags.json)
    if flags.least_share > 1:
        raise ConfigError(f"--least-share {flags.least_share:g}: is a share, at most 1; e.g. --least-share 0.5")
    _, world_size = launched_world()
    run = compat.parse(rest, filled_in, world_size)
    if rest:
        rules.check_model(run, world_size)
    thresholds = Thresholds(flags.inside, flags.across, flags.least_share, flags.least_write)
    from megatron_moe_tools.preflight.checks import run_checks  # loading torch takes seconds

    def report(findings: list[Finding]) -> None:
        if _rank() != 0:
            return
        for line in table(findings, world_size):
            say(line)
        if flags.json is not None:
            replace_json(Path(flags.json), as_dict(findings, world_size, versions(), time.monotonic() - began))
            say(f"wrote {flags.json}")

    findings = run_checks(run, thresholds, only=flags.only, started=_progress, finished=report)
    return FAILED if worst(findings) == FAIL else DONE


def _progress(name: str) -> None:
    """Print the check that begins to stderr, so that one which hangs is known."""
    if _rank() == 0:
        note(f"{NAME}: {name}")


def _rank() -> int:
    return rank_that_prints()


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: has to be above 0, and finite")
    return value
