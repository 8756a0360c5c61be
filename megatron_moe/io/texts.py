"""Sizes and durations in readable units."""

from __future__ import annotations

import math

_SIZES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def size_text(num_bytes: int, *, exact: bool = False) -> str:
    """Return 1.5 GB for 1500000000; with `exact`, 1.5 GB (1500000000 bytes)."""
    for unit, factor in _SIZES:
        if num_bytes >= factor:
            text = f"{num_bytes / factor:.1f} {unit}"
            return f"{text} ({num_bytes} bytes)" if exact else text
    return f"{num_bytes} bytes"


def duration_text(seconds: float) -> str:
    """Return seconds in at most two units: 42s, 3m12s, 5h07m, 2d03h; '?' where it is not known."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
