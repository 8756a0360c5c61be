"""megatron-moe preflight: its flags, what its checks find, and the table and the JSON of it. Loads no torch."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.launch import launched_world, rank_that_prints
from megatron_moe.config.schema import Run
from megatron_moe.hf.config import filled_in
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.program import DONE, FAILED, note, run_program, say
from megatron_moe.report.run_info import versions
from megatron_moe_tools import compat

NAME = "megatron-moe preflight"
PASS, WARN, FAIL, IMPOSSIBLE = "pass", "warn", "fail", "not possible here"
STATUSES = (PASS, WARN, FAIL, IMPOSSIBLE)
SCHEMA_VERSION = 1
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: one of STATUSES.
        found: what is there, in one line.
        advice: what works instead; empty for a pass.
        figures: what was measured: name with unit -> number.
        check: the check's name. The runner fills this in, and `ranks` and `hosts`.
        ranks: the ranks that found this.
        hosts: the names of their nodes, each once.
    """

    status: str
    found: str
    advice: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    check: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Thresholds:
    """What a user may expect of the machine; None where the table of devices or nothing decides.

    Attributes:
        inside, across: bus bandwidth of a collective between the GPUs of a node, and between nodes, GB/s per GPU.
        least_share: a collective that reaches less than this share of what is expected fails.
        least_write: MB/s with which a node has to write to --save's folder.
    """

    inside: float | None = None
    across: float | None = None
    least_share: float = 0.5
    least_write: float = 100.0


DEFAULTS = Thresholds()


@dataclass(frozen=True)
class Place:
    """Where a check runs: the rank, its node, and the run that it is checked for.

    Attributes:
        run: the run; the schema's defaults where no flags were given.
        has_model: whether the flags describe a model, so that checks of its kernels make sense.
        connected: whether all ranks met, so that collectives over gloo's default group work.
    """

    run: Run
    has_model: bool
    thresholds: Thresholds
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    connected: bool

    @property
    def nodes(self) -> int:
        """The number of nodes, where each has as many ranks."""
        return max(1, self.world_size // max(1, self.local_world_size))


RANK, NODE, WORLD = "rank", "node", "world"


class Check(NamedTuple):
    """A check: `where` is RANK (every rank looks), NODE (one rank of each node) or WORLD (all together)."""

    name: str
    where: str
    look: Callable[[Place], Finding]


CHECKS: list[Check] = []
"""All checks, in the order in which they run: that of their functions in `node.py` and `checks.py`."""


def check(where: str, name: str = "") -> Callable[[Callable[[Place], Finding]], Callable[[Place], Finding]]:
    """Add the decorated function to `CHECKS`, by default under its own name."""

    def added(look: Callable[[Place], Finding]) -> Callable[[Place], Finding]:
        CHECKS.append(Check(name or look.__name__, where, look))
        return look

    return added


def merged(found: list[list[Finding]]) -> list[Finding]:
    """Return the findings of all ranks, equal ones as one with all of its ranks and hosts, in the order of the checks.

    Args:
        found: the findings of each rank, all ranks having run the checks in the same order.
    """
    together: dict[tuple[str, str, str, str], Finding] = {}
    order: dict[str, int] = {}
    for findings in found:
        for finding in findings:
            order.setdefault(finding.check, len(order))
            key = finding.check, finding.status, finding.found, finding.advice
            earlier = together.get(key)
            if earlier is not None:
                finding = dataclasses.replace(
                    earlier,
                    ranks=earlier.ranks + finding.ranks,
                    hosts=tuple(dict.fromkeys(earlier.hosts + finding.hosts)),
                )
            together[key] = finding
    return sorted(together.values(), key=lambda finding: order[finding.check])


def worst(findings: list[Finding]) -> str:
    """Return "fail", "warn" or "pass": the worst status of a report; what is not possible here is no fault."""
    statuses = {finding.status for finding in findings}
    if FAIL in statuses:
        return FAIL
    return WARN if WARN in statuses else PASS


def table(findings: list[Finding], world_size: int) -> list[str]:
    """Return the report as lines: status, check, what was found, who found it where not all did, and the advice."""
    width = max((len(finding.check) for finding in findings), default=0)
    indent = " " * (len(IMPOSSIBLE) + width + 4)
    lines = []
    for finding in findings:
        text = finding.found
        alone = sum(other.check == finding.check for other in findings) == 1
        if world_size > 1 and not alone:  # somebody found something else, so say who found this
            ranks = "rank" if len(finding.ranks) == 1 else "ranks"
            text += f" [{ranks} {shortened(finding.ranks)} on {shortened(finding.hosts, 4)}]"
        first, *rest = _wrapped(text)
        lines.append(f"{finding.status:<{len(IMPOSSIBLE)}}  {finding.check:<{width}}  {first}")
        if finding.advice:
            rest += _wrapped(f"-> {finding.advice}")
        lines += [f"{indent}{line}" for line in rest]
    counted = Counter(finding.status for finding in findings)
    counts = ", ".join(f"{counted[status]} {status}" for status in STATUSES)
    return [*lines, "", f"{worst(findings).upper()}: {counts}"]


def shortened(items: Iterable[object], most: int = 8) -> str:
    """Return items with commas between them, the first `most` of them."""
    words = list(map(str, items))
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False) or [""]


# ---- the command line


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
    add = p.add_argument
    add("--json", metavar="FILE", help="write the findings as JSON")
    add("--only", nargs="+", default=[], metavar="CHECK", help="run only these checks")
    add("--inside", type=_positive, metavar="GB/S", help="expected bus bandwidth per GPU inside a node")
    add("--across", type=_positive, metavar="GB/S", help="expected bus bandwidth per GPU between nodes")
    add(
        "--least-share",
        type=_positive,
        default=DEFAULTS.least_share,
        metavar="X",
        help=f"share of the expected bandwidth below which a check fails (default: {DEFAULTS.least_share:g})",
    )
    add(
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
    prints = rank_that_prints() == 0
    if prints:  # its folder need not be on the other nodes
        require_writable("--json", flags.json)
    if flags.least_share > 1:
        raise ConfigError(f"--least-share {flags.least_share:g}: is a share, at most 1; e.g. --least-share 0.5")
    _, world_size = launched_world()
    run = compat.parse(rest, filled_in, world_size)
    if rest:
        rules.check_model(run, world_size)
    thresholds = Thresholds(flags.inside, flags.across, flags.least_share, flags.least_write)
    from megatron_moe_tools.preflight.checks import run_checks  # loading torch takes seconds

    def started(name: str) -> None:
        if prints:  # so that one which hangs is known
            note(f"{NAME}: {name}")

    def finished(findings: list[Finding]) -> None:
        if not prints:
            return
        for line in table(findings, world_size):
            say(line)
        if flags.json is not None:
            report = {  # docs/guides/gpu.md describes it
                "schema": SCHEMA_VERSION,
                "status": worst(findings),
                "world_size": world_size,
                "hosts": sorted(set().union(*(finding.hosts for finding in findings))),
                "versions": versions(),
                "seconds": round(time.monotonic() - began, 1),
                "findings": list(map(dataclasses.asdict, findings)),
            }
            replace_json(Path(flags.json), report)
            say(f"wrote {flags.json}")

    findings = run_checks(run, thresholds, only=flags.only, started=started, finished=finished)
    return FAILED if worst(findings) == FAIL else DONE


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: has to be above 0, and finite")
    return value
