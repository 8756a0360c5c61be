"""What a rule is, how it is added, worded and checked; and the rules about single values, which come first.

A rule is a function that raises a `Refusal` if a run breaks it: the settings, why, and a setting that works; one that
computes nothing is declared with `refuse` or `unread`. Rules are checked in the order in which they are written.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_moe.config.errors import ConfigError, MissingPackage
from megatron_moe.config.fields import all_fields, choice_suggestion
from megatron_moe.config.rotary import ROTARY_FIELDS
from megatron_moe.config.schema import Run

Check = Callable[[Run, int], None]
Names = tuple[str, ...]

LAYOUT, LENGTH, FILES = "layout", "length", "files"
"""What a rule is about that not every program has: the layout on ranks, how long a run trains, data and files."""


@dataclass(frozen=True)
class Rule:
    """A check with its name.

    Args:
        needs: LAYOUT, LENGTH or FILES, or None for what every model has.
        asks_for_package: whether it also checks that a package is installed.
    """

    name: str
    check: Check
    needs: str | None
    asks_for_package: bool = False


@dataclass(frozen=True)
class Unread:
    """Settings that only some runs read. Other runs that set them are refused.

    Args:
        fields: the settings.
        readers: the settings that decide whether these are read; messages name them.
        reason: why they are not read, then a semicolon, then what to do.
        is_read: whether a run reads them.
        in_megatron: whether Megatron-LM accepts and ignores them: its command is taken without them.
        refused_there: fields of these that are refused in its command, too.
    """

    fields: tuple[str, ...]
    readers: tuple[str, ...]
    reason: str
    is_read: Callable[[Run], Any]
    in_megatron: bool
    refused_there: tuple[str, ...]


RULES: list[Rule] = []
UNREAD: list[Unread] = []


class Refusal(Exception):
    """What a rule raises if a run breaks it.

    Args:
        names: the settings to name, as they would be typed.
        reason: why, and a setting that works.
        package: whether a package is missing that the settings ask for.
    """

    def __init__(self, names: Iterable[str], reason: str, *, package: bool = False) -> None:
        self.names, self.reason, self.package = tuple(names), reason, package

    def error(self, run: Run) -> ConfigError:
        """Return the error for the user."""
        text = f"{', '.join(spelled(run, name) for name in self.names)}: {_possible(self.reason, run, self.names)}"
        return (MissingPackage if self.package else ConfigError)(text, fields=self.names)


def _possible(reason: str, run: Run, names: Names) -> str:
    """Return a reason whose advice is not to change the architecture of the folder that the run starts from."""
    if run.checkpoint.load_hf is None and not run.checkpoint.use_checkpoint_args:
        return reason
    where = "--use-checkpoint-args" if run.checkpoint.load_hf is None else f"--load-hf {run.checkpoint.load_hf}"
    stays = set()
    for name, field in all_fields().items():
        if field.is_architecture and name not in ROTARY_FIELDS:
            stays.add(field.flag)
    others = [all_fields()[name].flag for name in names if all_fields()[name].flag not in stays]
    why, _, advice = reason.rpartition("; ")
    asked = [flag for flag in re.findall(r"--[a-z0-9-]+", advice) if flag in stays]
    if not (why and asked and others):
        return reason
    return f"{why}; {', '.join(asked)} is the model's, from {where}: change or drop {' and '.join(others)}"


def rule(needs: str | None = None, asks_for_package: bool = False) -> Callable[[Callable[..., None]], Check]:
    """Make a function of (run) or of (run, world size) a rule, which raises a ConfigError for a `Refusal`.

    Args:
        needs: LAYOUT, LENGTH or FILES for a rule that programs without these leave out.
        asks_for_package: as `Rule`'s.
    """

    def added(function: Callable[..., None]) -> Check:
        takes_world_size = "world_size" in inspect.signature(function).parameters

        @functools.wraps(function)
        def check(run: Run, world_size: int) -> None:
            try:
                function(*((run, world_size) if takes_world_size else (run,)))
            except Refusal as refusal:
                raise refusal.error(run) from None

        RULES.append(Rule(function.__name__, check, needs, asks_for_package))
        return check

    return added


def refuse(
    name: str,
    settings: Names | Callable[[Run], Names],
    reason: str | Callable[[Run], str],
    *,
    when: Callable[[Run], Any],
    any_of: Names = (),
    needs: str | None = None,
) -> None:
    """Add the rule `name`, which refuses runs `when` it says so, with the settings to name and the reason.

    Args:
        any_of: settings of which a refused run has at least one; these are named before the others.
        needs: as `rule`'s.
    """

    def check(run: Run, world_size: int) -> None:
        among = set_among(run, any_of)
        if (among or not any_of) and when(run):
            named = settings(run) if callable(settings) else settings
            raise Refusal((*among, *named), reason(run) if callable(reason) else reason).error(run)

    RULES.append(Rule(name, check, needs))


def unread(
    fields: tuple[str, ...],
    readers: str | tuple[str, ...],
    reason: str,
    *,
    at: str | None = None,
    is_read: Callable[[Run], Any] | None = None,
    needs: str | None = None,
    in_megatron: bool = False,
    refused_there: tuple[str, ...] = (),
) -> None:
    """Add a rule that refuses settings which a run does not read, named by the first setting and the first reader.

    Args:
        at: the reader's value at which they are read; without it and `is_read`, any that switches the reader on.
        needs: as `rule`'s. The rest is as in `Unread`.
    """
    readers = (readers,) if isinstance(readers, str) else readers

    def reader_is_on(run: Run) -> bool:
        given = value(run, readers[0])
        return given == at if at is not None else given not in (None, False, 0)

    entry = Unread(fields, readers, reason, is_read or reader_is_on, in_megatron, refused_there)

    def check(run: Run, world_size: int) -> None:
        stray = set_among(run, fields)
        if stray and not entry.is_read(run):
            raise Refusal((*stray, *readers), reason).error(run)

    UNREAD.append(entry)
    RULES.append(Rule(f"{fields[0]}_needs_{readers[0]}", check, needs))


def value(run: Run, name: str) -> Any:
    """Return the value of a field, whichever section it is in."""
    return getattr(getattr(run, all_fields()[name].section), name)


def is_set(run: Run, name: str) -> bool:
    """Return whether a field differs from its default, which is as near as a `Run` comes to "was given"."""
    return value(run, name) != all_fields()[name].default


def set_among(run: Run, names: Iterable[str]) -> list[str]:
    """Return the named fields that differ from their defaults."""
    return [name for name in names if is_set(run, name)]


def is_half(run: Run) -> bool:
    """Return whether the model's dtype is bf16 or fp16."""
    return run.precision.bf16 or run.precision.fp16


