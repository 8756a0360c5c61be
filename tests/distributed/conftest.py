"""What the files of distributed tests share: results that several tests of a file are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def once(gloo: Any) -> Callable[..., list[Any]]:
    """Return `gloo.run` that computes a case once per file: the oracle of many layouts, a checkpoint that many load.

    Cases are the same when ranks, function and arguments are. Whoever asks gets the same objects and leaves them as
    they are.
    """
    known: dict[tuple[int, str, str], list[Any]] = {}

    def run(world_size: int, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        key = (world_size, function.__qualname__, repr(sorted(kwargs.items())))
        if key not in known:
            known[key] = gloo.run(world_size, function, **kwargs)
        return known[key]

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the tests of a file only read once it is written."""
    return tmp_path_factory.mktemp("shared")
