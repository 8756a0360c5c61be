"""docs/engine_defects.md shows the table of the package, which names a test or a reason for every defect."""

from __future__ import annotations

import re

import pytest

from megatron_moe.platform.defects import Defect, known_defects
from tests.platform.defects_page import COLUMNS, PAGE, ROOT, met_with, page

ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if re.fullmatch(r"[ESN]\d+", (cells := [cell.strip() for cell in line.strip("|").split(" | ")])[0])
}


def test_the_page_has_the_table_of_the_package() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run: python -m tests.platform.defects_page"


def test_the_page_has_a_row_for_every_defect_in_the_order_of_the_file() -> None:
    assert list(ROWS) == [defect.id for defect in known_defects()] and len(ROWS) > 50


@pytest.mark.parametrize("defect", known_defects(), ids=lambda defect: defect.id)
def test_a_row_says_what_the_package_says(defect: Defect) -> None:
    where = ", ".join(f"`{file}`" for file in defect.where) or "-"
    here = f"{defect.treatment}: {defect.how}"
    test = ", ".join(f"`{name}`" for name in defect.tests) or f"no test: {defect.no_test}"
    expected = [defect.title, met_with(defect), defect.releases(), defect.source, here, where, test]
    assert ROWS[defect.id] == expected and len(expected) == len(COLUMNS) - 1


@pytest.mark.parametrize("defect", known_defects(), ids=lambda defect: defect.id)
def test_a_defect_names_tests_that_exist_or_says_why_there_is_none(defect: Defect) -> None:
    if defect.no_test is not None:
        assert defect.treatment in ("not used", "kept"), "what is overridden has a test"
        assert not defect.tests
        return
    named = [name.split("::") for name in defect.tests]
    assert named
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
    # The first test runs the engine's code and asks the table what to expect of this version of it.
    source = (ROOT / named[0][0]).read_text(encoding="utf-8")
    assert f'present("{defect.id}")' in source