def stage_flags(run: Run) -> Names:
    """Return the flags that made the ZeRO stage what it is."""
    if run.parallel.use_torch_fsdp2:
        return ("use_torch_fsdp2",)
    if run.parallel.data_parallel_sharding_strategy is None and run.optimizer.use_distributed_optimizer:
        return ("use_distributed_optimizer",)
    return ("data_parallel_sharding_strategy",)


def of_transformer_engine(run: Run) -> Names:
    """Return the settings that choose modules of Transformer Engine."""
    chosen = {"transformer_impl": "transformer_engine", "moe_expert_backend": "te"}
    return tuple(name for name, engine in chosen.items() if value(run, name) == engine)


def spelled(run: Run, name: str) -> str:
    """Return a field as it would be typed, with the place of a value that no flag of ours has given."""
    return all_fields()[name].typed(value(run, name)) + source(run, name)


def source(run: Run, name: str) -> str:
    """Return ` (key in file)` for a value that no flag of ours has given; else nothing."""
    return f" ({run.sources[name]})" if name in run.sources else ""


def divisors(number: int) -> str:
    """Return the divisors of a number up to 64, for "use one of": 1, 2, 4, 8."""
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)


def nearest_multiples(number: int, step: int) -> str:
    """Return the positive multiples of `step` on both sides of a number it does not divide: `8 or 16`."""
    below = number // step * step
    return f"{below} or {below + step}" if below else str(step)


# Rules about single values


_USUAL = {"ema_decay": 0.9999, "decoupled_lr": 1e-4}


@rule()
def values_are_allowed(run: Run) -> None:
    """Require a value that is listed where a field has choices, and is in its range; where no flags were read, too."""
    found = {}
    for name, field in all_fields().items():
        given, allowed = value(run, name), field.within
        for one in given if isinstance(given, tuple) else (given,):
            if one is not None and field.choices is not None and one not in field.choices:
                listed = ", ".join(map(str, field.choices))
                near = choice_suggestion(str(one), map(str, field.choices))
                found[name] = f"{field.flag} {one}: not one of {listed}{near}"
            elif one is not None and allowed is not None and not allowed.holds(one):
                finite = "" if math.isfinite(one) else "finite and "
                tried = (field.default, allowed.low, _USUAL.get(name), 1, 2, 0.1)
                works = next(n for n in tried if isinstance(n, (int, float)) and allowed.holds(n))
                found[name] = (
                    f"{field.flag} {one}{source(run, name)}: must be {finite}{allowed}; e.g. {field.flag} {works:g}"
                )
    if found:
        raise ConfigError(*found.values(), fields=found)


# Checking


def check_model(run: Run, world_size: int) -> None:
    """Check a model without the layout on ranks, length, data and files of a run; raises as `check`."""
    check(run, world_size, left_out={LAYOUT, LENGTH, FILES})


def check_layout(run: Run, world_size: int) -> None:
    """Check a model and its layout on ranks, without the length, data and files; raises as `check`."""
    check(run, world_size, left_out={LENGTH, FILES})


def missing_packages(run: Run, world_size: int) -> list[str]:
    """Return what `check` leaves out for a dry run: an error for each package that is missing here."""
    found = []
    for rule in RULES:
        if not rule.asks_for_package:
            continue
        try:
            rule.check(run, world_size)
        except MissingPackage as error:
            found.append(str(error))
        except ConfigError:
            pass  # `check` refuses it
    return found


def check(run: Run, world_size: int, left_out: Collection[str] = ()) -> None:
    """Refuse a run that breaks a rule, before anything is allocated; reads no contents and writes nothing.

    Args:
        left_out: what is not checked, of the `needs` of rules.

    Raises:
        ConfigError: of the first rule that the run breaks on `world_size` ranks, with errors of later rules about other
            settings. A later one about a setting that an earlier one names may be its consequence, and is not shown.
    """
    found: list[ConfigError] = []
    for rule in RULES:
        if rule.needs in left_out:
            continue
        try:
            rule.check(run, world_size)
        except MissingPackage as error:
            if not run.logging.dry_run:
                found.append(error)
        except ConfigError as error:
            if not found or (error.fields and all(error.fields.isdisjoint(other.fields) for other in found)):
                found.append(error)
            if not error.fields:
                break
        except Exception:
            if not found:
                raise
            break  # a rule relies on the rules before it
    if len(found) == 1:
        raise found[0]
    if found:
        raise ConfigError(*(problem for error in found for problem in error.problems))
