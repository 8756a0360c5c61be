"""Errors, and the largest of some, among which NaN is the largest: a plain `max` passes it over unless it is first."""

import math
from collections.abc import Iterable, Mapping

from torch import Tensor


def relative(got: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference in parts of the norm of what is wanted, in fp64."""
    wanted = wanted.double()
    return ((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()


def largest(errors: Iterable[float]) -> float:
    """Return the largest error; NaN if there is one."""
    return max(errors, key=_badness)


def worst(errors: Mapping[str, float]) -> str:
    """Return the name of the largest error."""
    return max(errors, key=lambda name: _badness(errors[name]))


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error
