"""The wording of a refusal: the flags with their values, then the rule, then a setting that works."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_moe.config.errors import ConfigError, MissingPackage
from megatron_moe.config.fields import all_fields
from megatron_moe.config.schema import Run


def value(run: Run, name: str) -> Any:
    """Return the value of a field, whichever section it is in."""
    return getattr(getattr(run, all_fields()[name].section), name)


def is_set(run: Run, name: str) -> bool:
    """Return whether a field differs from its default, which is as near as a `Run` comes to "was given"."""
    return value(run, name) != all_fields()[name].default


def refuse(run: Run, names: Iterable[str], rule: str) -> ConfigError:
    """Return the error to raise: the named fields as they would be typed, then the rule and the remedy."""
    names = tuple(names)
    return ConfigError(f"{', '.join(spelled(run, name) for name in names)}: {rule}", fields=names)


def package_missing(run: Run, names: Iterable[str], rule: str) -> MissingPackage:
    """Return the error to raise where a package is not installed that the named fields ask for."""
    return MissingPackage(str(refuse(run, names, rule)), fields=names)


def spelled(run: Run, name: str) -> str:
    """Return a field as it would be typed, with the DeepSpeed key or the flag of Megatron-LM's that it comes from."""
    return all_fields()[name].typed(value(run, name)) + origin(run, name)


def origin(run: Run, name: str) -> str:
    """Return ` (key in file)` for a value that a DeepSpeed file, or a flag of Megatron-LM's, has set; else nothing."""
    return f" ({run.origins[name]})" if name in run.origins else ""


def set_among(run: Run, names: Iterable[str]) -> list[str]:
    """Return those of the named fields that differ from their defaults."""
    return [name for name in names if is_set(run, name)]


def divisors(number: int, at_most: int = 64) -> str:
    """Return the divisors of a number, for "use one of": 1, 2, 4, 8."""
    return ", ".join(str(d) for d in range(1, min(number, at_most) + 1) if number % d == 0)


def nearest_multiples(number: int, step: int) -> str:
    """Return the positive multiples of `step` on both sides of a number it does not divide: `8 or 16`."""
    below = number // step * step
    return f"{below} or {below + step}" if below else str(step)
