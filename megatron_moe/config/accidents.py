"""Words that are no one's intention: characters of a web page or a Windows file, and what a shell did not expand.

They are found in every program's command line and in every value of a `--config` file, before a value is read.
"""

from __future__ import annotations

import re

from megatron_moe.config.errors import ConfigError

FREE_TEXT = frozenset({"sample_prompt", "prompts"})
"""Names of settings whose values are prose: they may be empty, and have any dashes and quotation marks."""
_UNTOUCHED_BY_SHELLS = frozenset({"match", "json_keys", "tiktoken_special_tokens"})
"""Names of settings whose values are patterns, keys and tokens, in which `$` and `<...>` mean themselves."""
_ADDRESSES = frozenset({"mlflow_tracking_uri"})
"""Names of settings that may be addresses."""

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_PASTED_FLAG = re.compile(rf"-*[{_DASHES}][-{_DASHES}]*[\w.][^\s]*")
_QUOTES = "\u201c\u201d\u201e\u2018\u2019\u201a\u00ab\u00bb"
_SPACES = "\u00a0\u202f\u2009\u200b\ufeff"
# Control characters, line separators, marks that turn the direction of writing, and bytes that are no UTF-8.
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_UNEXPANDED = re.compile(r"\$[A-Za-z_][A-Za-z_0-9]*|\$\{[^}]*\}?|\$\([^)]*\)?|`[^`]*`?")
_HOME = re.compile(r"~[\w.-]*(/|$)")
_PLACEHOLDER = re.compile(r"<[\w .:/-]+>|\.\.\.|\u2026")
_FLAG_INSIDE = re.compile(r"\s(--[a-z][\w-]+)")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def require_typed(word: str) -> None:
    """Refuse characters in a word of a command line that nobody types.

    Raises:
        ConfigError: a dash, quotation mark or space was pasted from a text, or a character cannot be seen.
    """
    if _PASTED_FLAG.fullmatch(word):
        plain = re.sub(rf"^[-{_DASHES}]+", "-" if word.lstrip(_DASHES + "-")[:1].isdigit() else "--", word)
        raise ConfigError(f"{word}: begins with a dash that was pasted from a text; type {plain}")
    if word[:1] in tuple(_QUOTES) or word[-1:] in tuple(_QUOTES):
        plain = "".join(letter for letter in word if letter not in _QUOTES)
        raise ConfigError(f"{word}: has quotation marks that were pasted from a text; type '{plain}'")
    if any(letter in _SPACES for letter in word):
        shown = "".join(" " if letter in _SPACES else letter for letter in word)
        raise ConfigError(f"{word!r}: has a space that was pasted from a text; type {shown}")
    require_visible(word, "")


def require_visible(text: str, where: str) -> None:
    """Refuse characters that cannot be seen, such as the carriage return of a Windows line end.

    Args:
        where: what names the value in the message, with its last space.

    Raises:
        ConfigError: there is one.
    """
    found = _INVISIBLE.search(text)
    if found is None:
        return
    if found[0] == "\r":
        raise ConfigError(
            f"{where}{text!r}: has the carriage return of a Windows line end; convert the file: sed -i 's/\\r$//' FILE"
        )
    raise ConfigError(f"{where}{text!r}: has a character that cannot be seen, {found[0]!r}; type it anew")


def require_expanded(name: str, text: str, where: str) -> None:
    """Refuse a value that a shell, or the reader of a manual, was to replace by another one.

    Args:
        name: the setting. where: what names it in the message, with its last space.

    Raises:
        ConfigError: the value has a variable, a command, the home folder's `~`, quotation marks around it, spaces at
            its ends, or is a placeholder, an address, or the `null` of a JSON file.
    """
    if name in FREE_TEXT or name in _UNTOUCHED_BY_SHELLS:
        return
    shown, found = f"{where}{text}", _UNEXPANDED.search(text)
    if found is not None:
        raise ConfigError(
            f"{shown}: {found[0]} was not expanded: in single quotes and in files no shell does it; write its value"
        )
    if _HOME.match(text):
        raise ConfigError(
            f"{shown}: ~ is expanded by a shell alone, and not in quotes, after = or in files; write the whole path"
        )
    if len(text) > 1 and text[0] in "\"'" and text[-1] == text[0]:
        raise ConfigError(f"{where}{text}: the quotation marks are part of the value; write {text[1:-1]}")
    flag = _FLAG_INSIDE.search(text)
    if flag is not None:
        raise ConfigError(f"{where}{text!r}: {flag[1]} is in the same word; take the quotation marks away")
    if text.strip() != text and text.strip():
        raise ConfigError(f"{where}{text!r}: begins or ends with a space; write {text.strip()}")
    if _PLACEHOLDER.fullmatch(text):
        raise ConfigError(f"{shown}: is a placeholder; put a value in its place")
    if name not in _ADDRESSES and _ADDRESS.match(text):
        raise ConfigError(
            f"{shown}: is an address, and files are read and written in folders alone; download it, and give the path"
        )
    if text == "null":
        raise ConfigError(f"{shown}: is what a JSON file has for no value; leave the flag out")
