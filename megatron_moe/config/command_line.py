"""The parser of every program, which finds mistakes that can be made with any flag; and the help of the flags."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import (
    FREE_TEXT,
    choice_suggestion,
    number_meant,
    require_expanded,
    require_typed,
    suggestion,
)
from megatron_moe.config.launch import rank_that_prints

WHOLE_MESSAGE = "\0"
"""What begins an error of a conversion that names its flag: argparse puts the flag before each."""
_SWITCH_WORDS = frozenset("true false on off yes no 1 0".split())
_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|-(inf|nan)$")

_NUMBER = re.compile(r"-(\.?\d|inf|nan)")


# The program's name

SCRIPT = "pretrain_moe.py"
"""The entry script of a training run."""

_command: str | None = None
"""`megatron-moe COMMAND` where this process was started as one."""


def program_name(script: str) -> str:
    """Return what the user has started, for usage and messages: `megatron-moe COMMAND`, `script` where it was none."""
    return _command or script


@contextmanager
def started_as(command: str) -> Iterator[None]:
    """Let `program_name` return a command."""
    global _command
    before, _command = _command, command
    try:
        yield
    finally:
        _command = before


# Words of a command line


def is_flag(word: str) -> bool:
    """Return whether a word of a command line is a flag, as argparse has it: `--name` or `--name=value`."""
    return len(word) > 2 and word.startswith("--") and " " not in word.split("=")[0]


def groups(argv: Iterable[str]) -> Iterator[list[str]]:
    """Yield each word that begins with a dash and is no number, with the words up to the next; the first ones, too."""
    group: list[str] = []
    for word in argv:
        if is_flag(word) or (word.startswith("-") and not _NUMBER.match(word)):
            if group:
                yield group
            group = []
        group.append(word)
    if group:
        yield group


def parts(group: Sequence[str]) -> tuple[str, list[str]]:
    """Return the flag of a group and its values, also of `--flag=value`."""
    flag, equals, value = group[0].partition("=")
    return flag, ([value] if equals else []) + list(group[1:])


def unknown_flag(flag: str, known: Collection[str], also: Iterable[str] = (), hint: str = "") -> str:
    """Return the error for an unknown flag, with the one that was meant.

    Args:
        also: flags that are not ours, and may be meant. hint: what was meant, where the caller knows it.
    """
    plain = flag.replace("_", "-")
    prefixed = [name for name in known if name.startswith(plain)] if len(plain) > 4 else []
    if not hint:
        hint = f"; did you mean {prefixed[0]}?" if len(prefixed) == 1 else suggestion(plain, [*known, *also])
    return f"unknown flag {flag} (flags may not be shortened){hint or '; --help lists every flag'}"


# The parser


class Formatter(argparse.HelpFormatter):
    """A formatter of help in two columns as wide as the terminal, with each flag's text next to it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42, width=min(shutil.get_terminal_size().columns, 130))


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError where argparse would print and exit: every rank parses, and one prints.

    Negative numbers may have an exponent. A flag with two values, an empty value, a value of a switch, and
    characters that a web page has in place of `-` and `"` are errors.
    """

    checks_words = True
    """Whether the words are checked here; not where they are a translation of what was typed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = _NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        before, _, whole = message.partition(WHOLE_MESSAGE)
        text = whole or before.removeprefix("argument ")
        flag, _, expected = text.partition(": expected ")
        if expected in ("one argument", "at least one argument"):
            raise ConfigError(
                f"{flag}: needs a value, which an unset variable does not give; write {flag} VALUE, or {flag}=VALUE if "
                "it begins with -"
            )
        raise ConfigError(text)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if WHOLE_MESSAGE in str(error) or not action.option_strings:
                raise
            shown, text = f"{action.option_strings[0]} {arg_string}", str(error.message)
            if not text.startswith("invalid "):  # the conversion has said what is wrong, after the value
                raise ConfigError(f"{shown}: {text.removeprefix(f'{arg_string}: ')}") from None
            whole = action.type is int or getattr(action.type, "__name__", "") == "int"
            noun, kind = ("a whole number", int) if whole else ("a number", float)
            raise ConfigError(f"{shown}: not {noun}{number_meant(arg_string, (kind,))}") from None

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.option_strings and action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = choice_suggestion(str(value), known)
            raise ConfigError(f"{action.option_strings[0]} {value}: not one of {', '.join(known)}{near}")
        super()._check_value(action, value)

    def print_help(self, file: Any = None) -> None:
        if rank_that_prints() == 0:
            super().print_help(file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if self.checks_words:
            self.require_sound(words)
        return super().parse_known_args(words, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            flag = extra[0].partition("=")[0]
            if is_flag(extra[0]):
                raise ConfigError(f"unknown flag {flag}{suggestion(flag, self._every_option())}")
            raise ConfigError(unexpected(extra[0], self._every_option()))
        return found

    def require_sound(self, words: Sequence[str]) -> None:
        """Refuse flags of this parser with two values, an empty one, a switch's, or one that was pasted."""
        typed: dict[str, str] = {}
        for group in groups(words):
            flag, given = parts(group)
            action = self._option_string_actions.get(flag)
            if action is not None and action.dest in FREE_TEXT:
                continue
            for word in group:
                require_typed(word)
            if action is None:
                continue
            for place, value in enumerate(given):
                if not value.strip():
                    raise ConfigError(
                        f"{flag} {value!r}: is empty, as an unset variable is; give a value, or leave the flag out"
                    )
                require_expanded(action.dest, value, f"{flag} " if place == 0 or action.nargs == "+" else "")
            if action.nargs == 0 and given and ("=" in group[0] or given[0].lower() in _SWITCH_WORDS):
                own = self.fields_by_flag().items()
                off = [option for option, dest in own if dest == action.dest and option.startswith("--no-")]
                no = f", or {off[0]}" if off and flag not in off else ""
                raise ConfigError(
                    f"{flag} {given[0]}: is a switch and takes no value; write {flag}{no}, or leave it out"
                )
            shown = " ".join([flag, *given])
            if typed.get(action.dest, shown) != shown and not isinstance(action, argparse._AppendAction):
                raise ConfigError(f"{typed[action.dest]}, {shown}: is given twice; keep one")
            typed[action.dest] = shown

    def fields_by_flag(self) -> dict[str, str]:
        """Return each flag with the name of its value."""
        return {option: action.dest for action in self._actions for option in action.option_strings}

    def _every_option(self) -> list[str]:
        """Return the options of this parser and of its commands."""
        found = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [option for parser in action.choices.values() for option in parser._option_string_actions]
        return found


def unexpected(word: str, options: Sequence[str]) -> str:
    """Return the error for a word that is none of the program's `options` and no value, with what was meant."""
    flag = "--" + word.lstrip("-").partition("=")[0].partition(" ")[0].replace("_", "-")
    if " " in word and word.startswith("-"):
        hint = "it is one word with a space in it; take the quotation marks away"
    elif word == "\\":
        hint = "behind the backslash that continues a line is a space; remove it"
    elif word.startswith("#"):
        hint = "a comment ends at the line that `\\` continues; put it above the command"
    elif word != "--" and flag in options:
        hint = f"a flag begins with two dashes: {flag}"
    else:
        hint = "every value follows its flag"
    return f"unexpected argument {word!r}: {hint}"


# The help: about thirty lines, all flags, a group or one flag; and the page of all

EXAMPLES = (
    ("try it", "train --preset tiny --mock-data --vocab-size 1000 --train-iters 20"),
    (
        "own text, in two steps",
        "prepare --input text.jsonl --output-prefix data/mine --tokenizer-type ByteTokenizer --append-eod",
        "train --preset demo --data-path data/mine_text_document --tokenizer-type ByteTokenizer "
        "--train-iters 200 --save runs/a --load runs/a --save-interval 50",
    ),
    (
        "a downloaded model, on 8 GPUs",
        "train --nproc-per-node 8 --load-hf models/DeepSeek-V2-Lite --bf16 --expert-model-parallel-size 8 ...",
    ),
)
MOST_USED = (
    "preset config data_path mock_data tokenizer_type tokenizer_model seq_length micro_batch_size global_batch_size "
    "train_iters lr bf16 tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size save load "
    "save_interval metrics_file"
).split()
_COLUMN = 40


@dataclass(frozen=True)
class Entry:
    """The help of one flag. flags: its spellings, `--x` before `--no-x`. values: as they are typed. text: its meaning.

    group: the section of the schema, or `start from`. dest: the field, or the name of a flag that is none.
    """

    dest: str
    group: str
    flags: tuple[str, ...]
    values: str
    text: str

    @property
    def typed(self) -> str:
        """The flags with their value, `--x, --no-x` or `--lr X`."""
        return f"{', '.join(self.flags)} {self.values}".rstrip()


def entries(parser: argparse.ArgumentParser) -> list[Entry]:
    """Return an entry for each setting of the parser of the flags, in the order of its groups."""
    found: dict[str, Entry] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            known = found.get(action.dest)
            if known is not None:  # the opposite of a switch
                flags = (*known.flags, *action.option_strings)
                found[action.dest] = Entry(known.dest, known.group, flags, known.values, known.text)
            elif not isinstance(action, argparse._HelpAction):
                values = "" if action.nargs == 0 else str(action.metavar)
                values += " ..." if action.nargs == "+" else ""
                text = (action.help or "").replace("%%", "%")
                found[action.dest] = Entry(action.dest, str(group.title), tuple(action.option_strings), values, text)
    return list(found.values())


def answer_help(
    argv: Sequence[str], parser: argparse.ArgumentParser, foreign: Callable[[], Mapping[str, str]] = dict
) -> None:
    """Print the help and leave with status 0 where the command line asks for it, on the rank that prints.

    Args:
        foreign: gives the help of flags that are none of the parser's, such as Megatron-LM's.

    Raises:
        ConfigError: the word after `--help` is neither `all`, a group nor a flag.
        SystemExit: the help was asked for.
    """
    place = next((i for i, word in enumerate(argv) if word in ("-h", "--help")), None)
    if place is None:
        return
    if place + 1 == len(argv):
        shown = short_help(parser, "" if foreign is dict else ", also for Megatron-LM's")
    else:
        shown = help_about(argv[place + 1], parser, foreign())
    if rank_that_prints() == 0:
        print(shown, flush=True)
    raise SystemExit(0)


def short_help(parser: argparse.ArgumentParser, of_others: str) -> str:
    """Return the help that fits a terminal: examples, the flags that are used most, and where the others are."""
    every = {entry.dest: entry for entry in entries(parser)}
    starters = f"Several ranks: megatron-moe train with torchrun's options, or torchrun {SCRIPT}."
    lines = [parser.format_usage().strip(), "", f"{parser.description} {starters}"]
    for title, *commands in EXAMPLES:
        lines.append(f"  {title}:")
        lines += [f"    megatron-moe {command}" for command in commands]
    width = _width()
    lines.append("")
    for name in MOST_USED:
        entry = every[name]
        left = f"  {entry.flags[0]} {'' if len(entry.values) > 20 else entry.values}".rstrip()
        lines.append(textwrap.shorten(entry.text, width - _COLUMN, placeholder=" ..."))
        lines[-1] = f"{left:<{_COLUMN}}{lines[-1]}"
    groups = ", ".join(dict.fromkeys(entry.group for entry in every.values() if entry.group != "start from"))
    lines += ["", f"--help GROUP for all flags of {groups};", f"--help FLAG for one{of_others}; --help all;"]
    return "\n".join([*lines, "docs/reference/flags.md has the same as a page."])


def help_about(topic: str, parser: argparse.ArgumentParser, foreign: Mapping[str, str]) -> str:
    """Return the help on `all`, on a group of flags, or on a flag; a ConfigError if it is none of these."""
    every = entries(parser)
    groups = list(dict.fromkeys(entry.group for entry in every))
    if topic == "all":
        usage = parser.format_usage().strip()
        return "\n\n".join([usage, *(_group(every, group) for group in groups), str(parser.epilog)])
    flag = "--" + topic.lstrip("-").partition("=")[0].replace("_", "-")
    if not topic.startswith("-") and topic in groups:
        return _group(every, topic)
    for entry in every:
        if flag in entry.flags:
            return "\n".join([f"{entry.typed}    [{entry.group}]", *wrapped(entry.text, "  ")])
    if flag not in foreign:
        known = [*groups, *(flag for entry in every for flag in entry.flags), *foreign]
        near = suggestion(topic, known) or suggestion(flag, known)
        raise ConfigError(f"--help {topic}: is no flag and none of all, {', '.join(groups)}{near}")
    return foreign[flag]


def _group(every: Sequence[Entry], group: str) -> str:
    lines = [f"{group}:"]
    for entry in every:
        if entry.group == group:
            left = f"  {entry.typed}"
            text = wrapped(entry.text, " " * _COLUMN)
            if len(left) + 2 <= _COLUMN:
                text[0] = left.ljust(_COLUMN) + text[0].lstrip()
            else:
                lines.append(left)
            lines += text
    return "\n".join(lines)


def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _width(), initial_indent=indent, subsequent_indent=indent) or [indent]


def _width() -> int:
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 130))
