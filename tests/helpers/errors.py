"""The largest of some errors, among which NaN is the largest: a plain `max` passes it over, unless it comes first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def largest(errors: Iterable[float]) -> float:
    """Return the largest error; NaN if there is one."""
    return max(errors, key=_badness)


def worst(errors: Mapping[str, float]) -> str:
    """Return the name of the largest error."""
    return max(errors, key=lambda name: _badness(errors[name]))


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error
