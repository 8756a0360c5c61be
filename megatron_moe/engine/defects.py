"""The known defects of megatron-core: `engine_defects.yaml`, read, and matched with the flags of a run.

Whether an engine has a defect is decided by its version; tests run the engine's own code, and fail where that is wrong
in a release that this project is tested with. Importing this module loads neither torch nor the engine, and does not
read the file: `known_defects` does.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_moe.config.fields import all_fields
from megatron_moe.config.schema import Run

TABLE = Path(__file__).with_name("engine_defects.yaml")

Version = tuple[int, ...]
OLDEST: Version = (0, 16, 1)
NEWEST: Version = (0, 19, 2)
TESTED = (OLDEST, NEWEST)
"""The two releases that this project is tested with."""

Treatment = Literal["overridden", "not used", "kept"]
"""What is done about a defect; the head of the YAML file explains each."""


def engine_version() -> Version:
    """Return megatron-core's version, for example (0, 16, 1), from its metadata, without importing it."""
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("megatron-core"))[:3])


def dotted(version: Version) -> str:
    """Return (0, 16, 1) as 0.16.1."""
    return ".".join(map(str, version))


def facts_of(run: Run) -> dict[str, Any]:
    """Return what a condition may name: every setting, and values that follow from several settings."""
    facts = {name: getattr(getattr(run, field.section), name) for name, field in all_fields().items()}
    has_experts = run.moe.num_experts is not None
    balanced = {"aux_loss", "seq_aux_loss", "global_aux_loss"} & set(run.moe.moe_router_load_balancing_type)
    vocabulary = run.model.vocab_size
    facts["expert_bias"] = has_experts and run.moe.moe_router_enable_expert_bias
    facts["groups_or_expert_bias"] = run.moe.moe_router_num_groups is not None or facts["expert_bias"]
    facts["auxiliary_loss"] = has_experts and bool(balanced)
    facts["auxiliary_or_z_loss"] = has_experts and bool(balanced or run.moe.moe_z_loss_coeff)
    facts["half_precision"] = run.precision.bf16 or run.precision.fp16
    facts["dynamic_loss_scale"] = run.precision.fp16 and run.precision.loss_scale is None
    facts["tp_times_cp"] = run.parallel.tensor_model_parallel_size * run.parallel.context_parallel_size
    facts["expert_tp_size"] = run.derived.expert_tensor_parallel_size
    facts["interleaved_pipeline"] = run.derived.virtual_pipeline_size is not None
    facts["padded_vocabulary"] = vocabulary is not None and run.derived.padded_vocab_size(vocabulary) != vocabulary
    facts["saves_or_loads"] = run.checkpoint.save is not None or run.checkpoint.load is not None
    return facts


@dataclass(frozen=True)
class Condition:
    """A condition of `when`: the setting or derived value `name` has to be as `wanted` says."""

    name: str
    wanted: bool | int | str

    def holds(self, facts: dict[str, Any]) -> bool:
        """Return whether a run, of which `facts_of` was taken, fulfils the condition."""
        value = facts[self.name]
        if self.wanted == "set":
            return value not in (None, ())
        if isinstance(self.wanted, str) and self.wanted.startswith("> "):
            return value is not None and value > int(self.wanted[2:])
        if isinstance(value, tuple):
            return self.wanted in value
        return bool(value == self.wanted)


@dataclass(frozen=True)
class Defect:
    """A defect of the engine, and what this project does about it. The head of the YAML file explains the fields."""

    id: str
    title: str
    source: str
    when: tuple[Condition, ...] | None
    """All of these have to hold: every run meets an empty tuple, no run meets None."""
    treatment: Treatment
    how: str
    where: dict[str, str]
    tests: tuple[str, ...]
    no_test: str | None = None
    since: Version = OLDEST
    fixed_in: Version | None = None

    def is_present(self, version: Version) -> bool:
        """Return whether this release of the engine has the defect."""
        return self.since <= version and (self.fixed_in is None or version < self.fixed_in)

    def is_met(self, facts: dict[str, Any]) -> bool:
        """Return whether a run's flags reach the defect, whatever the release."""
        return self.when is not None and all(condition.holds(facts) for condition in self.when)

    def releases(self) -> str:
        """Return in words which releases have the defect."""
        if self.fixed_in == NEWEST:
            return "0.16.1, no longer in 0.19.2; releases in between were not examined"
        if self.fixed_in is not None:
            return f"before {dotted(self.fixed_in)}"
        since = "" if self.since == OLDEST else f"from {dotted(self.since)}, "
        return f"{since}no release without it is known"

    def entry(self) -> list[str]:
        """Return the lines of the list: what it is, which releases have it, what is done, and where."""
        where = f" ({', '.join(self.where)})" if self.where else ""
        return [
            f"{self.id}  {self.title}",
            f"    megatron-core: {self.releases()}; {self.source}",
            f"    {self.treatment}: {self.how}{where}",
        ]


@cache
def known_defects() -> tuple[Defect, ...]:
    """Return the defects in the order of the file."""
    # PyYAML's parser in Python takes ten times as long as libyaml's, which most builds have.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    defects = []
    for entry in yaml.load(TABLE.read_text(encoding="utf-8"), Loader=loader):
        when = entry["when"]
        if isinstance(when, dict):
            entry["when"] = tuple(Condition(name, wanted) for name, wanted in when.items())
        else:
            entry["when"] = {"no run": None, "every run": ()}[when]
        for key in ("since", "fixed_in"):
            if key in entry:
                entry[key] = tuple(map(int, entry[key].split(".")))
        defects.append(Defect(**{"where": {}, **entry, "tests": tuple(entry.get("tests", ()))}))
    return tuple(defects)


def defects_met(run: Run, version: Version) -> list[Defect]:
    """Return the defects that are in this engine and that these flags meet, in the order of the file."""
    facts = facts_of(run)
    return [
        defect
        for defect in known_defects()
        if defect.is_present(version) and defect.is_met(facts) and defect.treatment != "not used"
    ]


def start_lines(version: Version) -> list[str]:
    """Return what a run reports at its start: the engine, and a line before it where the release was not tested."""
    engine = f"engine: megatron-core {dotted(version)}"
    if version in TESTED:
        return [engine]
    names = " and ".join(dotted(tested) for tested in TESTED)
    return [
        f"megatron-core {dotted(version)} was not tested with this project, {names} were; which defects it has is "
        "taken from the releases they were fixed in",
        engine,
    ]


def text(run: Run, version: Version) -> str:
    """Return the whole table for `--list-advisories`: the defects that are met first, with what is done and where."""
    known, met = known_defects(), defects_met(run, version)
    lines = [f"megatron-core {dotted(version)}, {len(met)} of {len(known)} known defects meet these flags"]
    lines += [*start_lines(version)[:-1], ""]
    for defect in met:
        lines += [*defect.entry(), ""]
    lines += ["not met by these flags, not in this engine, or in a part of it that is not used:", ""]
    for defect in known:
        if defect in met:
            continue
        why = "these flags do not meet it"
        if not defect.is_present(version):
            why = "not in this engine"
        elif defect.treatment == "not used":
            why = "that part of the engine is not used"
        lines += [*defect.entry(), f"    here: {why}", ""]
    return "\n".join(lines[:-1])
