"""Lines of progress: bytes, rate, time left. No torch."""

from __future__ import annotations

import sys
import time

from megatron_moe.checkpoint.durable import size

_BETWEEN = 5.0
"""Seconds between lines."""


def tell(line: str) -> None:
    """One line for the person who waits."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """What of a number of bytes is done; a line every few seconds and one at the end.

    Args:
        what: the word before the figures. total: bytes. done: those that an earlier start has done.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done = what, total, done
        self._before = done
        self._started = self._told = time.monotonic()

    def advance(self, count: int) -> None:
        """More bytes are done."""
        self._done += count
        if time.monotonic() - self._told >= _BETWEEN:
            self._line()

    def finish(self) -> None:
        """The last line."""
        self._done = self._total
        self._line()

    def _line(self) -> None:
        self._told = time.monotonic()
        seconds = max(self._told - self._started, 1e-3)
        rate = (self._done - self._before) / seconds
        share = 100 * self._done // self._total if self._total else 100
        left = f"{_duration((self._total - self._done) / rate)} left" if rate and self._done < self._total else ""
        parts = [
            f"{self._what} {size(self._done, exact=False)} of {size(self._total, exact=False)} ({share}%)",
            f"{size(int(rate), exact=False)}/s",
            left or f"{_duration(seconds)}",
        ]
        tell(", ".join(parts))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest}s"
