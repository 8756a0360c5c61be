"""Reading a DeepSpeed configuration file: its keys with typed values, and notes about those without a meaning here."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import suggestion
from megatron_moe.config.paths import read_settings
from megatron_moe_tools.compat.deepspeed_keys import (
    ALIASES,
    AUTO,
    MEANINGLESS,
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    OTHER_SCHEDULERS,
    REFUSED,
    SCHEDULERS,
    TAKEN,
    Refused,
)

# Strings are kept as they are; of comments and of commas before a closing bracket nothing is left.
_TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*|/\*.*?\*/', re.DOTALL)
_TEXT_OR_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])')
_REASONS = {key: reason for reason, keys in MEANINGLESS.items() for key in keys}
_KNOWN = {*TAKEN, *REFUSED, *_REASONS}
_MAPPINGS = {key.rpartition(".")[0] for key in _KNOWN if "." in key}
_NOUNS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}


@dataclass(frozen=True)
class DeepSpeedFile:
    """The keys of one file that are taken.

    Args:
        path: as the flag gives it.
        values: key with dots -> value of the key's type, in the order of the file; without those that are "auto".
        automatic: keys whose value is "auto", so that flags and defaults of this framework decide.
        notes: a line for each reason why keys are read past.
    """

    path: str
    values: dict[str, Any]
    automatic: frozenset[str]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file's name, for notes."""
        return Path(self.path).name

    def refusal(self, key: str, rule: str) -> ConfigError:
        """Return the error to raise for a key with the value that it has."""
        return _refusal(self.path, key, self.values.get(key), rule)

    def number(self, key: str, default: Any) -> Any:
        """Return a key's value: DeepSpeed's default where it is left out, None where it is "auto"."""
        return None if key in self.automatic else self.values.get(key, default)


def read(path: str) -> DeepSpeedFile:
    """Read a DeepSpeed configuration file.

    Comments (`//`, `#`, `/* */`) and trailing commas are accepted, as DeepSpeed accepts them, and keys that start with
    `_` or `//` count as comments. `null` is a key that is not given.

    Raises:
        ConfigError: the file cannot be read or is not JSON, a key is given twice, is unknown or asks for something that
            this framework does not do, or a value has another type than its key.
    """
    document = _document(path)
    _check_types(path, document)
    keys: dict[str, Any] = {}
    _collect(path, document, "", keys)
    values: dict[str, Any] = {}
    automatic = set()
    meaningless: dict[str, list[str]] = {}
    for key, value in keys.items():
        if value == AUTO:
            automatic.add(key)
        elif key in TAKEN:
            values[key] = _typed(path, key, value)
        elif key in REFUSED:
            _refuse(path, key, value, REFUSED[key])
        else:
            meaningless.setdefault(_REASONS[key], []).append(key)
    notes = tuple(
        f"{Path(path).name}: {', '.join(named)}: no meaning here: {reason}" for reason, named in meaningless.items()
    )
    return DeepSpeedFile(path, values, frozenset(automatic), notes)


