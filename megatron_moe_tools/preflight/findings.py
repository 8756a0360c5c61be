"""What a check finds, over one rank and over all, as a readable table and as JSON. Loads no torch."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_moe.config.schema import Run

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


def as_dict(findings: list[Finding], world_size: int, versions: dict[str, str], seconds: float) -> dict[str, Any]:
    """Return the report of `--json`; docs/guides/gpu.md describes its keys."""
    return {
        "schema": SCHEMA_VERSION,
        "status": worst(findings),
        "world_size": world_size,
        "hosts": sorted({host for finding in findings for host in finding.hosts}),
        "versions": versions,
        "seconds": round(seconds, 1),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


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
