"""Parses and checks the data flags, which say where a run's tokens come from, without opening a file.

`--data-path` names one or more prefixes, with or without weights, that `--split` divides into train, valid and test;
`--train-data-path`, `--valid-data-path` and `--test-data-path` name prefixes for one split each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import DataConfig

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's


@dataclass(frozen=True)
class Blend:
    """A blend of datasets: their prefixes and, where given, a weight above zero for each."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    def shares(self) -> list[float] | None:
        """Return the weights as the engine divides them, to sum to 1."""
        return None if self.weights is None else _shares(self.weights)


@dataclass(frozen=True)
class Sources:
    """The data of a run: `mock`, or one `blend` divided by `split`, or a blend (or None) per split in `per_split`."""

    mock: bool = False
    blend: Blend | None = None
    split: str | None = None
    per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None

    def blend_of(self, split: int) -> Blend | None:
        """Return the blend that split number `split` (0 train, 1 valid, 2 test) draws from."""
        return self.blend if self.per_split is None else self.per_split[split]

    def prefixes(self) -> list[str]:
        """Return every prefix once, in the order of the flags."""
        blends = [self.blend_of(i) for i in range(len(SPLITS))]
        return list(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes))

    def sequence_range(self, split: int, num_sequences: int) -> tuple[int, int]:
        """Return the range [begin, end) of a dataset's sequences that the engine assigns to a split."""
        if self.split is None:
            return 0, num_sequences
        ends = [0.0]
        for share in parse_split(self.split):
            ends.append(ends[-1] + share)
        return round(ends[split] * num_sequences), round(ends[split + 1] * num_sequences)


def read_sources(data: DataConfig) -> Sources:
    """Return the sources that the data flags name.

    Raises:
        ConfigError: flags exclude each other, there is no data, or weights or the split are malformed.
    """
    flags = ("train_data_path", "valid_data_path", "test_data_path")
    given = [_flag(name) for name in ("data_path", *flags) if getattr(data, name)]
    per_split_given = [flag for flag in given if flag != "--data-path"]
    if data.mock_data:
        if given:
            raise ConfigError(f"--mock-data and {given[0]} exclude each other: leave one out")
        return Sources(mock=True)
    if not given:
        raise ConfigError("no data: give --data-path PREFIX, or --train-data-path PREFIX, or --mock-data")
    if data.data_path and per_split_given:
        raise ConfigError(f"--data-path and {per_split_given[0]} exclude each other: leave one out")
    if data.data_path:
        split = data.split if data.split is not None else DEFAULT_SPLIT
        parse_split(split)
        return Sources(blend=_parse_blend("--data-path", data.data_path), split=split)
    if data.split is not None:
        raise ConfigError(
            f"--split {data.split} divides --data-path; {per_split_given[0]} is divided already: leave --split out"
        )
    if not data.train_data_path:
        raise ConfigError(f"{per_split_given[0]} without --train-data-path: give that too")
    blends = tuple(_parse_blend(_flag(name), getattr(data, name)) if getattr(data, name) else None for name in flags)
    return Sources(per_split=(blends[0], blends[1], blends[2]))


def flag_of(data: DataConfig, prefix: str) -> str:
    """Return the flag that names a prefix."""
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    return next(_flag(name) for name in names if prefix in [word.strip() for word in getattr(data, name) or ()])


def parse_split(split: str) -> list[float]:
    """Return three shares that sum to 1, from one to three decimal numbers separated by commas.

    Raises:
        ConfigError: the text is something else, or the numbers sum to zero.
    """
    parts = [part.strip() for part in split.split(",")]
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", part) for part in parts):
        raise ConfigError(f"--split {split}: one to three numbers of zero or more, separated by commas, e.g. 969,30,1")
    numbers = [float(part) for part in parts] + [0.0] * (3 - len(parts))
    if sum(numbers) <= 0:
        raise ConfigError(f"--split {split}: the shares sum to zero, e.g. 969,30,1 works")
    return _shares(numbers)


def _shares(numbers: Sequence[float]) -> list[float]:
    array = numpy.array(numbers, dtype=numpy.float64)
    return (array / array.sum()).tolist()


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _parse_blend(flag: str, words: tuple[str, ...]) -> Blend:
    """Parse `PREFIX ...` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Megatron-LM reads an odd number of words as prefixes, weights included; here a first word that is a number means
    weights, and then every prefix needs one. A prefix whose name is a number can be written ./7.
    """
    words = tuple(word.strip() for word in words)
    shown = f"{flag} {' '.join(words)}"
    if len(words) == 1 or _number(words[0]) is None:
        for word in words:
            if not word:
                raise ConfigError(f"{shown}: an empty prefix")
            if len(words) > 1 and _number(word) is not None:
                raise ConfigError(f"{shown}: {word} looks like a weight; give every prefix its weight, or none")
        return Blend(words, None)
    if len(words) % 2:
        raise ConfigError(
            f"{shown}: {len(words)} words; weights and prefixes come in pairs: WEIGHT PREFIX WEIGHT PREFIX ..."
        )
    weights = []
    for word, prefix in zip(words[::2], words[1::2]):
        weight = _number(word)
        if weight is None or not math.isfinite(weight) or weight <= 0:
            raise ConfigError(
                f"{shown}: weight {word} of {prefix} must be a number above zero; to leave data out, drop its prefix"
            )
        if _number(prefix) is not None:
            raise ConfigError(
                f"{shown}: {prefix} is a number where a prefix is expected; WEIGHT PREFIX WEIGHT PREFIX ..."
            )
        weights.append(weight)
    return Blend(words[1::2], None if len(weights) == 1 else tuple(weights))