def _document(path: str) -> dict[str, Any]:
    text = read_settings("--deepspeed-config", path, "JSON")

    def kept(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else " "

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"--deepspeed-config {path}: key {twice[0]} is given twice; keep one")
        return dict(pairs)

    try:
        document = json.loads(_TEXT_OR_COMMA.sub(kept, _TEXT_OR_COMMENT.sub(kept, text)), object_pairs_hook=once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError(
            f"--deepspeed-config {path}: is not JSON: {error}; write keys and text in double quotes"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f'--deepspeed-config {path}: holds no mapping; write {{"zero_optimization": {{"stage": 3}}}}')
    return document


def _check_types(path: str, document: dict[str, Any]) -> None:
    """Refuse optimizers and schedules of other kinds, before their parameters are called unknown."""
    for block, known in (("optimizer", OPTIMIZERS), ("scheduler", tuple(SCHEDULERS))):
        mapping = document.get(block)
        kind = mapping.get("type") if isinstance(mapping, dict) else None
        if not isinstance(kind, str) or kind == AUTO:
            continue
        name = kind.lower() if block == "optimizer" else kind
        if name in known:
            continue
        if block == "optimizer":
            rule = f"{OTHER_OPTIMIZERS.get(name, 'is another optimizer')}; a file names AdamW alone: use AdamW"
        else:
            rule = OTHER_SCHEDULERS.get(name, f"not one of {', '.join(known)}{suggestion(name, known)}")
            rule += "; without a scheduler in the file the flags decide"
        raise _refusal(path, f"{block}.type", kind, rule)


def _collect(path: str, mapping: dict[str, Any], above: str, found: dict[str, Any]) -> None:
    """Put the keys of a mapping into `found`, with those of the mappings in it that are known."""
    for name, value in mapping.items():
        if name.startswith(("_", "//")) or name in ("comment", "comments"):
            continue
        key = above + name
        key = ALIASES.get(key, key)
        if key == "zero_optimization" and isinstance(value, bool):  # the first form of the setting
            key, value = "zero_optimization.stage", int(value)
        if value is None or (value == AUTO and key in _MAPPINGS):
            continue
        if key in _MAPPINGS and key not in _KNOWN:
            if not isinstance(value, dict):
                raise _refusal(path, key, value, f'holds keys; write {{"{name}": {{...}}}}')
            _collect(path, value, f"{key}.", found)
        elif key not in _KNOWN:
            raise ConfigError(f"--deepspeed-config {path}: {key}: unknown key{_near(key)}")
        elif key in found:
            raise ConfigError(f"--deepspeed-config {path}: key {key} is given twice; keep one")
        else:
            found[key] = value


def _near(key: str) -> str:
    """Return the known key that an unknown one may have been meant for: elsewhere by its name, or spelled like it."""
    name = key.rpartition(".")[2]
    elsewhere = [known for known in sorted(_KNOWN | _MAPPINGS) if known.rpartition(".")[2] == name]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return suggestion(key, sorted(_KNOWN | _MAPPINGS)) or "; remove it"


def _refuse(path: str, key: str, value: Any, refused: Refused) -> None:
    """Raise the error of a key that is refused, unless its value asks for nothing."""
    if isinstance(value, dict):
        leaves = _leaves(value)
        asks = any(name == "enabled" and on is True for name, on in leaves) if refused.switched else bool(leaves)
    else:
        asks = not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in refused.harmless)
    if asks:
        raise _refusal(path, key, value, f"{refused.rule}; use {refused.works}")


def _leaves(mapping: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and values in a mapping, at any depth, that are given."""
    found = []
    for name, value in mapping.items():
        if isinstance(value, dict):
            found += _leaves(value)
        elif value is not None and value != AUTO:
            found.append((name, value))
    return found


def _typed(path: str, key: str, value: Any) -> Any:
    """Return a value in the type of its key. As for DeepSpeed, 5e8 is a whole number, and "true" and 1 are true."""
    taken = TAKEN[key]
    converted: Any = None
    if taken.kind is bool:
        converted = {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())
    elif taken.kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if taken.kind is float and not math.isnan(number):
            converted = number
        elif number.is_integer():
            converted = int(number)
    elif type(value) is taken.kind:
        converted = value
    if converted is None:
        raise _refusal(path, key, value, f'is not {_NOUNS[taken.kind]}; or use "{AUTO}", for the flags to decide')
    if taken.means and taken.sets is None and converted not in taken.means:
        known = ", ".join(json.dumps(choice) for choice in taken.means)
        raise _refusal(path, key, value, f"not one of {known}{_why_not(converted)}")
    return converted


def _why_not(value: Any) -> str:
    return (
        '; nothing is kept on NVMe, and --optimizer-cpu-offload is what "cpu" is taken for' if value == "nvme" else ""
    )


def _refusal(path: str, key: str, value: Any, rule: str) -> ConfigError:
    shown = json.dumps(value)
    return ConfigError(f"--deepspeed-config {path}: {key} {shown if len(shown) <= 80 else shown[:76] + ' ...'}: {rule}")
