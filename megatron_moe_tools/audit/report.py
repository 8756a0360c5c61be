"""The audit's report as text, JSON and one HTML file, all from the same dictionary (`Audit.as_dict`)."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from megatron_moe.platform import numerics

_FINDING = ("count", "operation", "dtypes", "result", "module", "where", "phase", "detail")

# Heading, key of the list, columns, and what a reader needs to know of it.
_TABLES: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "Unintended promotions",
        "unintended_promotion_list",
        _FINDING,
        "operands of different dtypes that torch widened, in code that does not declare it",
    ),
    ("Matrix products of mixed dtypes", "mixed_matmul_list", _FINDING, "torch refuses them, or a kernel casts"),
    (
        "Widened modules",
        "widened_modules",
        (
            "count",
            "module",
            "kind",
            "input",
            "parameters",
            "output",
            "caused_by",
            "operation",
            "where",
            "taken_over_from",
        ),
        "output wider than input and parameters; `where` is the first promotion or cast that caused it",
    ),
    (
        "Violations of fp32 state",
        "fp32_state_violations",
        _FINDING,
        "tensors declared as fp32, seen in less; switches of another value",
    ),
    (
        "Low-precision reductions",
        "low_precision_reductions",
        _FINDING,
        "'result rounded': added in fp32 inside the kernel, rounded once; the others add in it",
    ),
    (
        "Casts",
        "cast_list",
        ("count", "dtypes", "bytes", "seconds", "operation", "module", "where", "phase"),
        "between floating dtypes; slowest first",
    ),
    ("Declared promotions", "declared_promotions", (*_FINDING[:-1], "reason"), "mixed on purpose, with the reason"),
    (
        "Accumulations",
        "accumulations",
        ("count", "operation", "dtypes", "module", "where", "phase"),
        "in place into the widest operand: no promotion",
    ),
)
_MODULE_NOTE = "dtypes in, of parameters, out"
_MODULE_COLUMNS = ("module", "kind", "calls", "inputs", "parameters", "outputs")
_TEXT_ROWS = 40
_WIDEST_CELL = 72


def json_report(report: dict[str, Any]) -> str:
    """Return the report as indented JSON."""
    return json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n"


def text_report(report: dict[str, Any]) -> str:
    """Return the report as text for a terminal: the overall result, the figures, then every table that has rows."""
    lines = [report["verdict"], "", *(f"{name:<22} {value}" for name, value in _figures(report))]
    if report["error"] is not None:
        error = report["error"]
        lines += ["", f"the step failed: {error['type']}: {error['message']}"]
        lines.append(f"  in module {error['module'] or '(the model)'}, {error['where']}; what follows is until then")
    for heading, key, columns, note in _TABLES:
        rows = _rows(report, key, columns)
        if rows:
            lines += ["", f"{heading} ({note})", *_aligned(columns, rows)]
    modules = _aligned(_MODULE_COLUMNS, _module_rows(report), limit=None)
    lines += ["", f"Modules ({_MODULE_NOTE})", *modules]
    return "\n".join(lines) + "\n"


def html_report(report: dict[str, Any]) -> str:
    """Return the report as one HTML file that loads nothing else; a click on a column's head sorts by it."""
    parts = [
        _HEAD,
        f'<h1 class="{"bad" if report["failed"] else "good"}">{html.escape(report["verdict"])}</h1>',
        "<dl>",
    ]
    parts += [f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in _figures(report)]
    parts.append("</dl>")
    if report["error"] is not None:
        error = report["error"]
        parts.append(
            f"<p class=bad>The step failed in module {html.escape(error['module'] or '(the model)')}, "
            f"{html.escape(error['where'])}:</p><pre>{html.escape(error['type'] + ': ' + error['message'])}</pre>"
        )
    for heading, key, columns, note in _TABLES:
        parts.append(_html_table(heading, note, columns, _rows(report, key, columns)))
    parts.append(_html_table("Modules", _MODULE_NOTE, _MODULE_COLUMNS, _module_rows(report)))
    flags = json.dumps({"flags": report.get("flags"), "versions": report.get("versions")}, indent=2, default=str)
    parts += [f"<h2>Flags and versions</h2><pre>{html.escape(flags)}</pre>", _SCRIPT, "</body></html>", ""]
    return "\n".join(parts)


