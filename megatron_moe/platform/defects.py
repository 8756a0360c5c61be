"""The known defects of megatron-core: `engine_defects.yaml`, read, checked, and matched with the flags of a run.

Importing this module loads neither torch nor the engine, and does not read the file: `known_defects` does.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_moe.config.fields import all_fields, suggestion
from megatron_moe.config.schema import Run

TABLE = Path(__file__).with_name("engine_defects.yaml")

Version = tuple[int, ...]
OLDEST: Version = (0, 16, 1)
NEWEST: Version = (0, 19, 2)
"""The two releases that this project is tested with."""

Treatment = Literal["overridden", "not used", "kept"]
"""What is done about a defect; the head of the YAML file explains each."""


@dataclass(frozen=True)
class DerivedValues:
    """The values that a condition may name in addition to the schema's fields; they follow from several flags.

    Args:
        run: the settings; they need not have been checked.
        world_size: the number of ranks.
    """

    run: Run
    world_size: int

    @property
    def expert_bias(self) -> bool:
        """Return whether the MoE layers have an expert bias."""
        return self.run.moe.num_experts is not None and self.run.moe.moe_router_enable_expert_bias

    @property
    def groups_or_expert_bias(self) -> bool:
        """Return whether experts are chosen by more than their scores: within groups, or with a bias."""
        return self.run.moe.moe_router_num_groups is not None or self.expert_bias

    @property
    def auxiliary_loss(self) -> bool:
        """Return whether the router has a load balancing loss of any kind."""
        kinds = {"aux_loss", "seq_aux_loss", "global_aux_loss"}
        return self.run.moe.num_experts is not None and not kinds.isdisjoint(
            self.run.moe.moe_router_load_balancing_type
        )

    @property
    def auxiliary_or_z_loss(self) -> bool:
        """Return whether the router has a loss of its own."""
        z_loss = self.run.moe.num_experts is not None and bool(self.run.moe.moe_z_loss_coeff)
        return self.auxiliary_loss or z_loss

    @property
    def half_precision(self) -> bool:
        """Return whether the model is bf16 or fp16."""
        return self.run.precision.bf16 or self.run.precision.fp16

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return whether the model is fp16 and its loss scale follows the overflows."""
        return self.run.precision.fp16 and self.run.precision.loss_scale is None

    @property
    def tp_times_cp(self) -> int:
        """Return the number of ranks that a sequence is spread over."""
        return self.run.parallel.tensor_model_parallel_size * self.run.parallel.context_parallel_size

    @property
    def expert_tp_size(self) -> int:
        """Return the number of ranks that an expert is split over."""
        return self.run.derived.expert_tensor_parallel_size

    @property
    def interleaved_pipeline(self) -> bool:
        """Return whether a pipeline stage has several chunks of the model."""
        return self.run.derived.virtual_pipeline_size is not None

    @property
    def padded_vocabulary(self) -> bool:
        """Return whether the embedding is known to have more rows than the vocabulary has tokens."""
        size = self.run.model.vocab_size
        return size is not None and self.run.derived.padded_vocab_size(size) != size

    @property
    def saves_or_loads(self) -> bool:
        """Return whether the run writes or reads checkpoints."""
        return self.run.checkpoint.save is not None or self.run.checkpoint.load is not None


@cache
def _derived_types() -> dict[str, type]:
    """Return the type of each derived value by its name."""
    properties = {name: value for name, value in vars(DerivedValues).items() if isinstance(value, property)}
    return {"world_size": int, **{n: typing.get_type_hints(p.fget)["return"] for n, p in properties.items()}}


