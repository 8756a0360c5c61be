"""The findings of an audit, which add up while the tracer runs, and the reports that are made of them.

A report is a dictionary of plain values (`Audit.as_dict`), shown as text, as JSON and as one HTML file. `Widening`
traces wide tensors back to the promotion or cast that widened them, and forward to the modules that return them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_moe.platform import numerics
from megatron_moe.precision.contract import wider_output
from megatron_moe_tools.audit.operations import OperationLocation, dtype_name, dtype_names, floating, widest

LISTS = {
    "unintended_promotions": "unintended_promotion_list",
    "mixed_matmuls": "mixed_matmul_list",
    "casts": "cast_list",
    "other_conversions": "other_conversion_list",
    "declared_promotions": "declared_promotions",
    "accumulations": "accumulations",
    "low_precision_reductions": "low_precision_reductions",
    "fp32_state_violations": "fp32_state_violations",
}
"""Kind of finding -> the key of its list in a report; where that is another, the kind's key has the count."""
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
        self._entries: dict[tuple[object, ...], AuditFinding] = {}
        self.count = 0
        """The number of events, which is at least that of the findings."""

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
    ) -> None:
        """Count one event."""
        key = (operation, dtypes, result, location, detail)
        entry = self._entries.get(key)
        if entry is None:
            entry = AuditFinding(operation, dtypes, result, **asdict(location), detail=detail, first=order)
            self._entries[key] = entry
        self.count += 1
        entry.count += 1
        entry.seconds += seconds
        entry.bytes += bytes_

    def __iter__(self) -> Iterator[AuditFinding]:
        return iter(self._entries.values())


@dataclass
class ModuleDtypes:
    """The dtypes of a module's inputs, parameters and outputs."""

    kind: str
    parameters: tuple[str, ...]
    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    calls: int = 0


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
    widened_modules: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
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
        found = self.unintended_promotions.count + self.mixed_matmuls.count + self.fp32_state_violations.count
        return self.error is not None or found > 0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON: counts as integers at the top level, next to their lists."""
        workaround: dict[str, float] = {"count": 0, "seconds": 0, "bytes": 0}
        seconds, moved = 0.0, 0
        for cast in self.casts:
            seconds, moved = seconds + cast.seconds, moved + cast.bytes
            if PROCESSOR_WORKAROUND in cast.where:
                workaround["count"] += cast.count
                workaround["seconds"] += cast.seconds
                workaround["bytes"] += cast.bytes
        report: dict[str, Any] = {
            **self.about,
            "failed": self.failed,
            "error": self.error,
            "counts": {},
            "cast_share_of_time": seconds / (self.kernel_seconds or 1.0),
            "cast_share_of_bytes": moved / (self.kernel_bytes or 1),
            "casts_for_this_processor": workaround,
            "operations": self.operations,
            "kernel_seconds": self.kernel_seconds,
            "kernel_bytes": self.kernel_bytes,
            "wall_seconds": self.wall_seconds,
            "widened_modules": list(self.widened_modules.values()),
            "declared_wider_modules": self.declared_wider,
            "modules": {},
        }
        for name, key in LISTS.items():
            findings: AuditFindings = getattr(self, name)
            report[name] = report["counts"][name] = findings.count
            report[key] = list(map(asdict, findings))
        for name, entry in self.modules.items():
            dtypes = {"inputs": sorted(entry.inputs), "outputs": sorted(entry.outputs)}
            report["modules"][name] = {**asdict(entry), **dtypes}
        return {"verdict": summary_line(report), **report}


def summary_line(report: dict[str, Any]) -> str:
    """Return the overall result in one line: clean, or what is wrong and how often."""
    found = []
    for name, one, many in (
        ("unintended_promotions", "unintended promotion", "unintended promotions"),
        ("mixed_matmuls", "matrix product of mixed dtypes", "matrix products of mixed dtypes"),
        ("fp32_state_violations", "violation of fp32 state", "violations of fp32 state"),
    ):
        number = report["counts"][name]
        if number:
            found.append(f"{number:,} {one if number == 1 else many}")
    if report["error"] is not None:
        found.append(f"the step failed with {report['error']['type']} in {report['error']['module'] or 'the model'}")
    if found:
        return "FAILED: " + ", ".join(found)
    return "clean: no unintended promotion, no matrix product of mixed dtypes, fp32 state is fp32"


# ---- Wide tensors: from the operation that widened them to the modules that return them.

_WIDE = 4


@dataclass(frozen=True)
class Cause:
    """The promotion or cast that made a tensor wider than its operands; `order` counts the step's operations."""

    order: int
    promotion: bool
    operation: str
    location: OperationLocation


def _first(causes: list[Cause]) -> Cause | None:
    """Return the first promotion, or else the first cast."""
    return min(causes, key=lambda cause: (not cause.promotion, cause.order), default=None)