def _figures(report: dict[str, Any]) -> list[tuple[str, str]]:
    casts, local = report["counts"]["casts"], report["casts_for_this_processor"]
    figures = [
        ("traced", f"{report.get('subject', '?')}, {report.get('dtype', '?')} on {report.get('device', '?')}"),
        ("operations", f"{report['operations']:,} in {report['wall_seconds']:.2f} s with the tracer"),
        ("time in kernels", f"{report['kernel_seconds']:.3f} s"),
        (
            "casts",
            f"{casts:,}: {report['cast_share_of_time']:.1%} of the kernels' time, "
            f"{report['cast_share_of_bytes']:.1%} of the bytes they move",
        ),
    ]
    if local["count"]:
        figures.append(
            ("of these", f"{local['count']:,} on this rank only because this processor has no half-precision products")
        )
    loose = [f"{name} {report['switches'][name]}" for name in numerics.differing(report["switches"])]
    figures.append(("beneath the dtypes", ", ".join(loose) or "half-precision products add in fp32, no TF32"))
    others = ("unintended_promotions", "mixed_matmuls", "fp32_state_violations", "low_precision_reductions")
    figures += [(name.replace("_", " "), f"{report['counts'][name]:,}") for name in others]
    figures.append(("declared promotions", f"{report['counts']['declared_promotions']:,}"))
    if report.get("ranks", 1) > 1:
        ranks = f"{report['ranks']}: counts and findings are all ranks', modules, casts and times rank 0's"
        figures.append(("ranks", ranks))
    if report.get("step_committed") is False:
        figures.append(("note", "the step was skipped (overflow): the optimizer's update was not traced"))
    return figures


def _rows(report: dict[str, Any], key: str, columns: Sequence[str]) -> list[list[Any]]:
    entries = report[key]
    if key == "cast_list":
        entries = sorted(entries, key=lambda entry: -entry["seconds"])
    return [[_value(name, entry.get(name)) for name in columns] for entry in entries]


def _module_rows(report: dict[str, Any]) -> list[list[Any]]:
    return [
        [name or "(the model)", one["kind"], one["calls"], *(", ".join(one[key]) for key in _MODULE_COLUMNS[3:])]
        for name, one in report["modules"].items()
    ]


def _value(name: str, value: Any) -> Any:
    if value is None:
        return ""
    if name == "seconds":
        return f"{value:.6f}"
    return "(the model)" if name == "module" and value == "" else value


def _aligned(columns: Sequence[str], rows: list[list[Any]], limit: int | None = _TEXT_ROWS) -> list[str]:
    shown = [[str(cell) for cell in row] for row in (rows if limit is None else rows[:limit])]
    widths = [min(_WIDEST_CELL, max(len(row[i]) for row in [list(columns), *shown])) for i in range(len(columns))]
    lines = [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in [list(columns), *shown]
    ]
    if limit is not None and len(rows) > limit:
        lines.append(f"  ... and {len(rows) - limit} more rows in the JSON report")
    return lines


def _html_table(heading: str, note: str, columns: Sequence[str], rows: list[list[Any]]) -> str:
    title = f"<h2>{html.escape(heading)} <small>{html.escape(note)}</small></h2>"
    if not rows:
        return f"{title}<p>none</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Precision audit</title>
<style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em; color: #1c1c1c; background: #fff }
h1 { font-size: 1.3em; padding: .6em .8em; border-left: 6px solid } h2 { font-size: 1.1em; margin-top: 2em }
small { font-weight: normal; color: #666 } .good { border-color: #2a7d3f; background: #eef7f0 }
.bad { border-color: #b3261e; background: #fcefee } dl { display: grid; grid-template-columns: max-content 1fr }
dt { padding-right: 1.5em; color: #555 } dd { margin: 0 } pre { white-space: pre-wrap }
table { border-collapse: collapse; font-size: 13px } th { cursor: pointer; text-align: left; background: #f0f0f0 }
th, td { border: 1px solid #ddd; padding: .2em .5em; vertical-align: top } td { overflow-wrap: anywhere }
</style></head><body>"""

_SCRIPT = """<script>
document.querySelectorAll("th").forEach(function (head) {
  head.addEventListener("click", function () {
    var body = head.closest("table").tBodies[0], column = head.cellIndex, down = head.dataset.down !== "yes";
    var key = function (row) { return row.cells[column].textContent; };
    var rows = Array.from(body.rows).sort(function (a, b) {
      var x = Number(key(a)), y = Number(key(b));
      var order = isNaN(x) || isNaN(y) ? key(a).localeCompare(key(b)) : x - y;
      return down ? -order : order;
    });
    head.dataset.down = down ? "yes" : "no";
    rows.forEach(function (row) { body.appendChild(row); });
  });
});
</script>"""
