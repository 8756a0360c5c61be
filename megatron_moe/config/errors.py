"""The one error that a person who wrote a command line or a file can cause."""

from __future__ import annotations


class ConfigError(ValueError):
    """A wrong input of the user's: one message that names the flag, its value, the rule and a setting that works.

    Every rank finds the same one; the entry point prints it once, from rank 0, and exits with status 2.
    """