class Widening:
    """A record of wide tensors, from the operation that widened them to the modules that return them.

    Args:
        audit: the audit that gets the widened modules.
    """

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._causes = WeakTensorKeyDictionary()
        self._declared = WeakTensorKeyDictionary()
        self._widened: list[tuple[int, str, Cause | None]] = []  # of a module's return: operations before it, name
        self._parameters: dict[int, list[Tensor]] = {}

    def follow(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], own: Cause | None) -> None:
        """Record the cause of a wide result: the first promotion on its way here, or else the first cast.

        A result that is rounded has none any more.

        Args:
            inputs: operands of an operation.
            outputs: tensors that it returned or wrote.
            own: the operation itself as a cause, if it widened something.
        """
        cause = _first(self._causes_of(inputs))
        if own is not None and (cause is None or not cause.promotion):
            cause = own
        if cause is None:
            return
        for tensor in floating(outputs):
            if tensor.itemsize >= _WIDE:
                self._causes[tensor] = cause

    def _causes_of(self, tensors: Sequence[Tensor]) -> list[Cause]:
        return list(filter(None, map(self._causes.get, tensors))) if self._causes else []

    def origin(self, operands: Sequence[Tensor]) -> str:
        """Return words on where the widest operand was widened, if an operation of this step did it; else ""."""
        tensor = max(operands, key=lambda operand: operand.itemsize)
        cause: Cause | None = self._causes.get(tensor)
        if cause is None:
            return ""
        verb = "promoted" if cause.promotion else "cast"
        module = cause.location.module or "(the model)"
        return f"{dtype_name(tensor.dtype)} since {cause.location.where} ({verb} there, module {module})"

    def check(
        self, module: torch.nn.Module, name: str, received: Sequence[Tensor], returned: Sequence[Tensor], begin: int
    ) -> None:
        """Record a module whose floating output is wider than every floating input and parameter.

        Args:
            module: the module.
            name: its qualified name.
            received: tensors that its forward got.
            returned: tensors that its forward returned.
            begin: number of operations that had run when it was called.
        """
        inputs = floating(received)
        parameters = self._parameters.get(id(module))
        if parameters is None:
            parameters = self._parameters[id(module)] = floating(module.parameters())
        known = widest((*inputs, *parameters))
        wide = [tensor for tensor in floating(returned) if 0 < known < tensor.itemsize]
        if not wide:
            return
        reason = wider_output(module)
        if reason is None and all(map(self._declared.__contains__, wide)):
            reason = "passes on the output of a module that declares it"
        if reason is not None:
            self._audit.declared_wider[name] = reason
            self._declared.update(dict.fromkeys(wide, True))
            return
        since, causes = [one for one in self._widened if one[0] > begin], self._causes_of(wide)
        if not (inputs or since or causes):
            return  # made here of numbers that were not narrow before, such as a table of positions
        cause = _first(causes)
        caused_by, operation, where = "?", "?", "?"
        if cause is not None:
            caused_by = "promotion" if cause.promotion else "cast"
            operation, where = cause.operation, cause.location.where
        output = dtype_name(wide[0].dtype)
        entry = {
            "module": name,
            "kind": type(module).__qualname__,
            "input": dtype_names(inputs),
            "parameters": dtype_names(parameters),
            "output": output,
            "caused_by": caused_by,  # the first promotion, or cast, on the way here
            "operation": operation,
            "where": where,
            # the inner module that had returned the wide tensor already
            "taken_over_from": next((inner for _, inner, returned in since if returned is cause), None),
            "count": 0,
        }
        self._audit.widened_modules.setdefault((name, output, where), entry)["count"] += 1
        self._widened.append((self._audit.operations, name, cause))


# ---- Reports.

_FINDING = "count operation dtypes result module where phase"

# Heading, key of the list, columns, and what a reader needs to know of it.
_TABLES = (
    (
        "Unintended promotions",
        "unintended_promotion_list",
        f"{_FINDING} detail",
        "operands of different dtypes that torch widened, in code that does not declare it",
    ),
    (
        "Matrix products of mixed dtypes",
        "mixed_matmul_list",
        f"{_FINDING} detail",
        "torch refuses them, or a kernel casts",
    ),
    (
        "Widened modules",
        "widened_modules",
        "count module kind input parameters output caused_by operation where taken_over_from",
        "output wider than input and parameters; `where` is the first promotion or cast that caused it",
    ),
    (
        "Violations of fp32 state",
        "fp32_state_violations",
        f"{_FINDING} detail",
        "tensors declared as fp32, seen in less; switches of another value",
    ),
    (
        "Low-precision reductions",
        "low_precision_reductions",
        f"{_FINDING} detail",
        "'result rounded': added in fp32 inside the kernel, rounded once; the others add in it",
    ),
    (
        "Casts",
        "cast_list",
        "count dtypes bytes seconds operation module where phase",
        "between floating dtypes; slowest first",
    ),
    ("Declared promotions", "declared_promotions", f"{_FINDING} reason", "mixed on purpose, with the reason"),
    (
        "Accumulations",
        "accumulations",
        "count operation dtypes module where phase",
        "in place into the widest operand: no promotion",
    ),
)
_MODULE_COLUMNS = ("module", "kind", "calls", "inputs", "parameters", "outputs")
_TEXT_ROWS = 40
_WIDEST_CELL = 72


