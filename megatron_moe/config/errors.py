"""Errors that are printed once and need no traceback: a mistake of the user, and a fault of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """A wrong input by the user, with a message that names the flag, its value, the rule and a setting that works.

    Every rank raises the same one; the entry point prints it once, from rank 0, and exits with status 2.

    Args:
        problems: the message; several become one with a line each.
        fields: names of the settings that they are about; empty where that is not known.
    """

    def __init__(self, *problems: str, fields: Iterable[str] = ()) -> None:
        several = len(problems) > 1
        super().__init__(listing(f"{len(problems)} flags cannot be taken", problems) if several else "".join(problems))
        self.problems, self.fields = problems, frozenset(fields)


class MachineError(ConfigError):
    """A mistake about one machine, which ranks on others need not find; the machine's first rank prints it, too."""


class MissingPackage(ConfigError):
    """A package that the run needs is not on this machine; a dry run, and a job for other machines, only say so."""


class RunFault(RuntimeError):
    """A fault of the run that no flag is to blame for, raised by all ranks; the entry point exits with status 1."""


def listing(head: str, lines: Sequence[str], limit: int = 40) -> str:
    """Return one message with a heading and a line for each of the first `limit` lines."""
    rest = [f"  ... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join([head, *(f"  {line}" for line in lines[:limit]), *rest])
