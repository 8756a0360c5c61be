"""Sizes, durations and places in the code as texts, and names that are meant for something else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LOCAL_FOLDERS = frozenset("model models data datasets tokenizer tokenizers checkpoint checkpoints runs output".split())
"""What folders of a user are called, and owners on a hub are not; recipes have models/NAME and data/NAME."""
_PACKAGE = str(Path(__file__).resolve().parents[1])  # and of the tools, whose folder begins alike
_SIZES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def size_text(num_bytes: int, *, exact: bool = False) -> str:
    """Return 1.5 GB for 1500000000; with `exact`, 1.5 GB (1500000000 bytes)."""
    for unit, factor in _SIZES:
        if num_bytes >= factor:
            text = f"{num_bytes / factor:.1f} {unit}"
            return f"{text} ({num_bytes} bytes)" if exact else text
    return f"{num_bytes} bytes"


def listed(items: Iterable[object], most: int, more: str = "more") -> str:
    """Return "1, 2 and 3 more": the first items, and the number of the others."""
    every = list(map(str, items))
    shown = ", ".join(every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} {more}"


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
    owner = Path(text).parent
    return _HUB_NAME.fullmatch(text) is not None and owner.name not in _LOCAL_FOLDERS and not owner.exists()


def how_to_download(name: str, what: str = "model", only: str = "") -> str:
    """Return what to do with a name of a hub where a folder is expected; `only` chooses files, with a last space."""
    folder, kind = Path(name).name, only if what == "model" else f"--repo-type {what} "
    return (
        f"nothing is downloaded: if it is a {what} of the hub, then on a machine with network `hf download {name} "
        f"{kind}--local-dir {folder}`, copy the folder here, and give {folder}"
    )


def hub_hint(path: str, what: str = "model") -> str:
    """Return the end of a refusal of a path that is not there: how to download it, if it looks like a hub's name."""
    return f"; {how_to_download(path, what)}" if is_hub_name(path) and not Path(path).exists() else ""


# Places in the code: file:line in function.


def place_of(error: BaseException) -> str:
    """Return where an error was raised, as the innermost line of this package where its traceback has any."""
    return place_in((frame, line) for frame, line, _ in reversed(list(inwards(error.__traceback__))))


def place_in(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of this package, else of a file that is not torch's, else of all; "nowhere" of none.

    Args:
        frames: (frame, line) from the innermost on.
    """
    known = list(frames)
    ours = [entry for entry in known if entry[0].f_code.co_filename.startswith(_PACKAGE)]
    outside = [entry for entry in known if "/torch/" not in entry[0].f_code.co_filename]
    if not known:
        return "nowhere"
    frame, line = (ours or outside or known)[0]
    file = frame.f_code.co_filename
    short = str(Path(file).relative_to(Path(_PACKAGE).parent)) if file.startswith(_PACKAGE) else file
    return f"{short}:{line} in {frame.f_code.co_name}"


def inwards(trace: TracebackType | None) -> Iterator[tuple[FrameType, int, int]]:
    """Yield (frame, line, index of the instruction) of a traceback, from the outermost on."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno, trace.tb_lasti
        trace = trace.tb_next
