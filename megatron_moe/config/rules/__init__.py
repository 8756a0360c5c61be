"""The rules that a run has to meet; `rule.py` says what one is.

Rules about single values come first, so that later rules may divide by them.
"""

from __future__ import annotations

from megatron_moe.config.errors import ConfigError, MissingPackage

# In the order in which they are checked.
from megatron_moe.config.rules import model, layout, precision, training, sources  # isort: skip
from megatron_moe.config.rules.rule import FILES, LAYOUT, LENGTH, RULES
from megatron_moe.config.schema import Run

__all__ = ["layout", "model", "precision", "sources", "training"]


def check_model(run: Run, world_size: int) -> None:
    """Check a model without the layout on ranks, length, data and files of a run.

    Raises:
        ConfigError: from the rules about model, experts, precision or optimizer that the run breaks.
    """
    _require(run, world_size, left_out={LAYOUT, LENGTH, FILES})


def check_layout(run: Run, world_size: int) -> None:
    """Check a model and its layout on ranks, without the length, data and files of a run that trains.

    Raises:
        ConfigError: from the rules about model, experts, layout, precision or optimizer that the run breaks.
    """
    _require(run, world_size, left_out={LENGTH, FILES})


def check(run: Run, world_size: int) -> None:
    """Refuse a run that breaks a rule, before anything is allocated; reads no contents and writes nothing.

    Raises:
        ConfigError: from the rules that the run breaks on `world_size` ranks.
    """
    _require(run, world_size, left_out=set())


def missing_packages(run: Run, world_size: int) -> list[str]:
    """Return what `check` leaves out for a dry run: an error for each package that is missing here."""
    found = []
    for check_package in (training.transformer_engine_is_installed, model.flex_dispatcher_can_work):
        try:
            check_package(run, world_size)
        except MissingPackage as error:
            found.append(str(error))
        except ConfigError:
            pass  # `check` refuses it
    return found


def _require(run: Run, world_size: int, left_out: set[str]) -> None:
    """Raise the error of the first rule that a run breaks, with errors of later rules about other settings.

    A later error about a setting that an earlier one names may be a consequence of that one, and is not shown.

    Args:
        left_out: what is not checked, of the `needs` of rules.
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