def json_report(report: dict[str, Any]) -> str:
    """Return the report as indented JSON."""
    return json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n"


def text_report(report: dict[str, Any]) -> str:
    """Return the report as text for a terminal: the overall result, the figures, then every table that has rows."""
    lines = [report["verdict"], ""]
    for name, value in _figures(report).items():
        lines.append(f"{name:<22} {value}")
    error = report["error"]
    if error is not None:
        lines += ["", f"the step failed: {error['type']}: {error['message']}"]
        lines.append(f"  in module {error['module'] or '(the model)'}, {error['where']}; what follows is until then")
    for heading, note, columns, rows in _tables(report):
        of_modules = columns is _MODULE_COLUMNS
        if not rows and not of_modules:
            continue
        shown = [columns, *rows]
        if not of_modules:
            shown = shown[: _TEXT_ROWS + 1]
        widths = [min(_WIDEST_CELL, max(map(len, column))) for column in zip(*shown)]
        lines += ["", f"{heading} ({note})"]
        for row in shown:
            lines.append("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
        if len(shown) <= len(rows):
            lines.append(f"  ... and {len(rows) + 1 - len(shown)} more rows in the JSON report")
    return "\n".join(lines) + "\n"


def html_report(report: dict[str, Any]) -> str:
    """Return the report as one HTML file that loads nothing else; a click on a column's head sorts by it."""
    error, kind = report["error"], "bad" if report["failed"] else "good"
    parts = [f'<h1 class="{kind}">{html.escape(report["verdict"])}</h1>', "<dl>"]
    for name, value in _figures(report).items():
        parts.append(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>")
    parts.append("</dl>")
    if error is not None:
        parts.append(
            f"<p class=bad>The step failed in module {html.escape(error['module'] or '(the model)')}, "
            f"{html.escape(error['where'])}:</p><pre>{html.escape(error['type'] + ': ' + error['message'])}</pre>"
        )
    for heading, note, columns, rows in _tables(report):
        parts.append(f"<h2>{html.escape(heading)} <small>{html.escape(note)}</small></h2>")
        if not rows:
            parts.append("<p>none</p>")
            continue
        parts.append(f"<table><thead>{_row(columns, 'th')}</thead><tbody>")
        parts += map(_row, rows)
        parts.append("</tbody></table>")
    flags = json.dumps({"flags": report.get("flags"), "versions": report.get("versions")}, indent=2, default=str)
    parts.append(f"<h2>Flags and versions</h2><pre>{html.escape(flags)}</pre>")
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return page.replace("<!-- THE REPORT -->", "\n".join(parts))


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _figures(report: dict[str, Any]) -> dict[str, str]:
    counts, local = report["counts"], report["casts_for_this_processor"]
    loose = [f"{name} {report['switches'][name]}" for name in numerics.differing(report["switches"])]
    time, traffic = report["cast_share_of_time"], report["cast_share_of_bytes"]
    figures = {
        "traced": f"{report.get('subject', '?')}, {report.get('dtype', '?')} on {report.get('device', '?')}",
        "operations": f"{report['operations']:,} in {report['wall_seconds']:.2f} s with the tracer",
        "time in kernels": f"{report['kernel_seconds']:.3f} s",
        "casts": f"{counts['casts']:,}: {time:.1%} of the kernels' time, {traffic:.1%} of the bytes they move",
    }
    if local["count"]:
        why = "on this rank only because this processor has no half-precision products"
        figures["of these"] = f"{local['count']:,} {why}"
    figures["beneath the dtypes"] = ", ".join(loose) or "half-precision products add in fp32, no TF32"
    for name in (
        "unintended_promotions",
        "mixed_matmuls",
        "fp32_state_violations",
        "low_precision_reductions",
        "declared_promotions",
    ):
        figures[name.replace("_", " ")] = f"{counts[name]:,}"
    if report.get("ranks", 1) > 1:
        figures["ranks"] = f"{report['ranks']}: counts and findings are all ranks', modules, casts and times rank 0's"
    if report.get("step_committed") is False:
        figures["note"] = "the step was skipped (overflow): the optimizer's update was not traced"
    return figures


def _tables(report: dict[str, Any]) -> Iterator[tuple[str, str, Sequence[str], list[list[str]]]]:
    """Yield heading, note, columns and rows of every table; the last one is that of the modules."""
    for heading, key, columns, note in _TABLES:
        entries = report[key]
        if key == "cast_list":
            entries = sorted(entries, key=lambda entry: -entry["seconds"])
        names, rows = columns.split(), []
        for entry in entries:
            rows.append(list(map(_cell, names, map(entry.get, names))))
        yield heading, note, names, rows
    modules = []
    for name, one in report["modules"].items():
        row = [_cell("module", name), one["kind"], str(one["calls"])]
        modules.append([*row, *map(", ".join, (one["inputs"], one["parameters"], one["outputs"]))])
    yield "Modules", "dtypes in, of parameters, out", _MODULE_COLUMNS, modules


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if name == "module" and value == "":
        return "(the model)"
    return f"{value:.6f}" if name == "seconds" else str(value)
