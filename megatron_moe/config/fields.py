"""The fields of the schema: types read from the annotations, values converted to them, copy-paste mistakes found.

The command line (text) and the YAML file (typed values) both use this file, so that they accept the same values and
report errors in the same words.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.setting import Range

_NOUN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Field:
    """One field of the schema, with what the command line and a file need to read it.

    `kinds` are the scalar types in the order they are tried; `repeated` marks a tuple of such values; `optional` says
    that None is allowed.
    """

    name: str
    section: str
    kinds: tuple[type, ...]
    repeated: bool
    optional: bool
    default: Any
    allowed: Collection | None
    within: Range | None
    help: str
    unit: str
    resume: str

    @property
    def is_architecture(self) -> bool:
        """Whether a checkpoint and the run that loads it must agree on the field."""
        return self.section in ("model", "moe") and self.resume != "free"

    @property
    def choices(self) -> tuple | None:
        """The allowed values, those of a registry as it is now; None where any value is allowed."""
        return None if self.allowed is None else tuple(self.allowed)

    @property
    def flag(self) -> str:
        """The flag as it is typed, `--num-layers`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        """Whether the field is a switch."""
        return self.kinds == (bool,)

    @property
    def negative_flag(self) -> str:
        """The flag that switches a boolean off. A field named `no_x` is switched off by `--x`."""
        stem = self.flag[2:]
        return "--" + (stem[3:] if stem.startswith("no-") else "no-" + stem)

    def typed(self, value: object) -> str:
        """Return the field as it would be typed: `--num-layers 4`, `--bf16`, `--no-swiglu`, or `no --save` if unset."""
        if value is None:
            return f"no {self.flag}"
        if self.is_bool:
            return self.flag if value else self.negative_flag
        return f"{self.flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


@lru_cache(maxsize=1)
def all_fields() -> dict[str, Field]:
    """Return field name -> Field, in the order of the schema."""
    hints = {section: typing.get_type_hints(cls) for section, cls in schema.sections().items()}
    return {name: _read(section, f, hints[section][name]) for name, (section, f) in schema.fields_by_name().items()}


