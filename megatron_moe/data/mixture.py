"""Named sources and validation sets of `--data-config`, and which source each sample of a run is of. Loads no torch.

    sources:
      web: {path: data/web_*, weight: {linear: [[0, 0.9], [2000000000, 0.5]]}}
      code: {path: data/code, weight: 0.1, epochs: 2, when_done: drop}
    validation:
      web: {path: data/valid_web, batches: 20}

Weights are relative to one another, a number or a schedule over the tokens that the run has read (sequences x length).
Each sample of the run is the next one of a source. `Mixture` chooses the source to which most is owed, in integers, so
that ranks, batch sizes and restarts make no difference. A checkpoint keeps how many samples every source gave and what
it is owed; with these a run goes on under any new schedule, and no sample is lost or repeated.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob, has_magic
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_moe.config.cli import read_mapping
from megatron_moe.config.errors import ConfigError

FLAG = "--data-config"
STOP, REPEAT, DROP = "stop", "repeat", "drop"
_UNIT = 1 << 40
"""What one sample is worth; shares of it are rounded down to integers."""
_BLOCK = 4096
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SPLIT = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){2}")


@dataclass(frozen=True)
class Weight:
    """A weight over the tokens read: `values[i]` from `tokens[i]` on, or on straight lines between these points."""

    tokens: tuple[int, ...]
    values: tuple[float, ...]
    linear: bool = False

    def at(self, tokens: int) -> float:
        """Return the weight after so many tokens."""
        place = bisect_right(self.tokens, tokens) - 1
        value = self.values[place]
        if self.linear and place + 1 < len(self.tokens):
            begin, end = self.tokens[place : place + 2]
            value += (self.values[place + 1] - value) * (tokens - begin) / (end - begin)
        return value

    def constant_until(self, tokens: int) -> float:
        """Return the number of tokens from which the weight may be another one than after `tokens`."""
        place = bisect_right(self.tokens, tokens)
        if place == len(self.tokens):
            return math.inf
        return tokens + 1 if self.linear else self.tokens[place]


@dataclass(frozen=True, kw_only=True)
class Named:
    """Datasets with a name.

    split: three shares of their documents, of which training takes the first and validation the second; None: all.
    """

    name: str
    prefixes: tuple[str, ...]
    split: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataSource(Named):
    """A source of training samples.

    epochs: the passes over it after which `when_done` says whether the run stops, or goes on without it; None: it is
    repeated.
    """

    weight: Weight
    epochs: float | None = None
    when_done: str = REPEAT


@dataclass(frozen=True, kw_only=True)
class ValidationSet(Named):
    """A validation set of so many global `batches`; None: whole."""

    batches: int | None = None


@dataclass(frozen=True)
class NamedData:
    """What a file of `--data-config` names."""

    sources: tuple[DataSource, ...]
    validation: tuple[ValidationSet, ...]

    def prefixes(self) -> list[str]:
        """Return every prefix once, in the order of the file."""
        every: tuple[Named, ...] = (*self.sources, *self.validation)
        return list(dict.fromkeys(prefix for one in every for prefix in one.prefixes))


def read_data_config(path: str, trains: bool = True) -> NamedData:
    """Read a file of `--data-config`; `trains`: whether its sources are read, which need not be there otherwise.

    Raises:
        ConfigError: naming file, source, key and value, and what works.
    """
    where = f"{FLAG} {path}"
    document = read_mapping(FLAG, path, "`sources:` and, below it, `NAME: {path: PREFIX, weight: 1}`")
    _require_keys(where, document, ("sources", "validation"))
    sources, sets = [], []
    data: dict[str, Any]
    for name, place, entry in _entries(where, document, "sources") if trains else ():
        _require_keys(place, entry, ("path", "weight", "split", "epochs", "when_done"))
        epochs, when_done = entry.get("epochs"), entry.get("when_done", REPEAT if "epochs" not in entry else DROP)
        if when_done not in (STOP, REPEAT, DROP):
            raise ConfigError(f"{place}.when_done: {when_done!r}; write stop, repeat or drop")
        if "epochs" in entry:
            epochs = _number(f"{place}.epochs", epochs, "a number above 0, e.g. 2")
            if epochs == 0:
                raise ConfigError(f"{place}.epochs: is 0; leave the source out, or write a number above 0, e.g. 2")
            if when_done == REPEAT:
                raise ConfigError(f"{place}.epochs: limits nothing where when_done is repeat; drop one of them")
        elif when_done != REPEAT:
            epochs = 1.0
        weight = _weight(f"{place}.weight", entry.get("weight"))
        data = {"name": name, "prefixes": _prefixes(place, entry), "split": _split(place, entry)}
        sources.append(DataSource(**data, weight=weight, epochs=epochs, when_done=when_done))
    for name, place, entry in _entries(where, document, "validation"):
        _require_keys(place, entry, ("path", "batches", "split"))
        batches = entry.get("batches")
        if "batches" in entry and (type(batches) is not int or batches < 1):
            raise ConfigError(f"{place}.batches: {batches!r}; write a whole number above 0, or leave it out for all")
        data = {"name": name, "prefixes": _prefixes(place, entry), "split": _split(place, entry)}
        sets.append(ValidationSet(**data, batches=batches))
    for tokens in sorted({tokens for source in sources for tokens in source.weight.tokens}):
        if not any(source.weight.at(tokens) for source in sources):
            raise ConfigError(f"{where}: after {tokens} tokens every weight is 0; give one source a weight above 0")
    return NamedData(tuple(sources), tuple(sets))


def _entries(where: str, document: Mapping[str, Any], section: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return name, place for messages, and keys of each entry of a section."""
    entries = document.get(section, {})
    if not isinstance(entries, dict):
        raise ConfigError(f"{where}: {section}: {entries!r}; write `NAME: {{path: PREFIX}}` below it")
    found = []
    for name, entry in entries.items():
        place = f"{where}: {section}.{name}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{place}: a name has letters, digits, `_`, `-` and `.` alone")
        if not isinstance(entry, dict):
            raise ConfigError(f"{place}: {entry!r}; write {{path: PREFIX, ...}}")
        found.append((name, place, entry))
    return found


