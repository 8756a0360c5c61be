"""Sizes and durations in readable units, and names that are meant for something else."""

from __future__ import annotations

import math
import re
from pathlib import Path

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
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


def is_hub_name(text: str) -> bool:
    """Return whether a path that is not there may be the name of a model of a hub: OWNER/MODEL, and no such owner here.

    It is certain of no path; a message that says how to get the files is right for a folder that is missing, too.
    """
    return _HUB_NAME.fullmatch(text) is not None and not Path(text).parent.exists()


def how_to_download(name: str, what: str = "model") -> str:
    """Return what to do with the name of a model or a dataset of a hub where a folder is expected."""
    folder, kind = Path(name).name, "" if what == "model" else f"--repo-type {what} "
    return (
        f"nothing is downloaded: if it is a {what} of the hub, then on a machine with network `hf download {name} "
        f"{kind}--local-dir {folder}`, copy the folder here, and give {folder}"
    )


def hub_hint(path: str, what: str = "model") -> str:
    """Return the end of a refusal of a path that is not there: how to download it, if it looks like a hub's name."""
    return f"; {how_to_download(path, what)}" if is_hub_name(path) and not Path(path).exists() else ""