@dataclass(frozen=True)
class Condition:
    """A condition of `when`: the schema field or derived value `name` has to be as `wanted` says."""

    name: str
    wanted: bool | int | str

    def holds(self, values: DerivedValues) -> bool:
        """Return whether the run fulfils the condition."""
        value = self._value(values)
        if self.wanted == "set":
            return value not in (None, ())
        if (limit := _limit(self.wanted)) is not None:
            return value is not None and value > limit
        if isinstance(value, tuple):
            return self.wanted in value
        return bool(value == self.wanted)

    def _value(self, values: DerivedValues) -> Any:
        if self.name in _derived_types():
            return getattr(values, self.name)
        return getattr(getattr(values.run, all_fields()[self.name].section), self.name)

    def __str__(self) -> str:
        """Return the condition in words, a schema field as its flag: `--sequence-parallel`, `tp times cp > 1`."""
        field = all_fields().get(self.name)
        name = self.name.replace("_", " ") if field is None else field.flag
        if self.wanted is True or self.wanted == "set":
            return name
        return f"no {name}" if self.wanted is False else f"{name} {self.wanted}"

    def check(self) -> None:
        """Raise a ValueError where the name is unknown, or no value of that name can fulfil the condition."""
        types, choices, optional = _accepted(self.name)
        kind: type = int if _limit(self.wanted) is not None else type(self.wanted)
        if self.wanted == "set":
            if not optional:
                raise ValueError(f"condition {self.name}: always has a value, `set` says nothing")
        elif kind not in types:
            names = " or ".join(accepted.__name__ for accepted in types)
            raise ValueError(f"condition {self.name}: {self.wanted!r} is not of its type {names}")
        elif choices is not None and self.wanted not in choices:
            raise ValueError(f"condition {self.name}: {self.wanted!r} is not one of {', '.join(map(str, choices))}")


def _accepted(name: str) -> tuple[tuple[type, ...], tuple[Any, ...] | None, bool]:
    """Return the types of the field or derived value `name`, its choices, and whether it can be without a value."""
    if name in _derived_types():
        return (_derived_types()[name],), None, False
    if name not in all_fields():
        raise ValueError(f"unknown condition {name}{suggestion(name, [*all_fields(), *_derived_types()])}")
    field = all_fields()[name]
    types = (int, float) if float in field.kinds else field.kinds
    return types, field.choices, field.optional


def _limit(wanted: bool | int | str) -> int | None:
    """Return N of the condition "> N", None of any other."""
    found = re.fullmatch(r"> (\d+)", wanted) if isinstance(wanted, str) else None
    return None if found is None else int(found[1])


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
    without_cuda_only: bool = False

    def is_present(self, version: Version) -> bool:
        """Return whether this release of the engine has the defect."""
        return self.since <= version and (self.fixed_in is None or version < self.fixed_in)

    def is_met(self, run: Run, world_size: int) -> bool:
        """Return whether the flags of a run on so many ranks reach the defect, whatever the release."""
        values = DerivedValues(run, world_size)
        return self.when is not None and all(condition.holds(values) for condition in self.when)

    def releases(self) -> str:
        """Return in words which releases have the defect."""
        if self.fixed_in == NEWEST:
            return "0.16.1, no longer in 0.19.2; releases in between were not examined"
        if self.fixed_in is not None:
            return f"before {'.'.join(map(str, self.fixed_in))}"
        since = "" if self.since == OLDEST else f"from {'.'.join(map(str, self.since))}, "
        return f"{since}no release without it is known"


@cache
def known_defects() -> tuple[Defect, ...]:
    """Return the defects in the order of the file."""
    return read_defects(TABLE)


def read_defects(path: Path) -> tuple[Defect, ...]:
    """Return the defects of a YAML file.

    Raises:
        ValueError: an entry is malformed; the message names file, defect and key.
    """
    # Every run reads this; PyYAML's parser in Python takes ten times as long as libyaml's, which most builds have.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    if not isinstance(entries, list):
        raise ValueError(f"{path.name}: is not a list of defects")
    found: dict[str, Defect] = {}
    for number, entry in enumerate(entries, start=1):
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not re.fullmatch(r"[ESN]\d+", name):
            raise ValueError(f"{path.name}: entry {number}: needs an id: E, S or N and a number")
        if name in found:
            raise ValueError(f"{path.name}: {name}: is there twice")
        try:
            found[name] = _defect(entry)
        except ValueError as error:
            raise ValueError(f"{path.name}: {name}: {error}") from None
    return tuple(found.values())