def _read(section: str, f: dataclasses.Field, annotation: Any) -> Field:
    """Read the field's type from its annotation: X, X | None, X | Y, tuple[X, ...] or tuple[X, ...] | None."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = list(typing.get_args(annotation)) if is_union else [annotation]
    optional = type(None) in members
    members = [member for member in members if member is not type(None)]
    repeated = typing.get_origin(members[0]) is tuple
    kinds = (typing.get_args(members[0])[0],) if repeated else tuple(members)
    assert all(kind in _NOUN for kind in kinds), f"{f.name}: no way to read {annotation} from a command line"
    meta = f.metadata
    return Field(
        f.name,
        section,
        kinds,
        repeated,
        optional,
        f.default,
        allowed=meta["choices"],
        **{key: meta[key] for key in ("within", "help", "unit", "resume")},
    )


def from_text(field: Field, text: str) -> Any:
    """Convert one word of the command line to a value of the field (one element, for a tuple).

    `none` unsets an optional field.

    Raises:
        ConfigError: if the word is not such a value.
    """
    if field.optional and text.lower() == "none" and text not in (field.choices or ()):
        return None
    for kind in field.kinds:
        try:
            return _chosen(field, kind(text), field.flag)
        except ConfigError:
            raise
        except ValueError:
            continue
    raise ConfigError(f"{field.flag} {text}: not {_nouns(field)}{number_meant(text, field.kinds) or _example(field)}")


_SUFFIXES = {"k": (1000, 1024), "m": (10**6,), "b": (10**9,), "g": (10**9,)}


def number_meant(text: str, kinds: tuple[type, ...]) -> str:
    """Return `; write 2048` for a number in another notation: 2,048, 2e3, 2.0, 4K, 10%; else an empty string.

    Args:
        kinds: the types that the value may have; it is translated where one of them is int or float alone.
    """
    plain = text.strip().lower()
    scales: tuple[float, ...] = (1,)
    if plain[-1:] in _SUFFIXES:
        plain, scales = plain[:-1], _SUFFIXES[plain[-1]]
    elif plain.endswith("%"):
        plain, scales = plain[:-1], (0.01,)
    if "," in plain:
        thousands = re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", plain) and not plain.startswith("0")
        plain = plain.replace(",", "" if thousands or plain.count(",") > 1 else ".")
    try:
        numbers = [float(plain) * scale for scale in scales]
    except ValueError:
        return ""
    if not all(math.isfinite(number) for number in numbers):
        return ""
    if kinds == (int,):
        if not all(number.is_integer() for number in numbers):
            return ""
        shown = [str(int(number)) for number in numbers]
    elif float in kinds:
        shown = [f"{number:g}" for number in numbers]
    else:
        return ""
    return f"; write {' or '.join(shown)}"


def from_file(field: Field, value: object, where: str) -> Any:
    """Convert a value of a YAML file to a value of the field.

    A float may be written `1e-3`, which YAML 1.1 reads as text; other types are not converted. A tuple of one may be
    written without brackets. `where` names file and key for the message.

    Raises:
        ConfigError: if the value has another type.
    """
    if value is None:
        if field.optional:
            return None
        raise ConfigError(f"{where}: null is not {_nouns(field)}{_example(field)}")
    if field.repeated:
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ConfigError(f"{where}: an empty list; give at least one value or leave the key out")
        return tuple(_scalar_from_file(field, item, where) for item in items)
    return _scalar_from_file(field, value, where)


def _scalar_from_file(field: Field, value: object, where: str) -> Any:
    if isinstance(value, str) and not value.strip() and field.name not in FREE_TEXT:
        raise ConfigError(f"{where}: {value!r} is empty; give a value, or leave the key out")
    if isinstance(value, str) and field.name not in FREE_TEXT:
        require_visible(value, f"{where}: ")
        require_expanded(field.name, value, f"{where}: ")
    for kind in field.kinds:
        if type(value) is kind:
            return _chosen(field, value, where)
        if kind is float and isinstance(value, (int, str)) and type(value) is not bool:
            try:
                return float(value)
            except ValueError:
                break
    quotes = "; write it in quotes" if str in field.kinds else ""
    nouns: dict[type, str] = {list: "a list", dict: "a mapping", **_NOUN}
    given = nouns.get(type(value), type(value).__name__)
    raise ConfigError(f"{where}: {value!r} is {given}, not {_nouns(field)}{quotes}{_example(field)}")


def _chosen(field: Field, value: object, where: str) -> Any:
    if field.choices is None or value in field.choices:
        return value
    known = [str(choice) for choice in field.choices]
    raise ConfigError(f"{where} {value}: not one of {', '.join(known)}{choice_suggestion(str(value), known)}")


def choice_suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for a choice in other letters, shortened or lengthened, or else as `suggestion` does.

    Capitals, `-`, `_`, an ending of a file and the owner of a model of the hub are overlooked.
    """
    names = list(known)

    def plain(name: str) -> str:
        return re.sub(r"[-_ ]", "", name.rpartition("/")[2].lower().removesuffix(".yaml"))

    asked = plain(word)
    same = [name for name in names if plain(name) == asked]
    longer = [name for name in names if len(asked) > 1 and plain(name).startswith(asked)]
    shorter = [name for name in names if len(plain(name)) > 2 and asked.startswith(plain(name))]
    for found in (same, longer, shorter):
        if 0 < len(found) <= 4:
            return f"; did you mean {' or '.join(found)}?"
    return suggestion(word, names) if len(word) > 3 else ""  # of three letters, one apart is another word


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for a known word that a slip of the keys makes of this one, or an empty string.

    About two letters may differ, in a word of less than six one. Where flags begin with the same word, such as --ema-,
    one of them is meant; up to three are named.
    """
    names = list(known)
    first = word[: word.find("-", 2) + 1] if word.startswith("--") else ""
    alike = [name for name in names if first and name.startswith(first)]
    edits = 1 if len(word.lstrip("-")) < 6 else 2
    if near := difflib.get_close_matches(word, alike or names, n=1, cutoff=max(0.6, 0.99 - edits / (len(word) or 1))):
        return f"; did you mean {near[0]}?"
    return f"; there {'is' if len(alike) == 1 else 'are'} {', '.join(alike)}" if 0 < len(alike) <= 3 else ""


def _nouns(field: Field) -> str:
    return " or ".join(_NOUN[kind] for kind in field.kinds)


def _example(field: Field) -> str:
    if field.choices is not None:
        return f"; one of {', '.join(map(str, field.choices))}"
    if field.default is None or field.repeated:
        return ""
    return f"; the default is {str(field.default).lower() if field.is_bool else field.default}"


# Copy-paste mistakes in words and values: characters of a web page or a Windows file, and what no shell has expanded

FREE_TEXT = frozenset({"sample_prompt", "prompts", "texts"})
"""Names of settings whose values are prose: they may be empty, and have any dashes and quotation marks."""
_UNTOUCHED_BY_SHELLS = frozenset({"match", "json_keys", "tiktoken_special_tokens"})
"""Names of settings whose values are patterns, keys and tokens, in which `$` and `<...>` mean themselves."""
_ADDRESSES = frozenset({"mlflow_tracking_uri"})
"""Names of settings that may be addresses."""
_IN_STORES = frozenset({"save", "load", "pretrained_checkpoint"})
"""Names of settings that may be URLs of object stores."""

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
_STORE = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]*://[\w.]")


def require_typed(word: str) -> None:
    """Refuse a word with a dash, quotation mark or space that was pasted from a text, or that cannot be seen."""
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
    is_known = name in _ADDRESSES or (name in _IN_STORES and _STORE.match(text))
    if _ADDRESS.match(text) and not is_known:
        raise ConfigError(
            f"{shown}: is an address, and files are read and written in folders alone; download it, and give the path"
        )
    if text == "null":
        raise ConfigError(f"{shown}: is what a JSON file has for no value; leave the flag out")
