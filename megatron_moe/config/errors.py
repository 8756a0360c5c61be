"""Errors that are told once and need no traceback: a mistake of the user's, and a run that is not well."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A wrong input of the user's: one message that names the flag, its value, the rule and a setting that works.

    Every rank finds the same one; the entry point prints it once, from rank 0, and exits with status 2.
    """


class RunFault(RuntimeError):
    """Something went wrong in the run that no flag is to blame for, found by all ranks together.

    Every rank raises the same; the entry point prints it once, from rank 0, and exits with status 1.
    """


def listing(head: str, lines: Sequence[str], limit: int = 40) -> str:
    """One message with a line for each of many things, the first `limit` of them."""
    rest = [f"  ... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join([head, *(f"  {line}" for line in lines[:limit]), *rest])
