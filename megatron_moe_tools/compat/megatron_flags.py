"""Megatron-LM's flags that are no settings here, each with an answer: the table `megatron_flags.tsv`, and its use.

A row of the table answers for a flag, or for some values of it: `alias`, the same under another name (`target`, where
{} is the value); `always`, what is always so here; `ignored`, it only tunes what is not here; `refused`, not here, with
what to do instead; `unknown`, no flag of Megatron-LM's but a name that people know, from MindSpeed or Pai-Megatron
too, with the flag that they mean or what to do. A flag that is a setting here may have rows for values that only
Megatron-LM has. This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from megatron_moe.config.command_line import groups, is_flag, parts, unknown_flag, wrapped

ANSWERS = ("taken", "alias", "always", "ignored", "refused", "unknown")
TABLE = Path(__file__).with_name("megatron_flags.tsv")
_LAUNCHERS_SPELLINGS = {"--local_rank": "--local-rank"}
"""DeepSpeed's launcher, and torch's before torchrun, put such a flag into each rank's command."""


_READS = {"--use-rope-scaling": ("--rope-scaling-factor", "8.0")}
"""Switch -> the flag whose value is the {} of its target, and that flag's default."""


@dataclass(frozen=True)
class Answer:
    """A row of the table.

    Args:
        takes: how many values the flag takes: a number, `*`, `+`, or nothing where that is not known.
        values: those that the row is about, `nothing` for a flag without one; none: all that no other row is about.
        target: the flags that take its place.
    """

    flag: str
    takes: str
    values: tuple[str, ...]
    answer: str
    target: str
    reason: str

    def fits(self, given: Sequence[str]) -> bool:
        """Return whether the row is about these values."""
        if self.values == ("nothing",):
            return not given
        return not self.values or (bool(given) and all(_is_among(self.values, word) for word in given))

    def in_place(self, given: Sequence[str]) -> list[str]:
        """Return the words that take the place of the flag and its values: the target with the values put in."""
        words: list[str] = []
        for word in self.target.split():
            words += given if word == "{}" else [word]
        return words

    @property
    def says(self) -> str:
        """The reason, after what takes the flag's place, if anything does."""
        return f"{self.target}: {self.reason}" if self.target else self.reason


def _is_among(values: Sequence[str], word: str) -> bool:
    """Return whether a word is one of the values, as text or as a number."""
    if word in values:
        return True
    for value in values:
        with suppress(ValueError):
            if float(value) == float(word):
                return True
    return False


@lru_cache(maxsize=1)
def table() -> dict[str, tuple[Answer, ...]]:
    """Return flag -> its rows, those for some values before the one for all others."""
    rows: dict[str, tuple[Answer, ...]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        flag, takes, values, answer, target, reason = line.split("\t")
        rows[flag] = (*rows.get(flag, ()), Answer(flag, takes, tuple(values.split()), answer, target, reason))
    return rows


def row_for(flag: str, given: Sequence[str]) -> Answer | None:
    """Return the row that answers for a flag with these values; None where the table has none.

    A switch that is ignored is so when it is off, `--no-rl-skip-bos-token`, too: Megatron-LM has that of many switches.
    """
    rows = table().get(flag, ())
    if not rows and flag.startswith("--no-"):
        switched_on = table().get("--" + flag.removeprefix("--no-"), ())
        rows = tuple(replace(row, flag=flag) for row in switched_on if (row.answer, row.takes) == ("ignored", "0"))
    for row in rows:
        if row.fits(given):
            return row
    return None


@dataclass
class Translation:
    """A command line in this project's flags.

    Attributes:
        argv: the words for the parser.
        problems: an error for each flag that is unknown, refused, or used in a wrong way.
        sources: flag of this project -> Megatron-LM's as it was typed, which it stands for.
        notes: what to report at the start of the run, a line each.
    """

    argv: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def translate(argv: Sequence[str], own: Collection[str]) -> Translation:
    """Return a command line with Megatron-LM's flags replaced by this project's, dropped, or named as problems.

    Args:
        own: this project's flags, which stay as they are.
    """
    found = Translation()
    replaced: list[tuple[str, list[str]]] = []
    kept: dict[str, list[str]] = {}
    always: dict[str, None] = {}
    ignored: dict[str, list[str]] = {}
    typed_values = dict(map(parts, groups(argv)))
    for group in groups(argv):
        flag, given = parts(group)
        row = row_for(_LAUNCHERS_SPELLINGS.get(flag, flag), given)
        if row is None or row.answer == "unknown":
            if is_flag(group[0]) and flag not in own:
                found.problems.append(unknown(flag, own))
            else:
                found.argv += group
                kept[flag] = given
            continue
        typed = " ".join([row.flag, *given])
        if row.answer == "refused":
            found.problems.append(f"{typed}: {row.reason}")
        elif (row.takes == "+" and not given) or (row.takes.isdigit() and int(row.takes) != len(given)):
            found.problems.append(f"{typed}: takes {row.takes} values, and {len(given)} follow it")
        elif row.flag in _READS and "--multi-latent-attention" in typed_values:
            ignored.setdefault("latent attention reads --rope-type in its place", []).append(typed)
        elif row.answer == "alias":
            if row.flag in _READS:
                other, default = _READS[row.flag]
                given = typed_values.get(other, [default])
            words = row.in_place(given)
            found.argv += words
            found.notes.append(f"{typed} is {' '.join(words)} here: {row.reason}")
            replaced.append((typed, words))
        elif row.answer == "always":
            always[typed] = None
        elif not any(flag == other and switch in typed_values for switch, (other, _) in _READS.items()):
            ignored.setdefault(row.reason, []).append(typed)
    for typed, words in replaced:
        for flag, given in map(parts, groups(words)):
            found.sources[flag] = typed
            if flag in kept and kept[flag] != given:
                both = f"{typed}, {' '.join([flag, *kept[flag]])}"
                found.problems.append(f"{both}: the first is {' '.join([flag, *given])} here; keep one")
    if always:
        found.notes.insert(0, f"always so here: {', '.join(always)}")
    for reason, flags in ignored.items():
        found.notes.append(f"ignored: {', '.join(flags)}: {reason}")
    return found


def instead(row: Answer) -> str:
    """Return `; use X`, or what else to do, of a row about a name that is neither this project's nor Megatron-LM's."""
    if not row.target:
        return f"; {row.reason}"
    return f"; use {row.target}" + (f" ({row.reason})" if row.reason else "")


def unknown(flag: str, own: Collection[str]) -> str:
    """Return the error for a flag that is neither this project's nor Megatron-LM's, with the flag that was meant."""
    row = row_for(flag.replace("_", "-"), ())
    if row is not None and row.answer == "refused":
        return f"{flag}: {row.reason}"
    hint = instead(row) if row is not None and row.answer == "unknown" else ""
    theirs = (name for name, rows in table().items() if rows[0].answer != "unknown")
    return unknown_flag(flag, own, theirs, hint)


def help_texts() -> dict[str, str]:
    """Return the help of each flag of the table."""
    texts = {}
    for flag, rows in table().items():
        lines: list[str] = []
        for row in rows:
            whose = "no flag here" if row.answer == "unknown" else f"Megatron-LM's, here {row.answer}"
            use = f"; use {row.target}" if row.target else ""
            lines.append(f"{' '.join([flag, *row.values])}    [{whose}{use}]")
            if row.reason:
                lines += wrapped(row.reason, "  ")
        texts[flag] = "\n".join(lines)
    return texts
