"""The command lines of public Megatron-LM scripts: names in `megatron_scripts.txt`, values next to them."""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_HEADER = re.compile(r"\[(?P<name>\w+)(?: (?P<ranks>\d+))?(?: like (?P<like>\w+))?(?: with (?P<extra>\d+))?(?:: .*)?\]")
_LIKE = re.compile(r"\[(?P<name>\w+)\] like (?P<like>\w+)")


@dataclass
class _Block:
    """Values by flag that a script, or scripts of one family, have.

    Attributes:
        like: the block whose values it shares. extra: the script whose flags it has, too.
        added: flags that the list of names lacks. dropped: flags of that list that its command leaves out.
    """

    ranks: int = 0
    like: str = "paths"
    extra: str | None = None
    values: dict[str, list[str]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)


def names() -> tuple[list[str], list[list[str]]]:
    """Return Megatron-LM's flags, and those of each of 100 scripts."""
    lines = (FOLDER / "megatron_scripts.txt").read_text().splitlines()
    known = [line for line in lines if line.startswith("--")]
    return known, [[known[int(i)] for i in line.split()] for line in lines if line[:1].isdigit()]


@cache
def _blocks() -> dict[str, _Block]:
    blocks: dict[str, _Block] = {}
    block = _Block()
    for line in (FOLDER / "megatron_script_values.txt").read_text().splitlines():
        header = _LIKE.match(line) or _HEADER.match(line)
        if header:
            parts = header.groupdict()
            block = _Block(int(parts.get("ranks") or 0), parts["like"] or "paths", parts.get("extra"))
            blocks[parts["name"]] = block
        elif line and not line.startswith("#"):
            _read(block, line.split())
    return blocks


def _read(block: _Block, words: list[str]) -> None:
    """Add a line of flags with values to a block; `+` and `-` are about the flag that follows."""
    sign, values = "", []
    for word in words:
        if word in ("+", "-"):
            sign = word
        elif word.startswith("--") and sign == "-":
            block.dropped.add(word)
            sign = ""
        elif word.startswith("--"):
            if sign == "+":
                block.added.append(word)
            sign, values = "", []
            block.values[word] = values
        else:
            values.append(word)


def _value(name: str, flag: str) -> list[str]:
    """Return the values of a flag: those of a block, or of the first one that it is like, and has some."""
    own = _blocks()[name].values.get(flag)
    if own or name == "paths":
        return own or []
    return _value(_blocks()[name].like, flag)


def _flags(name: str) -> dict[str, list[str]]:
    block = _blocks()[name]
    listed = names()[1][int(name)] if name.isdigit() else []
    flags = {flag: _value(name, flag) for flag in [*listed, *block.added]}
    if block.extra is not None:
        flags = {**_flags(block.extra), **flags, **block.values}
        flags = {flag: values or _value(name, flag) for flag, values in flags.items()}
    return {flag: values for flag, values in flags.items() if flag not in block.dropped}


def command(name: str) -> tuple[list[str], int]:
    """Return the words of the command of a script, by its number or name, and its number of ranks."""
    return [word for flag, values in _flags(name).items() for word in (flag, *values)], _blocks()[name].ranks
