"""The command line of `megatron-moe flags`: what a Megatron-LM flag, list of flags or script is here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_moe.config import cli, megatron_flags
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.megatron_flags import ANSWERS, Answer
from megatron_moe.config.paths import read_settings
from megatron_moe.io.program import DONE, FAILED, note, run_program, say
from megatron_moe_tools.megatron_flags import script

NAME = "megatron-moe flags"
BY_VALUE = "by value"
"""The answer for a flag without the value that decides."""

USAGE = """[--json | --rewrite] FLAG [VALUE ...] ... | --script FILE ...

What a flag of Megatron-LM is here: taken, an alias of another flag, always so, ignored, refused, or unknown; of a flag
whose value decides, and is not given, the answer for each value.

--json          print an object, flag -> {"answer": ..., "reason": ...}
--rewrite       print the command that trains the same model here; $VARIABLES stay as they are
--script FILE   take the flags from a shell script, which is read and not run, or from a test case of Megatron-LM's
                (.yaml); may be given several times

The exit status of --rewrite and --script is 1 where a flag is refused or unknown: without it another model trains.
"""


@dataclass(frozen=True)
class Asked:
    """A flag with its values, as typed, and its answer; `row` is the table's, where it has one."""

    flag: str
    values: tuple[str, ...]
    answer: str
    reason: str
    row: Answer | None


def main(argv: list[str]) -> int:
    """Answer as the command line asks, and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    files, words, switches = _split(argv)
    if {"--json", "--rewrite"} <= switches:
        raise ConfigError("--json, --rewrite: print different things; keep one")
    if "--help" in switches or not (files or words):
        say(f"usage: {NAME} {USAGE}")
        return DONE
    read = script.Script(flags=[megatron_flags.parts(group) for group in megatron_flags.groups(words)])
    for file in files:
        text = read_settings("--script", file, "shell script")
        found = script.read_test_case(text, file) if file.endswith((".yaml", ".yml")) else script.read(text)
        if not found.flags:
            raise ConfigError(
                f"--script {file}: has no command of a .py program with flags; give a shell script, or a test case of "
                "Megatron-LM's with MODEL_ARGS"
            )
        read.flags += found.flags
        read.variables.update(found.variables)
        read.conditions.update(found.conditions)
        read.launcher = found.launcher or read.launcher
        read.sourced += found.sourced
    asked = [ask(flag, values, [read.resolved(value) for value in values]) for flag, values in read.flags]
    if "--json" in switches:
        say(json.dumps({one.flag: {"answer": one.answer, "reason": one.reason} for one in asked}, indent=2))
    elif "--rewrite" in switches:
        say(rewritten(asked, read))
    else:
        say(listed(asked, read))
    lost = [one.flag for one in asked if one.answer in ("refused", "unknown")]
    if lost and (files or "--rewrite" in switches):
        note(f"{NAME}: another model trains without what is refused or unknown: {', '.join(lost)}")
        return FAILED
    return DONE


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], set[str]]:
    """Return the scripts, the flags that are asked about, and this program's own switches."""
    files, words, switches = [], [], set()
    rest = iter(argv)
    for word in rest:
        if word == "--script":
            file = next(rest, None)
            if file is None:
                raise ConfigError("--script: names no file; use --script FILE")
            files.append(file)
        elif word in ("--json", "--rewrite", "--help", "-h"):
            switches.add("--help" if word == "-h" else word)
        else:
            words.append(word)
    if words and not megatron_flags.is_flag(words[0]):
        raise ConfigError(f"{words[0]}: is no flag; write e.g. --moe-grouped-gemm, or --script FILE")
    return files, words, switches


def ask(flag: str, values: Sequence[str], resolved: Sequence[str]) -> Asked:
    """Return the answer for a flag.

    Args:
        values: as typed. resolved: the same without quotes, with what is known of the variables put in.
    """
    rows = megatron_flags.table().get(flag, ())
    if not values and any(one.values for one in rows):
        said = [f"{', '.join(one.values) or 'any other'}: {one.answer} {one.target}".strip() for one in rows]
        said = [f"{text} ({one.reason})" for text, one in zip(said, rows)]
        if flag in _own():
            said.append("any other: taken")
        return Asked(flag, (), BY_VALUE, "; ".join(said), None)
    row = megatron_flags.row_for(flag, resolved)
    if row is None and flag in _own():
        return Asked(flag, tuple(values), "taken", _own()[flag], None)
    if row is None or row.answer == "unknown":
        return Asked(flag, tuple(values), "unknown", megatron_flags.unknown(flag, _own()), None)
    target = f"{row.target}: " if row.target else ""
    return Asked(flag, tuple(values), row.answer, target + row.reason, row)


@lru_cache(maxsize=1)
def _own() -> dict[str, str]:
    """Return this project's flags, each with the help of its field."""
    helps = {name: field.help for name, field in all_fields().items()}
    actions = cli._build_parser()._actions
    return {option: helps.get(action.dest, action.help or "") for action in actions for option in action.option_strings}


def listed(asked: Sequence[Asked], read: script.Script) -> str:
    """Return a line for each flag, by answer, and the counts; flags that are taken are only counted."""
    counts = Counter(one.answer for one in asked)
    lines = []
    for answer in (*ANSWERS, BY_VALUE):
        for one in asked:
            if one.answer == answer and (answer != "taken" or len(asked) == 1):
                lines.append(f"{answer:8} {' '.join([one.flag, *one.values])}: {one.reason}")
    lines.append(", ".join(f"{counts[answer]} {answer}" for answer in (*ANSWERS, BY_VALUE) if counts[answer]))
    return "\n".join([*lines, *_open_in(read)])


def rewritten(asked: Sequence[Asked], read: script.Script) -> str:
    """Return the command with this project's flags, and before it a comment for each flag that has no place in it.

    What the script leaves open has Megatron-LM's defaults there, which the command takes.
    """
    comments: list[str] = []
    lines: dict[str, list[str]] = {"--defaults": ["--defaults", "megatron"]}
    for one in asked:
        typed = " ".join([one.flag, *one.values])
        if one.answer in ("refused", "unknown"):
            reason = one.reason
            if one.answer == "unknown":
                known = one.flag in megatron_flags.table()
                reason = reason.partition("; ")[2] if known else "no flag of Megatron-LM's or ours"
            comments.append(f"# {one.answer}: {typed}: {reason}")
        elif one.answer in ("taken", "alias"):
            words = [one.flag, *one.values] if one.row is None else one.row.in_place(one.values)
            for group in megatron_flags.groups(words):
                if lines.get(group[0], group) != group:
                    comments.append(f"# given more than once, the last is kept: {' '.join(lines[group[0]])}")
                lines[group[0]] = group
    launcher = " ".join([*read.launcher, "pretrain_moe.py"]) if read.launcher else "megatron-moe train"
    command = " \\\n".join([launcher, *(f"  {' '.join(g)}" for g in lines.values())])
    return "\n".join([*(f"# {line}" for line in _open_in(read)), *comments, command])


def _open_in(read: script.Script) -> list[str]:
    """Return what a script's text leaves open, a line each."""
    return [
        *(f"not read: {file}, which the script sources; add --script for it" for file in read.sourced),
        *(f"only if {test}: {flag}; take it out if that does not hold" for flag, test in read.conditions.items()),
    ]
