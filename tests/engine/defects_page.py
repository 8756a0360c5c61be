"""Writes the table of docs/internals/engine_defects.md from megatron_moe/engine/engine_defects.yaml:

python -m tests.engine.defects_page
"""

from __future__ import annotations

from pathlib import Path

from megatron_moe.config.fields import all_fields
from megatron_moe.engine.defects import Defect, known_defects

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engine_defects.md"
BEGIN, END = "<!-- engine defects: written by `python -m tests.engine.defects_page` -->", "<!-- end -->"
COLUMNS = ("id", "what goes wrong", "met with", "megatron-core", "source", "here", "where", "test")


def page(text: str) -> str:
    """Return the page with the present table between its two marks; what is around them is written by hand."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    """Return the table in Markdown, one row per defect."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for defect in known_defects():
        here, where = f"{defect.treatment}: {defect.how}", _code(defect.where) or "-"
        shown = _code(defect.tests) or f"no test: {defect.no_test}"
        releases = defect.releases()
        rows.append((defect.id, defect.title, met_with(defect), releases, defect.source, here, where, shown))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def met_with(defect: Defect) -> str:
    """Return the conditions of a defect in words, a setting as its flag: `--sequence-parallel`, `tp times cp > 1`."""
    if defect.when is None:
        return "no run"
    words = []
    for condition in defect.when:
        field = all_fields().get(condition.name)
        name = condition.name.replace("_", " ") if field is None else field.flag
        if condition.wanted is False:
            name = f"no {name}"
        elif condition.wanted is not True and condition.wanted != "set":
            name = f"{name} {condition.wanted}"
        words.append(name)
    return ", ".join(words) or "every run"


def _code(names: tuple[str, ...] | dict[str, str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
