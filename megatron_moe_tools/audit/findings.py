"""The findings of an audit: records that add up while the tracer runs, and the dictionary that reports are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_moe_tools.audit.operations import OperationLocation

COUNTED = (
    "unintended_promotions",
    "mixed_matmuls",
    "casts",
    "other_conversions",
    "declared_promotions",
    "accumulations",
    "low_precision_reductions",
    "fp32_state_violations",
)
TOP_COUNTS = ("unintended_promotions", "mixed_matmuls", "casts", "other_conversions")
"""Counts that are also at the top level of the JSON report."""
FINDING_LISTS = ("unintended_promotion_list", "mixed_matmul_list", "fp32_state_violations", "widened_modules")
# Casts in this file replace half-precision instructions that the processor lacks; the model did not ask for them.
PROCESSOR_WORKAROUND = "platform/cpu_half_gemm.py"


@dataclass
class AuditFinding:
    """One kind of event at one location and how often it happened.

    seconds and bytes are sums over the events; first is the number of the operation where it happened first.
    """

    operation: str
    dtypes: str
    result: str
    module: str
    where: str
    phase: str
    reason: str | None
    detail: str = ""
    count: int = 0
    seconds: float = 0.0
    bytes: int = 0
    first: int = 0


class AuditFindings:
    """The findings of one kind; events that differ in nothing but time and bytes are counted in one finding."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], AuditFinding] = {}

    def add(
        self,
        location: OperationLocation,
        operation: str,
        dtypes: str,
        result: str,
        *,
        order: int,
        detail: str = "",
        seconds: float = 0.0,
        bytes_: int = 0,
    ) -> AuditFinding:
        """Count one event and return its finding."""
        key = (operation, dtypes, result, location, detail)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = AuditFinding(
                operation,
                dtypes,
                result,
                location.module,
                location.where,
                location.phase,
                location.reason,
                detail,
                first=order,
            )
        entry.count += 1
        entry.seconds += seconds
        entry.bytes += bytes_
        return entry

    @property
    def count(self) -> int:
        """The number of events, which is at least that of the findings."""
        return sum(entry.count for entry in self._entries.values())

    def total(self, name: str, entries: Iterable[AuditFinding] | None = None) -> Any:
        """Return the sum of a field over all entries, or over those given."""
        return sum(getattr(entry, name) for entry in (self._entries.values() if entries is None else entries))

    def __iter__(self) -> Any:
        return iter(sorted(self._entries.values(), key=lambda entry: entry.first))

    def as_list(self) -> list[dict[str, Any]]:
        """Return the findings as plain values, in the order in which they happened first."""
        return [asdict(entry) for entry in self]


@dataclass
class ModuleDtypes:
    """The dtypes of a module's inputs, parameters and outputs."""

    kind: str
    parameters: tuple[str, ...]
    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    calls: int = 0


@dataclass
class Widened:
    """A module whose output was wider than its inputs and parameters.

    operation and where are the first promotion (or cast) that caused it; taken_over_from is the inner module that had
    returned the wide tensor already.
    """

    module: str
    kind: str
    input: str
    parameters: str
    output: str
    caused_by: str
    operation: str
    where: str
    taken_over_from: str | None
    count: int = 1


@dataclass
class Audit:
    """The result of one traced step.

    kernel_seconds and kernel_bytes are sums over all operations (views move no bytes); wall_seconds includes the
    tracer. error is None, or {"type", "message", "module", "where"} of what the traced code raised.
    """

    unintended_promotions: AuditFindings = field(default_factory=AuditFindings)
    declared_promotions: AuditFindings = field(default_factory=AuditFindings)
    accumulations: AuditFindings = field(default_factory=AuditFindings)
    mixed_matmuls: AuditFindings = field(default_factory=AuditFindings)
    casts: AuditFindings = field(default_factory=AuditFindings)
    other_conversions: AuditFindings = field(default_factory=AuditFindings)
    low_precision_reductions: AuditFindings = field(default_factory=AuditFindings)
    fp32_state_violations: AuditFindings = field(default_factory=AuditFindings)
    modules: dict[str, ModuleDtypes] = field(default_factory=dict)
    widened_modules: dict[tuple[str, ...], Widened] = field(default_factory=dict)
    declared_wider: dict[str, str] = field(default_factory=dict)
    operations: int = 0
    kernel_seconds: float = 0.0
    kernel_bytes: int = 0
    wall_seconds: float = 0.0
    error: dict[str, str] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether there is something to repair: exit status 1."""
        found = (self.unintended_promotions, self.mixed_matmuls, self.fp32_state_violations)
        return self.error is not None or any(findings.count for findings in found)

    def counts(self) -> dict[str, int]:
        """Return the number of events of each kind."""
        return {name: getattr(self, name).count for name in COUNTED}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON: counts as integers at the top level, next to their lists."""
        counts = self.counts()
        listed_under_its_name = ("declared_promotions", "accumulations", "low_precision_reductions")
        lists = {
            **{name: getattr(self, name).as_list() for name in (*listed_under_its_name, "fp32_state_violations")},
            "unintended_promotion_list": self.unintended_promotions.as_list(),
            "mixed_matmul_list": self.mixed_matmuls.as_list(),
            "cast_list": self.casts.as_list(),
            "other_conversion_list": self.other_conversions.as_list(),
        }
        workaround = [entry for entry in self.casts if PROCESSOR_WORKAROUND in entry.where]
        report = {
            **self.about,
            "failed": self.failed,
            "error": self.error,
            **{name: counts[name] for name in TOP_COUNTS},
            "counts": counts,
            "cast_share_of_time": _share(self.casts.total("seconds"), self.kernel_seconds),
            "cast_share_of_bytes": _share(self.casts.total("bytes"), self.kernel_bytes),
            "casts_for_this_processor": {
                name: self.casts.total(name, workaround) for name in ("count", "seconds", "bytes")
            },
            "operations": self.operations,
            "kernel_seconds": self.kernel_seconds,
            "kernel_bytes": self.kernel_bytes,
            "wall_seconds": self.wall_seconds,
            "widened_modules": [asdict(entry) for entry in self.widened_modules.values()],
            "declared_wider_modules": self.declared_wider,
            **lists,
            "modules": {
                name: {
                    "kind": entry.kind,
                    "parameters": list(entry.parameters),
                    "inputs": sorted(entry.inputs),
                    "outputs": sorted(entry.outputs),
                    "calls": entry.calls,
                }
                for name, entry in self.modules.items()
            },
        }
        return {"verdict": summary_line(report), **report}


def summary_line(report: dict[str, Any]) -> str:
    """Return the overall result in one line: clean, or what is wrong and how often."""
    counts = report["counts"]
    words = [
        (counts["unintended_promotions"], "unintended promotion"),
        (counts["mixed_matmuls"], "matrix product of mixed dtypes"),
        (counts["fp32_state_violations"], "violation of fp32 state"),
    ]
    found = []
    for number, what in words:
        head, of, rest = what.partition(" of ")
        if number:
            found.append(f"{number:,} {what if number == 1 else f'{head}s{of}{rest}'}")
    if report["error"] is not None:
        found.append(f"the step failed with {report['error']['type']} in {report['error']['module'] or 'the model'}")
    if found:
        return "FAILED: " + ", ".join(found)
    return "clean: no unintended promotion, no matrix product of mixed dtypes, fp32 state is fp32"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