def _defect(entry: dict[str, Any]) -> Defect:
    """Return the defect of one entry of the file."""
    _check_keys(entry)
    if entry["treatment"] not in typing.get_args(Treatment):
        raise ValueError(f"treatment {entry['treatment']!r} is not one of {', '.join(typing.get_args(Treatment))}")
    defect = Defect(
        id=entry["id"],
        title=_text(entry, "title"),
        source=_text(entry, "source"),
        when=_conditions(entry["when"]),
        treatment=entry["treatment"],
        how=_text(entry, "how"),
        where=_mechanisms(entry.get("where", {})),
        tests=_tests(entry["tests"]) if "tests" in entry else (),
        no_test=_text(entry, "no_test") if "no_test" in entry else None,
        since=_version(entry, "since") or OLDEST,
        fixed_in=_version(entry, "fixed_in"),
        without_cuda_only=entry.get("without_cuda_only", False),
    )
    if defect.without_cuda_only not in (True, False):
        raise ValueError(f"without_cuda_only {defect.without_cuda_only!r} is neither true nor false")
    if not defect.where and defect.treatment != "not used":
        raise ValueError(f"where is missing: what is {defect.treatment} has a mechanism somewhere")
    if defect.no_test is not None and defect.treatment not in ("not used", "kept"):
        raise ValueError(f"no_test: what is {defect.treatment} needs a test")
    return defect


def _check_keys(entry: dict[str, Any]) -> None:
    known = [field.name for field in fields(Defect)]
    for key in entry:
        if key not in known:
            raise ValueError(f"unknown key {key}{suggestion(str(key), known)}")
    missing = [key for key in ("title", "source", "when", "treatment", "how") if key not in entry]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    if ("tests" in entry) == ("no_test" in entry):
        raise ValueError("needs either tests or no_test, with the reason why there is none")


def _text(entry: dict[str, Any], key: str) -> str:
    value = entry[key]
    if not isinstance(value, str) or not value.strip() or "|" in value or "\n" in value:
        raise ValueError(f"{key} {value!r} is not one line of text without `|`")
    return value


def _version(entry: dict[str, Any], key: str) -> Version | None:
    if key not in entry:
        return None
    if not re.fullmatch(r"\d+\.\d+\.\d+", str(entry[key])):
        raise ValueError(f"{key} {entry[key]!r} is not a release like 0.19.0")
    return tuple(int(part) for part in entry[key].split("."))


def _conditions(when: Any) -> tuple[Condition, ...] | None:
    if when == "no run":
        return None
    if when == "every run":
        return ()
    if not isinstance(when, dict) or not when:
        raise ValueError(f"when {when!r} is neither `every run`, `no run` nor a mapping of conditions")
    conditions = tuple(Condition(str(name), wanted) for name, wanted in when.items())
    for condition in conditions:
        condition.check()
    return conditions


def _mechanisms(where: Any) -> dict[str, str]:
    if not isinstance(where, dict) or not _are_texts([*where, *where.values()]):
        raise ValueError(f"where {where!r} is not a mapping of files to a text in each")
    return where


def _tests(tests: Any) -> tuple[str, ...]:
    pattern = re.compile(r"tests/[\w/]+\.py::test_\w+")
    are_names = isinstance(tests, list) and _are_texts(tests) and all(pattern.fullmatch(test) for test in tests)
    if not are_names or not tests:
        raise ValueError(f"tests {tests!r} is not a list of names like tests/platform/test_x.py::test_y")
    return tuple(tests)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) and value for value in values)
