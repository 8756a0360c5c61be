"""What the tests of the command line share."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_moe.config import cli, schema
from tests.config.deepspeed_files import parsed


@functools.cache
def parser() -> argparse.ArgumentParser:
    return cli._build_parser()


@pytest.fixture
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the parser once for all command lines, which takes longer than to read one."""
    built = parser()
    monkeypatch.setattr(cli, "_build_parser", lambda: built)


@pytest.fixture
def deepspeed(tmp_path: Path) -> Callable[..., schema.Run]:
    """`deepspeed(content, *flags, world=4)`: the run of these flags and a DeepSpeed file, ds.json, of this content."""
    return functools.partial(parsed, tmp_path / "ds.json")
