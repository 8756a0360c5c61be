"""The declaration of a setting: a dataclass field with its range, its choices, and what a resumed run may change.

Choices that others may add to are a registry. It knows the names of its entries without torch, so that the command
line can check and list them; the module that implements an entry registers it under its name when it is imported. An
entry that is registered from outside is from then on a value of the flag like any other:

    from megatron_moe.config.setting import SCORE_FUNCTIONS
    from megatron_moe.moe.routing import ScoreFunction

    SCORE_FUNCTIONS.register("softplus", ScoreFunction(torch.nn.functional.softplus, sums_to_one=False))

before the flags are read, and `--moe-router-score-function softplus` trains with it. Every rank has to register it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

Entry = TypeVar("Entry")


def setting(
    default: Any,
    help: str,
    *,
    choices: Collection | None = None,
    within: Range | None = None,
    unit: str = "",
    resume: Literal["same", "free"] = "same",
    report: bool = True,
) -> Any:
    """Declare a field with its default and what others need to know of it; lists are tuples.

    Args:
        choices: the values. within: the range of a number, or of each of several.
        resume: `free` for a setting in which runs that share a checkpoint may differ: no weight's shape or meaning
            depends on it.
        report: whether a resumed run reports that it differs; not for folders, files and modes.
    """
    known = {"choices": choices, "within": within, "unit": unit, "help": help, "resume": resume, "report": report}
    return dataclasses.field(default=default, metadata=known)


@dataclass(frozen=True)
class Range:
    """An interval of finite numbers; `above` and `below` are excluded bounds, `low` and `high` included ones."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None

    def holds(self, number: float) -> bool:
        return (
            math.isfinite(number)
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        return " and ".join(f"{word} {bound:.15g}" for word, bound in bounds.items() if bound is not None)


POSITIVE_COUNT = Range(low=1)
COUNT = Range(low=0)
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(low=0)
PROBABILITY = Range(low=0, below=1)


class Registry(Generic[Entry]):
    """A table of entries by their name in a flag, in the order in which the names became known.

    Args:
        field: the schema's field whose values these are; messages name its flag.
        names: the names of this package's entries, which their modules register.
    """

    def __init__(self, field: str, *names: str) -> None:
        self.flag = "--" + field.replace("_", "-")
        self._entries: dict[str, Entry | None] = dict.fromkeys(names)

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry under a name; a ValueError if the name has one already."""
        if self._entries.get(name) is not None:
            raise ValueError(f"{self.flag} {name}: is registered already; choose another name")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of a name; a ValueError if there is none."""
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(f"{self.flag} {name}: not one of {', '.join(self)}")
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


SCORE_FUNCTIONS: Registry = Registry("moe_router_score_function", "softmax", "sigmoid")
"""The functions from logits to scores, `moe.routing.ScoreFunction`. The softmax can also come after the choice, over
the chosen logits (without `--moe-router-pre-softmax`); all others score every expert before it."""

EXPERT_BACKENDS: Registry = Registry("moe_expert_backend", "grouped_mm", "te", "loop")
"""The backends of a rank's experts: a function (config, options, groups) -> `moe.experts.LocalExperts`, where
`config` is the engine's TransformerConfig, `options` a `MoEOptions` and `groups` the layer's `MoEGroups`."""

DISPATCHERS: Registry = Registry("moe_token_dispatcher_type", "alltoall", "allgather", "flex")
"""The dispatchers to experts on other ranks: a function (num_experts, groups, drops) -> `moe.dispatch.Dispatcher`, and
`alltoall` takes `by_node` too, `flex` its library and the library's multiprocessors. Without expert parallelism none of
these is used."""