def _require_keys(place: str, entry: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in entry:
        if key not in known:
            raise ConfigError(f"{place}: unknown key {key!r}; it takes {', '.join(known)}")


def _prefixes(place: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    path = entry.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{place}.path: {path!r}; give the prefix of a dataset, or a pattern of prefixes")
    if not has_magic(path) or os.path.exists(f"{path}.idx"):
        return (path,)
    found = sorted(name.removesuffix(".idx") for name in glob(f"{path}.idx"))
    if not found:
        raise ConfigError(f"{place}.path: no dataset is called {path}; check it by `ls {path}.idx`")
    return tuple(found)


def _split(place: str, entry: Mapping[str, Any]) -> str | None:
    split = entry.get("split")
    if "split" in entry and not (isinstance(split, str) and _SPLIT.fullmatch(split)):
        raise ConfigError(f'{place}.split: {split!r}; write three shares, train\'s first, e.g. "969,30,1"')
    return split


def _weight(place: str, given: object) -> Weight:
    if not isinstance(given, dict):
        return Weight((0,), (_number(place, given, "a number, or {steps: [[0, 0.5], [1000000, 0.1]]}"),))
    if len(given) != 1 or not given.keys() <= {"steps", "linear"}:
        raise ConfigError(f"{place}: {given!r}; a schedule is {{steps: [[TOKENS, WEIGHT], ...]}} or {{linear: ...}}")
    ((kind, points),) = given.items()
    if not isinstance(points, list) or not points or any(not isinstance(p, list) or len(p) != 2 for p in points):
        raise ConfigError(f"{place}.{kind}: {points!r}; write pairs of tokens and weight, [[0, 0.5], [1000000, 0.1]]")
    tokens = [_number(f"{place}.{kind}", point[0], "a whole number of tokens") for point in points]
    values = [_number(f"{place}.{kind}", point[1], "a weight of at least 0") for point in points]
    rising = all(before < after for before, after in pairwise(tokens))
    if tokens[0] != 0 or not rising or any(count % 1 for count in tokens):
        raise ConfigError(f"{place}.{kind}: tokens {tokens}; they begin at 0 and rise, in whole numbers")
    return Weight(tuple(map(int, tokens)), tuple(values), kind == "linear")


def _number(place: str, given: object, wanted: str) -> float:
    number = math.nan
    if isinstance(given, (int, float, str)) and not isinstance(given, bool):
        with suppress(ValueError):
            number = float(given)  # 1e9 is a text in YAML 1.1
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(f"{place}: {given!r}; write {wanted}")
    return number


class _State(NamedTuple):
    """Of each source the samples taken, and what it is owed in units of a sample / `_UNIT`."""

    taken: tuple[int, ...]
    owed: tuple[int, ...]


class Mixture:
    """The source of each sample of a run, and its number there: a function of schedule, state and number alone."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        epoch_samples: Sequence[int],
        seq_length: int,
        first: int = 0,
        saved: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Begin at a sample.

        Args:
            epoch_samples: the samples of one epoch of each source.
            first: the run's samples so far.
            saved: what `state` returned there.
        """
        self.sources, self.epoch_samples = tuple(sources), tuple(epoch_samples)
        self.seq_length, self.first, self._saved = seq_length, first, dict(saved or {})
        self._limits: list[float] = []
        for source, count in zip(sources, epoch_samples):
            self._limits.append(math.inf if source.epochs is None else max(int(source.epochs * count), 1))
        known = [self._saved.get(source.name, {"samples": 0, "owed": 0}) for source in sources]
        self._starts = [_State(tuple(one["samples"] for one in known), tuple(one["owed"] for one in known))]
        self._blocks: dict[int, list[tuple[int, int]]] = {}

    def at(self, number: int) -> tuple[int, int]:
        """Return the source of the run's sample `number`, and which of the source's samples it is.

        Raises:
            IndexError: it is before `first`, or after the end.
        """
        block, inside = divmod(number - self.first, _BLOCK)
        if block < 0:
            raise IndexError(f"sample {number} is before the start at {self.first}")
        while block not in self._blocks:
            self._fill(min(block, len(self._starts) - 1))
        choices = self._blocks[block]
        if inside >= len(choices):
            raise IndexError(f"sample {number} comes after the end of the sources")
        return choices[inside]

    def lasts(self, samples: int) -> bool:
        """Return whether the sources give the run's first `samples` samples."""
        try:
            return samples <= self.first or bool(self.at(samples - 1))
        except IndexError:
            return False

    def state(self, number: int) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint after the run's first `number` samples keeps of every source, former ones too."""
        now = self._state(number)
        found = dict(self._saved)
        for source, samples, owed in zip(self.sources, now.taken, now.owed):
            facts = {"samples": samples, "owed": owed, "prefixes": list(source.prefixes), "split": source.split}
            found[source.name] = facts
        return found

    def epochs(self, number: int) -> dict[str, float]:
        """Return the passes over each source that the run's first `number` samples made."""
        if number > self.first:
            self.at(number - 1)
        block, inside = divmod(number - self.first, _BLOCK)
        taken = list(self._starts[block].taken)
        if inside:
            for source, index in self._blocks[block][:inside]:
                taken[source] = index + 1
        return {source.name: samples / count for source, samples, count in zip(self.sources, taken, self.epoch_samples)}

    def _state(self, number: int) -> _State:
        if number > self.first:
            self.at(number - 1)
        block, inside = divmod(number - self.first, _BLOCK)
        return self._advance(self._starts[block], number - inside, inside)[1]

    def _fill(self, block: int) -> None:
        choices, after = self._advance(self._starts[block], self.first + block * _BLOCK, _BLOCK)
        self._blocks[block] = choices
        if block + 1 == len(self._starts):
            self._starts.append(after)
        while len(self._blocks) > 2:
            del self._blocks[next(iter(self._blocks))]

    def _advance(self, state: _State, first: int, count: int) -> tuple[list[tuple[int, int]], _State]:
        """Choose the sources of `count` samples from `first` on, fewer at the end; return them and the state after."""
        taken, owed = list(state.taken), list(state.owed)
        choices: list[tuple[int, int]] = []
        shares: dict[int, int] = {}
        until: float = first
        for number in range(first, first + count):
            if number >= until:
                shares, until = self._shares(number, taken)
                each = sum(shares.values())
            if not shares:
                break
            for source, share in shares.items():
                owed[source] += share
            chosen = max(shares, key=owed.__getitem__)
            if taken[chosen] >= self._limits[chosen]:
                break  # of a source that stops the run
            owed[chosen] -= each
            choices.append((chosen, taken[chosen]))
            taken[chosen] += 1
            if taken[chosen] >= self._limits[chosen]:
                until = number + 1
        return choices, _State(tuple(taken), tuple(owed))

    def _shares(self, number: int, taken: Sequence[int]) -> tuple[dict[int, int], float]:
        """Return the shares of the sources that take part in a sample, and the first sample that may have others."""
        tokens = number * self.seq_length
        weights: dict[int, float] = {}
        until = math.inf
        for place, source in enumerate(self.sources):
            until = min(until, source.weight.constant_until(tokens) / self.seq_length)
            is_over = source.when_done == DROP and taken[place] >= self._limits[place]
            if not is_over and (weight := source.weight.at(tokens)) > 0:
                weights[place] = weight
        total = sum(weights.values())
        return {place: int(weight / total * _UNIT) for place, weight in weights.items()}, until
