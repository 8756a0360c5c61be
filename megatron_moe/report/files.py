"""Files that are either the old one or the new one, whenever the power goes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_moe.report.records import finite


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file beside `path` for writing; it takes `path`'s place if the block ends well, or is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented JSON in one atomic step; NaN and infinity become null."""
    with replacing(path) as file:
        json.dump(finite(value), file, indent=2, allow_nan=False, ensure_ascii=False)
        file.write("\n")
