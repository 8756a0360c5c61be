"""The doctor's report: its findings as lines of text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_moe_tools.doctor.compare import Comparison, LayoutDifference, tolerances_of
from megatron_moe_tools.doctor.layouts import Layout, common_to

_SHOWN = 8
_KEPT = 500


@dataclass(frozen=True)
class LayoutFinding:
    """The outcome of one layout; `error` is the ranks' report where the layout could not be measured."""

    layout: Layout
    seconds: float
    comparison: Comparison | None = None
    patterns: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def good(self) -> bool:
        """Whether the layout was measured and nothing differs."""
        return self.comparison is not None and self.comparison.agrees


@dataclass
class DoctorReport:
    """The findings of all layouts; `about` says what was compared: flags, sizes, versions, the oracles' figures."""

    about: dict[str, Any]
    findings: list[LayoutFinding] = field(default_factory=list)
    refused: list[tuple[Layout, str]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether any layout differs or could not be measured."""
        return not all(finding.good for finding in self.findings)

    @property
    def common(self) -> list[str]:
        """Kinds of parallelism and features that all layouts that failed have, and no layout that agrees."""
        passed = [finding.layout for finding in self.findings if finding.good]
        failed = [finding.layout for finding in self.findings if not finding.good]
        return common_to(failed, passed)

    def summary(self) -> str:
        """Return the overall result in one line."""
        bad = [finding.layout.name for finding in self.findings if not finding.good]
        tried = f"{len(self.findings)} layout{'s' * (len(self.findings) > 1)}"
        if not bad:
            return f"no difference in {tried}: the same model is trained"
        return f"{len(bad)} of {tried} do not train the same model: {', '.join(bad)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, which holds neither NaN nor infinity."""
        return {
            "verdict": self.summary(),
            "failed": self.failed,
            "common_to_what_failed": self.common,
            **self.about,
            "layouts": [_as_dict(finding) for finding in self.findings],
            "refused": [{"layout": layout.name, "rule": rule} for layout, rule in self.refused],
        }


def log_line(number: int, total: int, finding: LayoutFinding) -> str:
    """Return the log's line about one layout."""
    head = f"[{number:{len(str(total))}}/{total}] {finding.layout.name:<25} {finding.layout.ranks} ranks "
    tail = f" ({finding.seconds:.1f} s)"
    if finding.comparison is None:
        return f"{head} FAILED{tail}"
    if finding.good:
        largest = finding.comparison.largest
        kinds = ("loss", "gradient norm", "gradient", "weight")
        return f"{head} agrees: {', '.join(f'{kind} {largest.get(kind, 0.0):.1e}' for kind in kinds)}{tail}"
    return f"{head} DIFFERS: {describe(finding.comparison.differences[0])}{tail}"


def describe(one: LayoutDifference) -> str:
    """Return a difference in one line."""
    where = f" of {one.name}" if one.name else ""
    when = "" if "step" in one.quantity or not one.step else f", step {one.step}"
    exact = "has to be the same bits" if one.allowed == 0.0 else f"at most {one.allowed:.0e} is allowed"
    detail = f"; {one.detail}" if one.detail else ""
    return f"{one.quantity}{where}{when} is off by {one.error:.2e}, {exact}{detail}"


def details(report: DoctorReport) -> Iterator[str]:
    """Yield the lines about the layouts that failed, then the overall result."""
    for finding in report.findings:
        if finding.good:
            continue
        yield f"\n{finding.layout.name} ({finding.layout.ranks} ranks: {_flags(finding.layout)})"
        if finding.comparison is None:
            yield finding.error or ""
            continue
        yield from (f"  it fits: {pattern}" for pattern in finding.patterns)
        differences = finding.comparison.differences
        first = [one for one in differences if one.step == differences[0].step]
        yield from (f"  {describe(one)}" for one in first[:_SHOWN])
        if len(first) > _SHOWN:
            yield f"  and {len(first) - _SHOWN} more in the same step"
        if len(differences) > len(first):
            yield f"  later steps differ in {len(differences) - len(first)} quantities, which may follow from this"
    if any(finding.good for finding in report.findings) and (common := report.common):
        yield f"\nwhat every layout that failed has, and none that agrees: {' or '.join(common)}"
    yield f"\n{report.summary()}"


def _flags(layout: Layout) -> str:
    words = []
    for name, value in layout.flags.items():
        flag = f"--{name.replace('_', '-')}"
        words.append(flag if value is True else f"{flag} {value}")
    return " ".join(word for word in words if not word.endswith(" None")) or "data parallel only"


def _as_dict(finding: LayoutFinding) -> dict[str, Any]:
    result: dict[str, Any] = {
        "layout": finding.layout.name,
        "ranks": finding.layout.ranks,
        "flags": finding.layout.flags,
        "model": finding.layout.model,
        "features": sorted(finding.layout.features),
        "tolerances": asdict(tolerances_of(finding.layout.run)),
        "agrees": finding.good,
        "seconds": round(finding.seconds, 2),
        "error": finding.error,
    }
    if finding.comparison is not None:
        differences = finding.comparison.differences
        result["largest_errors"] = {kind: _number(value) for kind, value in finding.comparison.largest.items()}
        result["fits"] = finding.patterns
        result["number_of_differences"] = len(differences)
        result["differences"] = [{**asdict(one), "error": _number(one.error)} for one in differences[:_KEPT]]
    return result


def _number(value: float) -> float | str:
    """Return the value, as text where JSON has no number for it: infinity and NaN."""
    return value if value - value == 0.0 else str(value)
