"""Reads config.json key by key, with types and in both spellings; errors name the key. Loads no torch."""

from __future__ import annotations

import math
from typing import Any

from megatron_moe.config.errors import ConfigError

_MISSING = object()
LARGEST = 2**31 - 1
"""Above any size of a model: arithmetic with the numbers of an untrusted configuration stays small."""


class Keys:
    """The keys of one config.json, or of a dictionary within it.

    Keys that are read are recorded, so that the others can be reported. A key that has two names in transformers is
    read by both; if both are there, they have to agree.

    Args:
        values: the dictionary.
        where: the folder, as messages name it.
        prefix: the prefix of nested keys, e.g. "rope_scaling.".

    Attributes:
        notes: what was assumed because a key is missing.
    """

    def __init__(self, values: dict[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix
        self.notes: list[str] = []
        self._read: set[str] = set()

    def nested(self, values: dict[str, Any], prefix: str) -> Keys:
        """Return the keys of a nested dictionary, which share these notes."""
        inner = Keys(values, self.where, prefix)
        inner.notes = self.notes
        return inner

    def with_defaults(self, **values: Any) -> Keys:
        """Return these keys, with values for those that the family's files leave out."""
        complete = Keys({**values, **self.values}, self.where, self.prefix)
        complete.notes, complete._read = self.notes, self._read
        return complete

    def refusal(self, key: str, rule: str) -> ConfigError:
        """Return the error for the value of a key; `rule` says what works."""
        value = self.values.get(key, _MISSING)
        shown = "is missing" if value is _MISSING else repr(value)
        return ConfigError(f"{self.where}: config.json: {self.prefix}{key} {shown}: {rule}")

    def has(self, key: str) -> bool:
        """Return whether the key is there and not null."""
        self._read.add(key)
        return self.values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Return whether the key is there and null; for one that is missing transformers may have another default."""
        self._read.add(key)
        return key in self.values and self.values[key] is None

    def ignore(self, *names: str) -> None:
        """Ignore keys whose value has no meaning here."""
        self._read.update(names)

    def raw(self, *names: str) -> Any:
        """Return the value of the first name that is there, None where none is; all names have to agree."""
        self._read.update(names)
        given = [name for name in names if self.values.get(name) is not None]
        if not given:
            return None
        first, value = given[0], self.values[given[0]]
        for name in given[1:]:
            if self.values[name] != value:
                raise self.refusal(name, f"contradicts {self.prefix}{first} {value!r}, which means the same")
        return value

    def _given(self, names: tuple[str, ...], default: object, kind: str) -> Any:
        value = self.raw(*names)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.refusal(names[0], f"has to be {kind}; the model is not defined without it")
        return default

    def integer(self, *names: str, low: int = 1, high: int = LARGEST, default: object = _MISSING) -> Any:
        """Return an int from low to high."""
        value = self._given(names, default, f"an integer of at least {low}")
        if value is default:
            return value
        if type(value) is not int or not low <= value <= high:
            limits = f"of at least {low}" if high == LARGEST else f"from {low} to {high}"
            raise self.refusal(self.spelled(names), f"has to be an integer {limits}")
        return value

    def number(self, *names: str, positive: bool = True, default: object = _MISSING) -> Any:
        """Return a finite float, above 0 or at least 0."""
        kind = f"a finite number {'above' if positive else 'of at least'} 0"
        value = self._given(names, default, kind)
        if value is default:
            return value
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise self.refusal(self.spelled(names), f"has to be {kind}")
        return float(value)

    def boolean(self, *names: str, default: object = _MISSING) -> Any:
        """Return true or false."""
        value = self._given(names, default, "true or false")
        if value is default:
            return value
        if type(value) is not bool:
            raise self.refusal(self.spelled(names), "has to be true or false")
        return value

    def dictionary(self, name: str) -> dict[str, Any] | None:
        """Return a nested dictionary; None where it is missing or null."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, "has to be a dictionary or null")
        return value

    def only(self, key: str, allowed: tuple[Any, ...], reason: str) -> None:
        """Refuse a value that is neither null nor one of those allowed."""
        value = self.raw(key)
        if value is None or any(type(value) is type(item) and value == item for item in allowed):
            return
        works = " or ".join(repr(item) for item in allowed) if allowed else "null"
        raise self.refusal(key, f"{reason}; this works: {works}")

    def assumed(self, key: str, value: object) -> None:
        """Note the value that is assumed for a missing key."""
        self.notes.append(f"config.json has no {self.prefix}{key}: taken as {value!r}, transformers' default")

    def spelled(self, names: tuple[str, ...]) -> str:
        """Return the first of the names that the file uses."""
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def unread(self) -> list[str]:
        """Return the keys that were not read and are not null."""
        return [key for key, value in self.values.items() if key not in self._read and value is not None]


MOST_LAYERS = 10_000
"""The most layers that an expression of --moe-layer-freq may have."""
