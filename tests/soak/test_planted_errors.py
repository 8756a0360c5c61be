"""Every error of the list is noticed by the test or doctor layout that it names, and by an assertion of that test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.planted_errors import AREAS, copied, doctors_differences, outcome, plants, what_is_wrong


@pytest.mark.parametrize("area", AREAS)
def test_each_planted_error_is_noticed(area: str, tmp_path: Path, figure: Callable[..., None]) -> None:
    planted = [plant for plant in plants() if plant.area == area and plant.can_be_noticed]
    missed = {}
    for number, plant in enumerate(planted):
        if (reason := what_is_wrong(plant, tmp_path / str(number))) is not None:
            missed[plant.error] = reason
    figure(f"planted errors: {area}", trials=len(planted), failures=len(missed), missed=sorted(missed))
    assert missed == {}


def test_without_an_error_nothing_is_noticed(tmp_path: Path) -> None:
    folder = copied(tmp_path / "copy", None)
    named = {plant.noticed_by for plant in plants() if plant.can_be_noticed}
    flags = sorted(name.removeprefix("doctor ") for name in named if name.startswith("doctor "))
    told = outcome(folder, sorted(name for name in named if not name.startswith("doctor ")))
    assert told["ran"] >= len(named) - len(flags)
    assert told["failures"] == []
    assert {one: doctors_differences(folder, one)[0] for one in flags} == dict.fromkeys(flags, 0)
