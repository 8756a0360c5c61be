"""Errors that are told once and need no traceback: a mistake of the user's, and a run that is not well."""

from __future__ import annotations


class ConfigError(ValueError):
    """A wrong input of the user's: one message that names the flag, its value, the rule and a setting that works.

    Every rank finds the same one; the entry point prints it once, from rank 0, and exits with status 2.
    """


class RunFault(RuntimeError):
    """Something went wrong in the run that no flag is to blame for, found by all ranks together.

    Every rank raises the same; the entry point prints it once, from rank 0, and exits with status 1.
    """
