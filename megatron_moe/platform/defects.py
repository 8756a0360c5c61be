"""The known defects of megatron-core: `engine_defects.yaml`, read, and matched with the flags of a run.

Importing this module loads neither torch nor the engine, and does not read the file: `known_defects` does.
"""

from __future__ import annotations

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
        if self.name in all_fields():
            return getattr(getattr(values.run, all_fields()[self.name].section), self.name)
        return getattr(values, self.name)

    def __str__(self) -> str:
        """Return the condition in words, a schema field as its flag: `--sequence-parallel`, `tp times cp > 1`."""
        field = all_fields().get(self.name)
        name = self.name.replace("_", " ") if field is None else field.flag
        if self.wanted is True or self.wanted == "set":
            return name
        return f"no {name}" if self.wanted is False else f"{name} {self.wanted}"


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
    """Return the defects of a YAML file."""
    # Every run reads this; PyYAML's parser in Python takes ten times as long as libyaml's, which most builds have.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(_defect(entry) for entry in yaml.load(path.read_text(encoding="utf-8"), Loader=loader))


def _defect(entry: dict[str, Any]) -> Defect:
    """Return the defect of one entry of the file."""
    versions: dict[str, Any] = {
        key: tuple(map(int, entry[key].split("."))) for key in ("since", "fixed_in") if key in entry
    }
    read: dict[str, Any] = {"where": {}, **entry, **versions, "when": _conditions(entry["when"])}
    return Defect(**{**read, "tests": tuple(entry.get("tests", ()))})


def _conditions(when: str | dict[str, Any]) -> tuple[Condition, ...] | None:
    if isinstance(when, dict):
        return tuple(Condition(name, wanted) for name, wanted in when.items())
    return {"no run": None, "every run": ()}[when]
