"""Which cases of a test run with both engines, where one engine is enough for the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cases(every: Iterable[Any], *, both: Iterable[Any]) -> list[Any]:
    """Return all cases for `parametrize`, of which those in `both` run with either engine, the others with one."""
    every, wanted = list(every), list(both)
    assert all(case in every for case in wanted), "a case is not one of the test's"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in wanted else _ONE)
        for case in every
    ]


_ONE = pytest.mark.one_engine
