"""The configuration of a run: `Run` has one frozen dataclass per topic (`model_flags.py`, `run_flags.py`).

Each field is a flag, and a key in the checkpoint's config. A field `moe_router_topk` is the flag
`--moe-router-topk`; flags carry Megatron-LM's names wherever Megatron-LM has one. Field names are unique over all
sections, so `flatten(run)` is a plain dict and `build(flat)` is its inverse. Values are checked by `rules/` and
parsed by `cli.py`; this file does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_moe.config.derived import DerivedSettings
from megatron_moe.config.run_flags import RunSections


@dataclass(frozen=True)
class Run(RunSections):
    """The settings of a run. Read a value as `run.moe.moe_router_topk`; `flatten(run)` gives the flat dict.

    How the settings were read is no part of them: runs are equal, and stored, without it.

    Args:
        warnings: what to report of it at the start of the run, a line each.
        sources: field -> where the value comes from, for messages, if not from a flag of ours: "key in file", say.
        explicit: the fields that the command line names, also where the value is the default.
    """

    warnings: tuple[str, ...] = field(default=(), compare=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    explicit: frozenset[str] = field(default=frozenset(), compare=False)

    @cached_property
    def derived(self) -> DerivedSettings:
        """The values that follow from the settings, each computed once."""
        return DerivedSettings(self)


def sections() -> dict[str, type]:
    """Return section name -> its dataclass, in the order of `Run`."""
    return {name: f.default_factory for name, f in RunSections.__dataclass_fields__.items()}  # type: ignore[misc]


def fields_by_name() -> dict[str, tuple[str, dataclasses.Field]]:
    """Return field name -> (section name, dataclass field), over all sections."""
    table: dict[str, tuple[str, dataclasses.Field]] = {}
    for section, cls in sections().items():
        for f in dataclasses.fields(cls):
            if f.name in table:
                raise AssertionError(f"field {f.name} is in sections {table[f.name][0]} and {section}")
            table[f.name] = (section, f)
    return table


def flatten(run: Run) -> dict[str, Any]:
    """Return the run as one flat dict, field name -> value (tuples become lists, so that it is JSON)."""
    flat: dict[str, Any] = {}
    for section, cls in sections().items():
        part = getattr(run, section)
        for f in dataclasses.fields(cls):
            value = getattr(part, f.name)
            flat[f.name] = list(value) if isinstance(value, tuple) else value
    return flat


def build(flat: dict[str, Any]) -> Run:
    """Build a `Run` from a flat dict; missing names take their defaults, lists become tuples.

    Raises:
        ValueError: for a name that is not a field.
    """
    table = fields_by_name()
    unknown = sorted(set(flat) - set(table))
    if unknown:
        raise ValueError(f"unknown configuration keys: {', '.join(unknown)}")
    parts: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, value in flat.items():
        parts[table[name][0]][name] = tuple(value) if isinstance(value, list) else value
    return Run(**{section: cls(**parts[section]) for section, cls in sections().items()})


def replace(run: Run, **changes: Any) -> Run:
    """Return a copy of `run` with the named fields changed, whichever section they are in."""
    sources = {name: place for name, place in run.sources.items() if name not in changes}
    return dataclasses.replace(
        build({**flatten(run), **changes}),
        warnings=run.warnings,
        sources=sources,
        explicit=run.explicit - changes.keys(),
    )
