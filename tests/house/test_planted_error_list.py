"""The list of planted errors (tests/soak/planted_errors.yaml) fits the code, the tests and the page.

`make soak ARGS=tests/soak/test_planted_errors.py` plants them; here nothing runs, so that a change which moves an
error's text or renames its test is seen at once.
"""

from __future__ import annotations

import ast

import pytest

from tests.soak.planted_errors import AREAS, PAGE, ROOT, Plant, page, plants

PLANTS = plants()


def test_forty_errors_and_more_are_spread_over_all_areas() -> None:
    assert len(PLANTS) >= 40
    assert {plant.area for plant in PLANTS} == set(AREAS)
    assert len({plant.error for plant in PLANTS}) == len(PLANTS)
    assert len({(plant.file, plant.right, plant.wrong) for plant in PLANTS}) == len(PLANTS)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.error)
def test_an_error_can_still_be_planted_and_names_what_notices_it(plant: Plant) -> None:
    right = (ROOT / "megatron_moe" / plant.file).read_text(encoding="utf-8")
    wrong = plant.in_place(right)
    assert wrong != right
    if plant.file.endswith(".py"):
        assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(right))
    if not plant.by_doctor:
        path, _, name = plant.noticed_by.partition("::")
        tests = {
            node.name
            for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        assert name in tests


def test_the_page_has_the_table_of_the_list() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run: python -m tests.soak.planted_errors"
