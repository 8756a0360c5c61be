#!/usr/bin/env python3
"""Prove that an installation left an image's own libraries as they were: record them before, compare them after.

    python docker/image_libraries.py record FILE
    python docker/image_libraries.py compare FILE

The image's torch, Transformer Engine and apex are built for one another. pip may replace one of them by a build that is
not, and the image would fail at its first step on a GPU. Nothing is imported: a build has no GPU.

Exit status: 0 recorded, or unchanged; 1 something changed, or the image has none of the libraries; 2 wrong arguments.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

# Module -> the distributions that may have installed it.
LIBRARIES = {
    "torch": ("torch",),
    "transformer_engine": ("transformer-engine", "transformer_engine_torch", "transformer_engine_cu12"),
    "apex": ("apex",),
    "triton": ("triton", "pytorch-triton"),
    "flash_attn": ("flash-attn",),
}
NEEDED = "torch"


def state() -> dict[str, dict[str, str]]:
    """Return library -> its versions and the file that Python would import, of those that are installed."""
    found: dict[str, dict[str, str]] = {}
    for module, distributions in LIBRARIES.items():
        spec = importlib.util.find_spec(module)
        if spec is None:
            continue
        found[module] = {"file": str(spec.origin)}
        for name in distributions:
            try:
                found[module][name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def main(argv: list[str]) -> int:
    """Record or compare; return the exit status."""
    if len(argv) != 2 or argv[0] not in ("record", "compare"):
        print("usage: image_libraries.py record|compare FILE", file=sys.stderr)
        return 2
    path, now = Path(argv[1]), state()
    if argv[0] == "record":
        if NEEDED not in now:
            print(f"this image has no {NEEDED}: begin with one that has", file=sys.stderr)
            return 1
        path.write_text(json.dumps(now, indent=1) + "\n")
        print(f"recorded {', '.join(now)}")
        return 0
    before = json.loads(path.read_text())
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    for name in changed:
        print(f"{name} changed: {before.get(name, 'missing')} -> {now.get(name, 'missing')}", file=sys.stderr)
    if changed:
        print("the image's libraries are built for one another; keep pip from replacing them", file=sys.stderr)
        return 1
    print(f"unchanged: {', '.join(now)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
