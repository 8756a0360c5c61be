"""docs/engine_defects.md says what the table in the code says, and names a test or a reason for every defect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_moe.platform.advisories import DEFECTS
from megatron_moe.platform.defect import Defect

ROOT = Path(__file__).parents[2]
ROWS = {
    cells[0]: cells[1:]
    for line in (ROOT / "docs" / "engine_defects.md").read_text(encoding="utf-8").splitlines()
    if re.fullmatch(r"[ESN]\d+", (cells := [cell.strip() for cell in line.strip("|").split(" | ")])[0])
}


@pytest.mark.claim("The table of megatron-core's defects says what the code and its tests say.")
def test_the_page_has_a_row_for_every_defect_in_the_order_of_the_code() -> None:
    assert list(ROWS) == [defect.id for defect in DEFECTS] and len(DEFECTS) > 50


@pytest.mark.claim("The table of megatron-core's defects says what the code and its tests say.")
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.id)
def test_a_row_says_what_the_code_says(defect: Defect) -> None:
    where = ", ".join(f"`{file}`" for file in dict.fromkeys(file for file, _ in defect.where)) or "-"
    told = f"{defect.treatment}: {defect.how}"
    assert ROWS[defect.id][:-1] == [defect.title, defect.versions(), defect.source, told, where]


@pytest.mark.claim("The table of megatron-core's defects says what the code and its tests say.")
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.id)
def test_a_row_names_tests_that_exist_or_says_why_there_is_none(defect: Defect) -> None:
    cell = ROWS[defect.id][-1]
    if cell.startswith("no test: "):
        assert defect.treatment in ("not used", "kept"), "what is overridden or refused has a test"
        return
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)
    assert named
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
    # The first test runs the engine's code and asks the table what to expect of this version of it.
    source = (ROOT / named[0][0]).read_text(encoding="utf-8")
    assert f'present("{defect.id}")' in source
