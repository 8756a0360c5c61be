"""Writes the table of docs/internals/engine_defects.md from megatron_moe/engine/engine_defects.yaml:

python -m tests.engine.defects_page
"""

from pathlib import Path

from megatron_moe.engine.defects import NEWEST, OLDEST, Defect, dotted, known_defects

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "internals" / "engine_defects.md"
BEGIN, END = "<!-- engine defects: written by `python -m tests.engine.defects_page` -->", "<!-- end -->"
COLUMNS = ("id", "what goes wrong", "in", "source", "here", "test")


def page(text: str) -> str:
    """Return the page with the present table between its two marks; what is around them is written by hand."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    """Return the table in Markdown, one row per defect."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for defect in known_defects():
        here = defect.how if defect.treatment == "overridden" else f"{defect.treatment}: {defect.how}"
        shown = f"`{defect.tests[0]}`" if defect.tests else f"none: {defect.no_test}"
        rows.append((defect.id, defect.title, releases(defect), defect.source, here, shown))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def releases(defect: Defect) -> str:
    """Return which releases have a defect, in the words that the page explains."""
    if defect.fixed_in == NEWEST:
        return f"not {dotted(NEWEST)}"
    if defect.fixed_in is not None:
        return f"before {dotted(defect.fixed_in)}"
    return "all" if defect.since == OLDEST else f"from {dotted(defect.since)}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
