"""Which rows of a matrix `make test` runs, where other rows notice only what these notice too."""

from collections.abc import Iterable
from typing import Any

import pytest


def rows(every: Iterable[Any], *, test: Iterable[Any]) -> list[Any]:
    """Return all rows for `parametrize`. `make test` runs the rows in `test`, `make test-all` the others too."""
    every, first = list(every), list(test)
    assert first and all(row in every for row in first), "a row is not one of the matrix's"
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=() if row in first else pytest.mark.test_all)
        for row in every
    ]
