"""The parser of every program: mistakes that can be made with any flag are found here, before a value is read."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_moe.config import megatron_flags
from megatron_moe.config.accidents import FREE_TEXT, require_expanded, require_typed
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import choice_suggestion, number_meant, suggestion
from megatron_moe.config.launch import rank_that_prints

WHOLE_MESSAGE = "\0"
"""What begins an error of a conversion that names its flag: argparse puts the flag before each."""
_SWITCH_WORDS = frozenset("true false on off yes no 1 0".split())
_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|-(inf|nan)$")


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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
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
            if megatron_flags.is_flag(extra[0]):
                raise ConfigError(f"unknown flag {flag}{suggestion(flag, self._every_option())}")
            raise ConfigError(unexpected(extra[0], self._every_option()))
        return found

    def require_sound(self, words: Sequence[str]) -> None:
        """Check the words of a command line as far as the flags are this parser's.

        Raises:
            ConfigError: a flag has two values, an empty value or is a switch with a value, or was pasted.
        """
        typed: dict[str, str] = {}
        for group in megatron_flags.groups(words):
            flag, given = megatron_flags.parts(group)
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
                off = [option for option in self._options_of(action.dest) if option.startswith("--no-")]
                no = f", or {off[0]}" if off and flag not in off else ""
                raise ConfigError(
                    f"{flag} {given[0]}: is a switch and takes no value; write {flag}{no}, or leave it out"
                )
            shown = " ".join([flag, *given])
            if typed.get(action.dest, shown) != shown and not isinstance(action, argparse._AppendAction):
                raise ConfigError(f"{typed[action.dest]}, {shown}: is given twice; keep one")
            typed[action.dest] = shown

    def _every_option(self) -> list[str]:
        """Return the options of this parser and of its commands."""
        found = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [option for parser in action.choices.values() for option in parser._option_string_actions]
        return found

    def _options_of(self, dest: str) -> list[str]:
        return [option for action in self._actions if action.dest == dest for option in action.option_strings]


def unexpected(word: str, options: Sequence[str]) -> str:
    """Return the error for a word that is no flag and no flag's value, with what it was meant to be.

    Args:
        options: the flags of the program.
    """
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
